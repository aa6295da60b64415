# SPDX-License-Identifier: Apache-2.0
"""A model asked for the K likeliest ids of every prediction of some texts, which is all that a store keeps.

Texts of like length go together, up to a number of tokens, whatever their order in the data. Logits are made for a
block of rows at a time: `[N, V]` is never there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch, TeacherSide
from cohobate.errors import ConfigError
from cohobate.functional.kept_scores import FIELDS, kept_scores
from cohobate.functional.scores import DenseScores, HiddenScores, TopKScores
from cohobate.teachers.load import load_model
from cohobate.teachers.local import LocalTeacher
from cohobate.teachers.protocol import Teacher
from cohobate.teachers.store_format import Header, Text

BATCH_TOKENS = 8192


class TextScorer:
    """`teacher` over whole texts, in batches."""

    def __init__(
        self,
        teacher: Teacher,
        *,
        top_k: int,
        temperature: float = 1.0,
        batch_tokens: int = BATCH_TOKENS,
        on_rows: Callable[[int], None] | None = None,
    ) -> None:
        """`teacher` gives hidden states or logits over the ids of the store. `on_rows`: told how many are done."""
        if not issubclass(teacher.provides, HiddenScores | DenseScores):
            raise ConfigError(
                f"a store keeps the likeliest of all ids, but {type(teacher).__name__} provides "
                f"{teacher.provides.__name__}. Score with a model (LocalTeacher)."
            )
        self.teacher = teacher
        self.top_k, self.temperature = top_k, temperature
        self.batch_tokens = batch_tokens
        self._on_rows = on_rows

    def __call__(self, texts: Sequence[Text]) -> TopKScores:
        """The scores of all predictions of the texts in order, on the CPU."""
        begins = np.cumsum([0, *(text.num_rows for text in texts)])
        whole: dict[str, Tensor] = {}
        vocab_size = 0
        for part in planned(texts, self.batch_tokens):
            batch = text_batch([texts[i] for i in part])
            said = self.teacher.score(batch)
            assert isinstance(said, HiddenScores | DenseScores)
            scores = kept_scores(said, batch.target_ids, self.top_k, temperature=self.temperature)
            place = torch.from_numpy(np.concatenate([np.arange(begins[i], begins[i + 1]) for i in part]))
            vocab_size = scores.vocab_size
            for name in FIELDS:
                value = getattr(scores, name).cpu()
                if name not in whole:
                    whole[name] = value.new_empty((int(begins[-1]), *value.shape[1:]))
                whole[name][place] = value
            if self._on_rows is not None:
                self._on_rows(len(place))
        return TopKScores(**whole, temperature=self.temperature, vocab_size=vocab_size)


def planned(texts: Sequence[Text], batch_tokens: int) -> list[list[int]]:
    """Numbers of the texts that go together: rows times the widest keep to `batch_tokens`, or it is one text."""
    plan: list[list[int]] = []
    for i in sorted(range(len(texts)), key=lambda i: (-len(texts[i].ids), i)):
        if plan and len(texts[plan[-1][0]].ids) * (len(plan[-1]) + 1) <= batch_tokens:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def text_batch(texts: Sequence[Text]) -> AlignedBatch:
    """A batch whose teacher reads the texts; nothing is known of a student."""
    width = max(len(text.ids) for text in texts)
    ids = torch.zeros((len(texts), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for r, text in enumerate(texts):
        ids[r, : len(text.ids)] = torch.from_numpy(text.ids)
        mask[r, : len(text.ids)] = 1
    index = np.concatenate([np.arange(text.first, len(text.ids) - 1) + r * width for r, text in enumerate(texts)])
    pair_index = torch.from_numpy(index)
    position_ids = torch.where(mask != 0, torch.arange(width), 0)
    side = TeacherSide(
        model_inputs={"input_ids": ids, "attention_mask": mask, "position_ids": position_ids},
        pair_index=pair_index,
        target_ids=ids.flatten()[pair_index + 1],
        row=pair_index // width,
    )
    return AlignedBatch(
        student=side,
        teacher=side,
        target_ids=side.target_ids,
        weights=torch.ones(len(index)),
        row=side.row,
        is_sampled=torch.zeros(len(texts), dtype=torch.bool),
        sample_ids=tuple(text.sample_id for text in texts),
    )


def model_scorer(
    header: Header,
    *,
    model: str,
    dtype: str | None = None,
    revision: str | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> TextScorer:
    """The model of a folder or name, on a GPU if there is one, as the scorer of a store."""
    loaded: Any = load_model(model, dtype=dtype, revision=revision)
    device = "cuda" if torch.cuda.is_available() else None
    return TextScorer(
        LocalTeacher(loaded, vocab_size=header.vocab_size, device=device),
        top_k=header.top_k,
        temperature=header.temperature,
        batch_tokens=header.batch_tokens,
        on_rows=on_rows,
    )
