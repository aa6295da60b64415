# SPDX-License-Identifier: Apache-2.0
"""How two vocabularies relate: what each id stands for, and whether it is the same on both sides."""

from cohobate.vocab.projection import Projection
from cohobate.vocab.subtokens import SubtokenTables
from cohobate.vocab.tokens import (
    SharedVocabulary,
    check_config_vocab_size,
    check_same_vocabulary,
    fingerprint,
    real_vocab_size,
    special_roles,
    template_fingerprint,
    token_bytes,
)

__all__ = [
    "Projection",
    "SharedVocabulary",
    "SubtokenTables",
    "check_config_vocab_size",
    "check_same_vocabulary",
    "fingerprint",
    "real_vocab_size",
    "special_roles",
    "template_fingerprint",
    "token_bytes",
]
