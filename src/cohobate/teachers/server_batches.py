# SPDX-License-Identifier: Apache-2.0
"""From an aligned batch to prompts for a server, and from its answers back to the batch's predictions.

A server gets tokens without padding, in their order, up to the last one that is asked about; rows without a prediction
are not sent. Its answer speaks of tokens (the entry of a token is what was predicted *before* it), a batch of
predictions, so the one shift between the two is made here and nowhere else.

M predictions, K kept ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cohobate.align.rollout import AlignedBatch, TeacherSide
from cohobate.errors import DataError
from cohobate.functional.scores import SampledScores, TopKScores
from cohobate.teachers.server_answers import Asked, Row

_ALL_BUT = 0.999  # mass on ids that the student lacks, beyond which what is left cannot be renormalised


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to ask for a batch, and where each prediction's answer stands among all that is asked."""

    asked: tuple[Asked, ...]
    place: np.ndarray  # [M] int64 into the positions of `asked`, put behind each other
    target_ids: np.ndarray  # [M] int64


def plan_of(batch: AlignedBatch) -> Plan:
    """The prompts of the batch's teacher side.

    Raises:
        ValueError: a prediction at padding, or one of another token than the row has next.
    """
    side = batch.teacher
    targets = side.target_ids if isinstance(side, TeacherSide) else batch.target_ids
    ids, mask = (side.model_inputs[name].cpu().numpy() for name in ("input_ids", "attention_mask"))
    index, target = side.pair_index.cpu().numpy(), targets.cpu().numpy().astype(np.int64)
    row, column = np.divmod(index, ids.shape[1])
    attended = mask != 0
    position = attended.cumsum(1)[row, column]  # tokens up to here, which is the place of the next
    asked: list[Asked] = []
    place = np.zeros(len(index), dtype=np.int64)
    before = 0
    for r in np.unique(row).tolist():
        here = np.flatnonzero(row == r)
        own, wanted = ids[r][attended[r]], position[here]
        name = repr(batch.sample_ids[r])
        if not attended[r][column[here]].all():
            raise ValueError(f"row {name} has a prediction at a padded position of the teacher's side.")
        if wanted.max() >= len(own) or (own[wanted] != target[here]).any():
            raise ValueError(f"row {name} of the teacher's side does not hold the tokens that it is to predict.")
        unique, inverse = np.unique(wanted, return_inverse=True)
        place[here] = before + inverse
        before += len(unique)
        asked.append(Asked(name=name, ids=tuple(own[: unique[-1] + 1].tolist()), positions=tuple(unique.tolist())))
    return Plan(asked=tuple(asked), place=place, target_ids=target)


def grouped(asked: Sequence[Asked], *, most_rows: int, most_tokens: int) -> Iterator[tuple[Asked, ...]]:
    """Consecutive prompts that go into one request; a longer one than `most_tokens` goes alone."""
    group: list[Asked] = []
    for prompt in asked:
        tokens = sum(len(p.ids) for p in group) + len(prompt.ids)
        if group and (len(group) == most_rows or tokens > most_tokens):
            yield tuple(group)
            group = []
        group.append(prompt)
    if group:
        yield tuple(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which of an answer's ids become scores."""

    top_k: int  # 0: none but the token that stands there
    keep_sampled: bool  # that token is always one of them
    vocab_size: int  # ids from here on are not shared with the student: they are dropped, and the rest renormalised
    temperature: float  # other than 1 only if all ids are known


def sampled_scores(plan: Plan, rows: Sequence[Row], device: torch.device) -> SampledScores:
    """The realized tokens' log-probabilities."""
    return SampledScores(logprobs=_tensor(_all(rows, "realized")[plan.place], torch.float32, device), temperature=1.0)


def top_k_scores_of(
    plan: Plan, rows: Sequence[Row], kept: Kept, device: torch.device
) -> tuple[TopKScores, np.ndarray]:
    """`TopKScores` of the M predictions, and `[M]` the probability that was on ids the student lacks.

    Log-probabilities stand for logits, so the normaliser is 0 up to what was dropped.

    Raises:
        DataError: too few ids of the student's are left, or nearly no mass.
    """
    ids, logprobs, realized = (_all(rows, name)[plan.place] for name in ("ids", "logprobs", "realized"))
    if kept.top_k == 1 and kept.keep_sampled:  # nothing but the token was asked for
        dropped = np.zeros(len(realized))
        chosen, values = plan.target_ids[:, None], realized[:, None]
    else:
        dropped, chosen, values = _chosen(plan, ids, logprobs, realized, kept)
    complete = kept.top_k == kept.vocab_size
    normalizer = [_logsumexp(values / t) if complete else np.log1p(-dropped) + 0.0 for t in (kept.temperature, 1.0)]
    order = chosen.argsort(axis=1)
    scores = TopKScores(
        ids=_tensor(np.take_along_axis(chosen, order, 1), torch.int64, device),
        logits=_tensor(np.take_along_axis(values, order, 1), torch.float32, device),
        log_normalizer=_tensor(normalizer[0], torch.float32, device),
        log_normalizer_t1=_tensor(normalizer[1], torch.float32, device),
        realized_logit=_tensor(realized, torch.float32, device),
        temperature=kept.temperature,
        vocab_size=kept.vocab_size,
    )
    return scores, dropped


def _chosen(
    plan: Plan, ids: np.ndarray, logprobs: np.ndarray, realized: np.ndarray, kept: Kept
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`[M]` dropped mass, `[M, K]` ids and their log-probabilities, from an answer that has the likeliest first."""
    shared = ids < kept.vocab_size  # [M, k]
    dropped = np.where(shared, 0.0, np.exp(logprobs)).sum(1)
    enough = shared.sum(1) >= kept.top_k
    if not enough.all() or (dropped > _ALL_BUT).any():
        worst = int(np.flatnonzero(~enough | (dropped > _ALL_BUT))[0])
        raise DataError(
            f"a prediction of row {_row_of(plan, worst)} has the probability {dropped[worst]:.3f} on "
            f"{(~shared)[worst].sum()} ids from {kept.vocab_size} on, which the student lacks, so its {kept.top_k} "
            "likeliest shared ids are not known. Ask for fewer ids, or use a teacher with the student's vocabulary."
        )
    first = np.argsort(~shared, axis=1, kind="stable")[:, : kept.top_k]  # the likeliest shared ones, in order
    chosen, values = np.take_along_axis(ids, first, 1), np.take_along_axis(logprobs, first, 1)
    if kept.keep_sampled:
        absent = (chosen != plan.target_ids[:, None]).all(1)
        chosen[absent, -1], values[absent, -1] = plan.target_ids[absent], realized[absent]
    return dropped, chosen, values


def _row_of(plan: Plan, prediction: int) -> str:
    ends = np.cumsum([len(prompt.positions) for prompt in plan.asked])
    return plan.asked[int(np.searchsorted(ends, plan.place[prediction], side="right"))].name


def _all(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.concatenate([getattr(row, name) for row in rows])


def _logsumexp(values: np.ndarray) -> np.ndarray:
    largest = values.max(1)
    return largest + np.log(np.exp(values - largest[:, None]).sum(1))


def _tensor(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)
