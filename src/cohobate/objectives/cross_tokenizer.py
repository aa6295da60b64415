# SPDX-License-Identifier: Apache-2.0
"""CSD and X-Token as objectives: the divergence of a chunk and its options; what they share is `several_teachers.py`.

CSD compares events that both vocabularies can express, X-Token the student's distribution pushed onto the teacher's
vocabulary. Either may have teachers with the student's own tokenizer among its teachers.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohobate.align.spans import Chunks
from cohobate.errors import ConfigError
from cohobate.functional.common_support import common_support_divergence
from cohobate.functional.divergences import check_beta
from cohobate.functional.projection import Mode, projected_kl
from cohobate.functional.scores import DenseScores, HiddenScores, TopKScores
from cohobate.functional.support_events import ForcedMode, SupportOptions
from cohobate.objectives.compared import Artefact, TeacherText, whole_chunks
from cohobate.objectives.protocol import config_errors
from cohobate.objectives.several_teachers import SeveralTeachersObjective
from cohobate.objectives.teacher_options import warn_once
from cohobate.vocab import Projection, SubtokenTables


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSupportObjective(SeveralTeachersObjective):
    """CSD over the chunks that each teacher's tokens share with the student's, in nats: `common_support_divergence`.

    `parts` holds each teacher's `SubtokenTables`, or None for a teacher with the student's own tokenizer, which is
    compared pair by pair, as `same_vocab_beta` says, on columns that all pairs share. Where no teacher has tables, no
    setting of a chunk is read. Terms `kd/0`, `kd/1`, ..., `ce`.
    """

    beta: float = 0.5  # weights the teacher: 0 forward KL, 1 reverse KL, between them JSD
    same_vocab_beta: float = 0.0  # the same for teachers with the student's own tokenizer
    mismatch_weight: float = 5.0  # of chunks that are not one token on both sides; in no count
    realized_only_mismatch: bool = False
    keep_realized: bool = True
    min_support: int = 1
    forced_mode: ForcedMode = "union"

    def __post_init__(self) -> None:
        SeveralTeachersObjective.__post_init__(self)
        with config_errors():
            check_beta(self.beta)
            check_beta(self.same_vocab_beta)
            SupportOptions(min_support=self.min_support, forced_mode=self.forced_mode)
        if not (math.isfinite(self.mismatch_weight) and self.mismatch_weight >= 0):
            raise ConfigError(f"mismatch_weight must be a finite number >= 0, got {self.mismatch_weight}.")
        for i, tables in enumerate(self.parts):
            if tables is not None and len(tables.common[0]) == 0:
                raise ConfigError(
                    f"the sub-token tables of teachers[{i}] pair no student token with one teacher token: every chunk "
                    "would be a mismatch. Check that they are those of these two tokenizers (cohobate subtokens "
                    "validate)."
                )
        if self.temperature != 1.0 and any(tables is not None for tables in self.parts):
            warn_once(
                f"temperature={self.temperature}: a chunk's probability is a product along its tokens, and a product "
                "of tempered factors is no tempered probability, so two models that agree on a chunk can differ. Keep "
                "it at 1."
            )

    @property
    def artefact(self) -> Artefact:
        return Artefact(kind=SubtokenTables, name="sub-token tables", command="cohobate subtokens")

    @property
    def kinds(self) -> tuple[type, ...]:
        return (HiddenScores, DenseScores, TopKScores)

    @property
    def pair_beta(self) -> float:
        return self.same_vocab_beta

    def sizes(self, part: Any) -> tuple[int, int]:
        return len(part.student_to_teacher), len(part.teacher_to_student)

    def factors(self, mismatched: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.where(mismatched, self.mismatch_weight, 1.0)

    def divergence(
        self,
        teacher: int,
        columns: Tensor | None,
        student: tuple[Tensor, Tensor],
        known: tuple[Tensor | TopKScores, Tensor],
        chunks: Chunks,
    ) -> Tensor:
        out = common_support_divergence(
            *student,
            *known,
            chunks,
            self.parts[teacher],
            temperature=self.temperature,
            beta=self.beta,
            realized_only_mismatch=self.realized_only_mismatch,
            keep_realized=self.keep_realized,
            min_support=self.min_support,
            forced_mode=self.forced_mode,
            rows="pairs",
        )
        return out.divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedObjective(SeveralTeachersObjective):
    """X-Token over the chunks that each teacher's tokens share with the student's, in nats: `projected_kl`.

    `parts` holds each teacher's `Projection`, or None for a teacher with the student's own tokenizer. It reads the
    teachers' whole rows. Terms `kd/0`, `kd/1`, ..., `ce`.
    """

    mode: Mode = "pkl"
    modes: tuple[Mode | None, ...] = ()  # of single teachers, in place of `mode`
    reverse: bool = False  # KL(student || teacher)
    exact_only: bool = False  # only chunks of one token on both sides that stand for each other
    vocab_top_k: int | None = 8192  # (pkl) the teacher's most important columns, of the step; None: all
    uncommon_top_k: int = 8192  # (gold, hkl)
    drop_unreachable: bool = True  # (pkl)

    def __post_init__(self) -> None:
        SeveralTeachersObjective.__post_init__(self)
        for mode in (self.mode, *self.modes):
            if mode not in ("pkl", "gold", "hkl", None):
                raise ConfigError(f"mode must be 'pkl', 'gold' or 'hkl', got {mode!r}.")
        if self.vocab_top_k is not None and self.vocab_top_k < 1:
            raise ConfigError(f"vocab_top_k must be at least 1, or None for all columns, got {self.vocab_top_k}.")
        if self.uncommon_top_k < 0:
            raise ConfigError(f"uncommon_top_k must be >= 0, got {self.uncommon_top_k}.")
        self._check_modes()
        for i, projection in enumerate(self.parts):
            if projection is not None and not projection.exact.any():
                raise ConfigError(
                    f"the projection of teachers[{i}] has no token that both vocabularies share. Check that it is "
                    "that of these two tokenizers (cohobate projection validate)."
                )

    def _check_modes(self) -> None:
        if not self.modes:
            return
        if len(self.modes) != len(self.parts):
            raise ConfigError(f"modes must be one (or None) for each of {len(self.parts)} teachers, got {self.modes}.")
        if self.kd_mode != "sum":
            raise ConfigError(
                f"modes={self.modes} gives single teachers a loss of their own, which only kd_mode='sum' can add up, "
                f"got kd_mode={self.kd_mode!r}. Use mode, which is for all."
            )
        for i, (mode, part) in enumerate(zip(self.modes, self.parts, strict=True)):
            if mode is not None and part is None:
                raise ConfigError(
                    f"modes[{i}]={mode!r}, but teachers[{i}] has the student's tokenizer and no projection. Leave it "
                    "None."
                )

    @property
    def artefact(self) -> Artefact:
        return Artefact(kind=Projection, name="projection", command="cohobate projection")

    @property
    def kinds(self) -> tuple[type, ...]:
        return (HiddenScores, DenseScores)

    @property
    def pair_beta(self) -> float:
        return 1.0 if self.reverse else 0.0

    def sizes(self, part: Any) -> tuple[int, int]:
        return part.student_vocab_size, part.teacher_vocab_size

    def mode_of(self, teacher: int) -> Mode:
        """The loss of one teacher."""
        own = self.modes[teacher] if self.modes else None
        return self.mode if own is None else own

    def counted(self, student_ids: Tensor, text: TeacherText) -> NDArray[np.bool_]:
        assert text.chunks is not None
        whole = whole_chunks(text.chunks)
        return whole & self._is_exact(student_ids, text) if self.exact_only else whole

    def _is_exact(self, student_ids: Tensor, text: TeacherText) -> NDArray[np.bool_]:
        chunks, projection = text.chunks, self.parts[text.teacher]
        assert chunks is not None
        single = (chunks.student_end - chunks.student_start == 1) & (chunks.teacher_end - chunks.teacher_start == 1)
        exact = np.zeros(len(single), dtype=np.bool_)
        ours = student_ids.cpu().numpy()[chunks.student_start[single]]
        theirs = text.target_ids.cpu().numpy()[chunks.teacher_start[single]]
        exact[single] = projection.exact[ours] & (projection.indices[ours, 0] == theirs)
        return exact

    def num_columns(self, teacher: int) -> int | None:
        return self.vocab_top_k if self.mode_of(teacher) == "pkl" else None

    def on_all_columns(self) -> dict[str, Any]:
        return {"same_vocab_top_k": None, "vocab_top_k": None}

    def divergence(
        self,
        teacher: int,
        columns: Tensor | None,
        student: tuple[Tensor, Tensor],
        known: tuple[Tensor | TopKScores, Tensor],
        chunks: Chunks,
    ) -> Tensor:
        logits, ids = known
        assert isinstance(logits, Tensor)
        if columns is None:
            columns = torch.arange(logits.shape[1])
        out = projected_kl(
            *student,
            logits,
            ids,
            chunks,
            self.parts[teacher],
            temperature=self.temperature,
            reverse=self.reverse,
            mode=self.mode_of(teacher),
            uncommon_top_k=self.uncommon_top_k,
            drop_unreachable=self.drop_unreachable,
            columns=columns,
            rows="pairs",
        )
        return out.divergence
