# SPDX-License-Identifier: Apache-2.0
"""CSD written out from its definition, one chunk and one pair at a time, in float64 with autograd: slow and plain.

Also random worlds to try it on: two vocabularies over a few letters, their chains, a text and two tokenizations of it.
"""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOOR = 1e-12
Rows = dict[int, float]


@dataclass(frozen=True)
class World:
    student: list[bytes]  # vocabulary
    teacher: list[bytes]
    student_ids: list[int]
    teacher_ids: list[int]
    forward: list[tuple[int, ...]]
    reverse: list[tuple[int, ...]]


def chains(source: list[bytes], destination: list[bytes]) -> list[tuple[int, ...]]:
    """Same bytes first (lowest id), else greedily the longest token; a source token seen before has none."""
    rows: list[tuple[int, ...]] = []
    for i, piece in enumerate(source):
        if piece in source[:i]:
            rows.append(())
        elif piece in destination:
            rows.append((destination.index(piece),))
        else:
            row = []
            while piece:
                token = max((t for t in destination if piece.startswith(t)), key=len)
                row.append(destination.index(token))
                piece = piece[len(token) :]
            rows.append(tuple(row))
    return rows


def world(seed: int, *, letters: bytes = b"abc", extra: int = 9, length: int = 24) -> World:
    rng = random.Random(seed)

    def vocabulary() -> list[bytes]:
        words = [bytes(rng.choices(letters, k=rng.randint(2, 3))) for _ in range(extra)]
        made = [bytes([letter]) for letter in letters] + words  # words may repeat: two tokens of the same bytes
        rng.shuffle(made)
        return made

    student, teacher = vocabulary(), vocabulary()
    text = bytes(rng.choices(letters, k=length))
    return World(
        student,
        teacher,
        tokens(rng, student, text),
        tokens(rng, teacher, text),
        chains(student, teacher),
        chains(teacher, student),
    )


def retold(made: World, text: bytes, seed: int) -> World:
    """The same vocabularies and another text."""
    rng = random.Random(seed)
    return replace(made, student_ids=tokens(rng, made.student, text), teacher_ids=tokens(rng, made.teacher, text))


def tokens(rng: random.Random, vocabulary: list[bytes], text: bytes) -> list[int]:
    ids = []
    while text:
        fitting = [i for i, t in enumerate(vocabulary) if text.startswith(t)]
        ids.append(rng.choice(fitting))
        text = text[len(vocabulary[ids[-1]]) :]
    return ids


def support(
    ours: list[int],
    theirs: list[int],
    forward: list[tuple[int, ...]],
    reverse: list[tuple[int, ...]],
    *,
    realized_only: bool,
    keep_realized: bool,
    min_support: int,
) -> list[tuple[int, int]]:
    realized = (ours[-1], theirs[-1])
    one_s, one_t = len(ours) == 1, len(theirs) == 1
    if one_s and one_t:
        pairs = [(s, row[0]) for s, row in enumerate(forward) if len(row) == 1]
    elif realized_only or not (one_s or one_t):
        return [realized]
    elif one_s:
        pairs = [
            (s, row[-1]) for s, row in enumerate(forward) if len(row) == len(theirs) and list(row[:-1]) == theirs[:-1]
        ]
    else:
        pairs = [
            (row[-1], t) for t, row in enumerate(reverse) if len(row) == len(ours) and list(row[:-1]) == ours[:-1]
        ]
    if keep_realized:
        pairs = [realized, *(pair for pair in pairs if pair != realized)]
    kept: list[tuple[int, int]] = []
    for s, t in pairs:
        if s not in [a for a, _ in kept] and t not in [b for _, b in kept]:
            kept.append((s, t))
    return kept if (one_s and one_t) or len(kept) >= min_support else []


def divergence(p: list[Tensor], q: list[float], beta: float) -> Tensor:
    """Over the support and REST."""
    p = [*p, (1 - torch.stack(p).sum()).clamp(min=FLOOR)]
    q_all = torch.tensor([*q, max(1 - sum(q), FLOOR)], dtype=torch.float64)
    p_all = torch.stack(p)
    if beta == 0:
        return (q_all * (q_all / p_all).log()).sum()
    if beta == 1:
        return (p_all * (p_all / q_all).log()).sum()
    m = (1 - beta) * p_all + beta * q_all
    return beta * (q_all * (q_all / m).log()).sum() + (1 - beta) * (p_all * (p_all / m).log()).sum()


def common_support(
    student_logits: Tensor,
    teacher_logits: Tensor,
    made: World,
    chunk: tuple[int, int, int, int],
    *,
    beta: float,
    temperature: float = 1.0,
    k: int | None = None,
    realized_only: bool = False,
    keep_realized: bool = True,
    min_support: int = 1,
    evict: bool = False,
) -> Tensor:
    """D of one chunk, or 0 if it cannot be scored or compared."""
    s0, s1, t0, t1 = chunk
    nothing = student_logits.sum() * 0
    if s0 == 0 or t0 == 0:
        return nothing
    ours, theirs = made.student_ids[s0:s1], made.teacher_ids[t0:t1]
    s, t = (student_logits / temperature).log_softmax(-1), (teacher_logits / temperature).log_softmax(-1)
    pairs = support(
        ours,
        theirs,
        made.forward,
        made.reverse,
        realized_only=realized_only,
        keep_realized=keep_realized,
        min_support=min_support,
    )
    if k is not None:
        row = teacher_logits[t1 - 2]
        order = sorted(range(len(made.teacher)), key=lambda v: (-float(row[v]), v))[:k]
        if keep_realized and theirs[-1] not in order:
            order = [*(order[:-1] if evict else order), theirs[-1]]
        pairs = [(a, b) for a, b in pairs if b in order]
    if not pairs:
        return nothing
    prefix_s = sum((s[s0 - 1 + i, token] for i, token in enumerate(ours[:-1])), start=nothing)
    prefix_t = sum(float(t[t0 - 1 + j, token]) for j, token in enumerate(theirs[:-1]))
    p = [(prefix_s + s[s1 - 2, a]).exp() for a, _ in pairs]
    q = [float((prefix_t + t[t1 - 2, b]).exp()) for _, b in pairs]
    return divergence(p, q, beta)
