# SPDX-License-Identifier: Apache-2.0
"""What a model can say about N aligned pairs: a closed union, one type for each kind of knowledge.

N aligned pairs, V vocabulary, K kept ids, H hidden. A student's prediction is `HiddenScores` (or `DenseScores`) too,
so an objective sees both sides in the same words. Logits are raw: before the temperature, after scale and soft-cap.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from cohobate.functional.kernels import kernels_for
from cohobate.functional.largest import largest_entries
from cohobate.functional.logprobs import check_temperature, gather_last, head_logits, upcast
from cohobate.functional.moments import side_moments


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """The map from hidden states to logits: `softcap(scale * (h W^T + bias))`."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def cut(self, vocab_size: int) -> "OutputHead":
        """The head over the first `vocab_size` (real) ids; padded rows get neither mass nor gradient."""
        if not 1 <= vocab_size <= self.vocab_size:
            raise ValueError(
                f"cannot cut a head of {self.vocab_size} ids to {vocab_size}: vocab_size must be in "
                f"[1, {self.vocab_size}], the ids of the shared tokenizer."
            )
        if vocab_size == self.vocab_size:
            return self
        bias = None if self.bias is None else self.bias[:vocab_size]
        return replace(self, weight=self.weight[:vocab_size], bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenScores:
    """Last hidden states and the head that reads them; the fused functions never make `[N, V]` of it."""

    hidden: Tensor  # [N, H]
    head: OutputHead

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def logits(self) -> Tensor:
        """`[N, V]` raw logits. For tests, small vocabularies and metrics; the training path does not call it."""
        head = self.head
        return head_logits(self.hidden, head.weight, bias=head.bias, scale=head.scale, softcap=head.softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseScores:
    """All logits of every pair."""

    dense: Tensor  # [N, V] raw logits

    @property
    def vocab_size(self) -> int:
        return self.dense.shape[1]

    def logits(self) -> Tensor:
        return self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKScores:
    """The K largest logits of every pair, the normaliser exact: log-prob = `logits / temperature - log_normalizer`."""

    ids: Tensor  # [N, K] int64, sorted by id
    logits: Tensor  # [N, K] raw
    log_normalizer: Tensor  # [N] logsumexp over the whole vocabulary at `temperature`
    log_normalizer_t1: Tensor  # [N] the same at temperature 1
    realized_logit: Tensor  # [N] raw logit of the token that stands there
    temperature: float
    vocab_size: int

    def logprobs(self, temperature: float | None = None) -> Tensor:
        """`[N, K]` true log-probabilities in nats at `temperature`, by default the scores' own; see `normalizer`."""
        temperature = self.temperature if temperature is None else temperature
        return self.logits / temperature - self.normalizer(temperature)[:, None]

    def normalizer(self, temperature: float) -> Tensor:
        """`[N]` logsumexp over the whole vocabulary, known at the scores' own temperature and at 1.

        Raises:
            ValueError: another temperature, at which the ids that were not kept are unknown.
        """
        if temperature == self.temperature:
            return self.log_normalizer
        if temperature == 1.0:
            return self.log_normalizer_t1
        raise ValueError(
            f"the teacher's top-k scores know their normaliser at temperature {self.temperature} and 1, not at "
            f"{temperature}. Set temperature to one of them, or score again."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledScores:
    """Only the log-probability of the token that stands there."""

    logprobs: Tensor  # [N] at `temperature`
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralScores:
    """What several teachers say of one batch, in their order; each of its own predictions."""

    scores: tuple["OneTeacherScores", ...]


OneTeacherScores = HiddenScores | DenseScores | TopKScores | SampledScores
TeacherScores = OneTeacherScores | SeveralScores

Rows = Literal["text", "pairs"]
"""Which token row p of some logits predicts, given ids: of a text, `ids[p + 1]`; of aligned pairs, `ids[p]`."""


def predictor_offset(rows: Rows) -> int:
    """How many places before a token the row stands that predicts it: 1 in a text, 0 in pairs.

    Raises:
        ValueError: `rows` is neither "text" nor "pairs".
    """
    if rows not in ("text", "pairs"):
        raise ValueError(f"rows must be 'text' (row p predicts id p + 1) or 'pairs' (row p, id p), got {rows!r}.")
    return 1 if rows == "text" else 0


def realized_ids(ids: Tensor, rows: Rows) -> Tensor:
    """The token that each row predicts, `[N]`; of a text's last row, which predicts none of `ids`, it means nothing.

    Raises:
        ValueError: `rows` is neither "text" nor "pairs".
    """
    return ids.roll(-predictor_offset(rows))


def top_k_scores(
    teacher_logits: Tensor, teacher_ids: Tensor, k: int, *, temperature: float = 1.0, rows: Rows = "text"
) -> TopKScores:
    """Keep the `k` largest of raw `teacher_logits [N, V]`, ties to the lower id, and the logit of the realized token.

    Args:
        teacher_ids: `[N]` the tokens of the text, whose row p predicts token p + 1; with `rows="pairs"` the token that
            each row predicts.
        temperature: of the normaliser that is kept beside that at temperature 1.

    Everything is detached, and no second `[N, V]` is made.
    """
    vocab_size = teacher_logits.shape[-1]
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k must be in [1, {vocab_size}], got {k}.")
    if teacher_ids.shape != teacher_logits.shape[:-1]:
        raise ValueError(
            f"teacher_ids must be [N] = {list(teacher_logits.shape[:-1])}, got {list(teacher_ids.shape)}."
        )
    check_temperature(temperature)
    logits = teacher_logits.detach()
    ids = largest_entries(logits, k)[1].sort(dim=-1).values

    def normalizer(scale: float) -> Tensor:
        return side_moments(*kernels_for(logits).side_sums(logits, scale))[0]

    at_one = normalizer(1.0)
    return TopKScores(
        ids=ids,
        logits=upcast(logits.gather(-1, ids)),
        log_normalizer=at_one if temperature == 1.0 else normalizer(1 / temperature),
        log_normalizer_t1=at_one,
        realized_logit=upcast(gather_last(logits, realized_ids(teacher_ids, rows))),
        temperature=temperature,
        vocab_size=vocab_size,
    )
