# SPDX-License-Identifier: Apache-2.0
"""A teacher beside its own tokenizer: it reads and predicts its own tokens of the student's text.

The inner teacher stays what it is; this one says which text it reads (`texts`, by which the trainer makes its side of
a batch), cuts its head to the ids that its tokenizer has, and can keep the K largest logits of each prediction instead
of hidden states and a head. What the two vocabularies have to do with each other is the objective's matter.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cohobate.align.cross_tokenizer import TeacherText
from cohobate.align.rollout import AlignedBatch, TeacherSide
from cohobate.errors import ConfigError
from cohobate.functional.kept_scores import kept_scores
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores, TopKScores
from cohobate.parallel.modules import unwrapped
from cohobate.teachers.protocol import Teacher
from cohobate.vocab import real_vocab_size
from cohobate.vocab.tokens import describe


class OwnTokenizerTeacher:
    """`teacher` reading text in tokens of `tokenizer`."""

    def __init__(
        self,
        teacher: Teacher,
        tokenizer: Any,
        *,
        special_roles: Mapping[str, str] | None = None,
        max_length: int | None = None,
        top_k: int | None = None,
        prompts: Any = None,
        temperature: float = 1.0,
    ) -> None:
        """`special_roles`: student's control token -> this tokenizer's, where they are not paired by their role.

        `max_length`: tokens of a row, prompt included; by default the positions that the teacher's model has.
        `top_k`: give `TopKScores` with their normaliser at `temperature` and at 1; None gives what `teacher` gives.
        `prompts`: a `PromptConfig` with a system prompt or template arguments of the teacher's own.
        """
        if isinstance(teacher, nn.Module):
            raise ConfigError(
                f"OwnTokenizerTeacher needs a Teacher, got the model {type(teacher).__name__}. Put it into a "
                "LocalTeacher first."
            )
        self.teacher = teacher
        self.tokenizer = tokenizer
        self.top_k, self.temperature = top_k, temperature
        self.vocab_size = real_vocab_size(tokenizer)
        if top_k is not None:
            _check_top_k(teacher, top_k, self.vocab_size)
        self._check_width(_head_width(teacher))
        limits = [limit for limit in (max_length, _positions(teacher)) if limit is not None]
        self.text = TeacherText(
            tokenizer=tokenizer,
            prompts=prompts,
            special_roles=special_roles,
            max_length=min(limits) if limits else None,
        )

    @property
    def texts(self) -> tuple[TeacherText]:
        """How this one teacher comes to its tokens."""
        return (self.text,)

    @property
    def provides(self) -> type:
        """`TopKScores`, or the kind that the inner teacher provides."""
        return self.teacher.provides if self.top_k is None else TopKScores

    def score(self, batch: AlignedBatch, /) -> TeacherScores:
        """Scores of the M predictions of `batch.teacher`, a `TeacherSide`, over the tokenizer's real ids."""
        side = batch.teacher
        if not isinstance(side, TeacherSide):
            raise ConfigError(
                "this batch was aligned for a teacher with the student's tokenizer, but its teacher has its own. The "
                "trainer reads that from the teacher's `texts`: pass the OwnTokenizerTeacher itself."
            )
        scores = self._cut(self.teacher.score(batch))
        if self.top_k is None:
            return scores
        assert isinstance(scores, HiddenScores | DenseScores)
        return kept_scores(scores, side.target_ids, self.top_k, temperature=self.temperature)

    def pack_rows(self, name: str = "teacher") -> None:
        """The inner teacher's, if it has a model here."""
        pack = getattr(self.teacher, "pack_rows", None)
        if pack is not None:
            pack(name)

    def prefetch(self, batch: AlignedBatch, /) -> None:
        """The inner teacher's, if it has one."""
        begin = getattr(self.teacher, "prefetch", None)
        if begin is not None:
            begin(batch)

    def close(self) -> None:
        """The inner teacher's, if it has one."""
        close = getattr(self.teacher, "close", None)
        if close is not None:
            close()

    def after_optimizer_step(self) -> None:
        """The inner teacher's, if it has one."""
        update = getattr(self.teacher, "after_optimizer_step", None)
        if update is not None:
            update()

    def state_dict(self) -> dict[str, Tensor]:
        """The inner teacher's; empty if it has none."""
        state = getattr(self.teacher, "state_dict", None)
        return {} if state is None else state()

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        load_member_state(self.teacher, state)

    def _cut(self, scores: TeacherScores) -> TeacherScores:
        """Without the rows of a padded head; a head that lacks ids of the tokenizer is refused."""
        width = getattr(scores, "vocab_size", self.vocab_size)
        self._check_width(width)
        if isinstance(scores, HiddenScores):
            return HiddenScores(hidden=scores.hidden, head=scores.head.cut(self.vocab_size))
        if isinstance(scores, DenseScores):
            return DenseScores(dense=scores.dense[:, : self.vocab_size])
        if width != self.vocab_size:
            raise ConfigError(
                f"the teacher's {type(scores).__name__} are over {width} ids, but its tokenizer has {self.vocab_size}."
                " Cut them where they are made."
            )
        return scores

    def _check_width(self, width: int | None) -> None:
        if width is not None and width < self.vocab_size:
            raise ConfigError(
                f"the teacher predicts {width} ids, but {describe(self.tokenizer)} has "
                f"{self.vocab_size}. Pass the tokenizer that belongs to the teacher, or resize its embeddings."
            )


def load_member_state(teacher: Any, state: dict[str, Tensor]) -> None:
    """Restore a teacher that may carry no state; state for one that carries none is refused."""
    load = getattr(teacher, "load_state_dict", None)
    if load is not None:
        load(state)
    elif state:
        raise ValueError(
            f"{type(teacher).__name__} carries no state, but the checkpoint has {len(state)} tensors for it (first "
            f"{min(state)!r}). Resume with the teachers of the run that wrote it."
        )


def _check_top_k(teacher: Teacher, top_k: int, vocab_size: int) -> None:
    if not 1 <= top_k <= vocab_size:
        raise ConfigError(f"top_k must be in [1, {vocab_size}], the ids of the teacher's tokenizer, got {top_k}.")
    if not issubclass(teacher.provides, HiddenScores | DenseScores):
        raise ConfigError(
            f"top_k keeps the largest of all logits, but {type(teacher).__name__} provides "
            f"{teacher.provides.__name__}. Leave top_k out."
        )


def _head_width(teacher: Teacher) -> int | None:
    """The ids that the teacher's model predicts, if it has one here."""
    model = getattr(teacher, "model", None)
    getter = getattr(unwrapped(model), "get_output_embeddings", None) if isinstance(model, nn.Module) else None
    head = None if getter is None else getter()
    weight = getattr(head, "weight", None)
    return None if weight is None else weight.shape[0]


def _positions(teacher: Teacher) -> int | None:
    """The positions that the teacher's model has: beyond them it predicts noise, and nothing would say so."""
    model = getattr(teacher, "model", None)
    config = getattr(unwrapped(model), "config", None) if isinstance(model, nn.Module) else None
    config = getattr(config, "text_config", None) or config
    return getattr(config, "max_position_embeddings", None)
