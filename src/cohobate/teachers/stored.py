# SPDX-License-Identifier: Apache-2.0
"""A teacher that was asked before: its scores are read from a store that `cohobate score` wrote.

Nothing of the model is needed, only the tokenizer whose ids the store holds, as proof that they mean the same today. A
store knows recorded completions and no others, and each by all tokens that the teacher read: a row that has changed
since is an error, never somebody else's score.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cohobate.align.cross_tokenizer import TeacherText
from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError, DataError, VocabularyMismatch
from cohobate.functional.largest import largest_entries
from cohobate.functional.scores import TopKScores
from cohobate.teachers.store_format import Columns, Header, asked_texts, decoded, prompt_settings, row_columns
from cohobate.teachers.store_reader import Store
from cohobate.vocab import fingerprint, template_fingerprint
from cohobate.vocab.tokens import describe, merges_fingerprint

Reader = Literal["student", "teacher"]  # whose tokens a teacher reads


class StoredTeacher:
    """Reads `TopKScores` for the recorded completions that a store was made from.

    A teacher with the student's tokenizer or with its own, as the store was made; `texts` says which to the trainer.
    """

    provides = TopKScores
    recorded_only = True  # it knows nothing of a completion that is sampled in the run

    def __init__(
        self,
        path: str | Path,
        tokenizer: Any,
        *,
        top_k: int | None = None,
        temperature: float | None = None,
        prompts: Any = None,
        reads: Reader | None = None,
        run: Sequence[str] = (),
    ) -> None:
        """`tokenizer`: the student's; the teacher's for a store that was made with the teacher's own.

        `top_k`: fewer ids than the store has. `temperature`: of the normaliser, the store's or 1; None is the store's.
        `prompts`: the `PromptConfig` of a teacher with its own tokenizer, if it was scored with one. `reads`: whose
        tokens the run will have it read; None: whichever the store holds. `run`: as `Store`, for messages.

        Raises:
            ConfigError: no finished store, or one that cannot answer with this `top_k` or `temperature`.
            VocabularyMismatch: the tokenizer is not the one of the store, and what differs.
            DataError: a damaged file, with the command that mends it.
        """
        self.store = Store(path, run=run)
        header = self.store.header
        self._check_side(header, reads)
        self._check_tokenizer(header, tokenizer)
        if top_k is not None and not 1 <= top_k <= header.top_k:
            raise ConfigError(
                f"top_k={top_k}, but the teacher store {path} keeps {header.top_k} ids of each prediction. Take at "
                f"most {header.top_k}, or score again with more. {self.store.anew(top_k=max(1, top_k))}"
            )
        if temperature not in (None, 1.0, header.temperature):
            raise ConfigError(
                f"temperature={temperature}, but the teacher store {path} has the normalisers at "
                f"{'' if header.temperature == 1 else f'{header.temperature:g} and '}1. Take one of them, or score "
                f"again at {temperature:g}. "
                f"{self.store.anew(temperature=temperature)}"
            )
        self.top_k = top_k or header.top_k
        self.temperature = header.temperature if temperature is None else temperature
        self.vocab_size = header.vocab_size
        if header.tokens == "student" and prompts is not None:
            raise ConfigError(
                f"prompts would have no effect: the teacher of the store {path} reads the student's prompts. Leave "
                "them out."
            )
        self._text = None if header.tokens == "student" else self._teacher_text(header, tokenizer, prompts)

    @property
    def texts(self) -> tuple[TeacherText] | None:
        """What the trainer is to write for this teacher; None: it reads the student's tokens."""
        return None if self._text is None else (self._text,)

    def score(self, batch: AlignedBatch, /) -> TopKScores:
        """The stored scores of the batch's predictions, on its device.

        Raises:
            DataError: naming the first row that the store does not have as the teacher would read it now.
        """
        parts: list[Columns] = []
        for asked in asked_texts(batch):
            if bool(batch.is_sampled[asked.row]):
                raise DataError(
                    f"the completion of row {asked.text.sample_id!r} was sampled in this run, and a teacher store "
                    "knows only recorded ones. Set sampling.on_policy_fraction=0 and give every row a completion, or "
                    "use a live teacher or a server."
                )
            parts.append(self.store.read(asked))
        scores = decoded(_joined(parts, self.store.header), self.store.header)
        device = batch.teacher.pair_index.device
        ids, logits = scores.ids, scores.logits
        if self.top_k < ids.shape[1]:
            kept = largest_entries(logits, self.top_k)[1].sort(dim=-1).values
            ids, logits = ids.gather(1, kept), logits.gather(1, kept)
        return TopKScores(
            ids=ids.to(device),
            logits=logits.to(device),
            log_normalizer=scores.normalizer(self.temperature).to(device),
            log_normalizer_t1=scores.log_normalizer_t1.to(device),
            realized_logit=scores.realized_logit.to(device),
            temperature=self.temperature,
            vocab_size=self.vocab_size,
        )

    def check_batch(self, batch: AlignedBatch, /) -> None:
        """Refuse now, with a `DataError`, the first row that the store does not have with the tokens of `batch`.

        Compares hashes and reads no shard, so that all rows of a run can be held against the store before it.
        """
        for asked in asked_texts(batch):
            self.store.check(asked.text)

    def _check_tokenizer(self, header: Header, tokenizer: Any) -> None:
        found = {
            "tokenizer": fingerprint(tokenizer),
            "merges": merges_fingerprint(tokenizer),
            "template": template_fingerprint(tokenizer),
        }
        what = {"tokenizer": "ids or special-token roles", "merges": "merges", "template": "chat template"}
        changed = [what[name] for name, value in found.items() if getattr(header, name) != value]
        if changed:
            raise VocabularyMismatch(
                f"the teacher store {self.store.folder} was made with another {header.tokens}'s tokenizer than "
                f"{describe(tokenizer)}: the {' and the '.join(changed)} differ. Pass the {header.tokens}'s, with "
                f"which it was made, or score again with this one. {self.store.anew()}"
            )

    def _check_side(self, header: Header, reads: Reader | None) -> None:
        if reads in (None, header.tokens):
            return
        store = f"the teacher store {self.store.folder}"
        if reads == "teacher":
            raise ConfigError(
                f"{store} holds scores of the student's tokens: it was made without --own-tokenizer. Here the teacher "
                f"has an aligner, so it reads its own tokens. {self.store.anew(own_tokenizer=True)}"
            )
        raise ConfigError(
            f"{store} holds scores of the teacher's own tokens: it was made with --own-tokenizer. Here the teacher "
            "has no aligner, so it reads the student's. Give it one, as an entry of `teachers` (objective csd). Or: "
            f"{self.store.anew(own_tokenizer=False)}"
        )

    def _teacher_text(self, header: Header, tokenizer: Any, prompts: Any) -> TeacherText:
        found = prompt_settings(prompts)
        if found != (header.prompts or None):
            raise ConfigError(
                f"prompts of the teacher are {found} here and {header.prompts} in the teacher store "
                f"{self.store.folder}. Pass the PromptConfig that it was made with, or score again. "
                f"{self.store.anew()}"
            )
        return TeacherText(
            tokenizer=tokenizer,
            prompts=prompts,
            special_roles=header.special_roles or None,
            max_length=header.max_length,
        )


def _joined(parts: list[Columns], header: Header) -> Columns:
    """The predictions of all texts behind each other; of none, columns without rows."""
    if len(parts) == 1:
        return parts[0]
    columns = row_columns(header)
    empty = {name: np.zeros((0, *width), dtype) for name, (dtype, width) in columns.items()}
    return {name: np.concatenate([empty[name], *(part[name] for part in parts)]) for name in columns}
