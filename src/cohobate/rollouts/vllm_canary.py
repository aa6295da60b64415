# SPDX-License-Identifier: Apache-2.0
"""Whether a server has the weights that the trainer has: asked after each update, and again after each draw.

A server that kept its old weights answers like any other. So after an update it continues eight fixed prompts, and
both sides say how likely these tokens are: the server once as it wrote them (its decoding, its prefix cache) and once
anew from the whole text (for which vLLM reads no cache), the trainer by a forward pass. Tokens that the server itself
finds likeliest are used because low precision disturbs these least: with SmolLM2-135M in bfloat16 against float32,
0.02 nats on average, against 0.05 to 0.06 for other text and 0.11 for random ids.

Three things must hold. Both sides agree within a tolerance. What is computed with the prefix cache agrees with what is
computed without. And where the trainer has visibly moved, the text of the last update must have changed for the server
too: a dropped update shows long before it is as large as the tolerance. One update that loses less than the tolerance
is not found, but losses of later ones add to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cohobate.errors import ServerResponseError
from cohobate.parallel.gather import gather_rows
from cohobate.parallel.modules import eval_mode, unwrapped
from cohobate.parallel.world import current_world
from cohobate.rollouts.vllm_answers import Completion, Prompt

NUM_TOKENS = 24  # that the server writes after each prompt
_NUM_PROMPTS = 8
_SHORT = 32  # tokens of a prompt, at most
_LONG = 272  # of one of them: a block of a prefix cache has 16 tokens, on a CPU 128, with other attention 256
_MOVED = 1e-3  # nats: above what a forward pass can differ from itself, below what one step of training does

_HINT = (
    "Likely reasons: it reads another folder than was written (server_folder); its model differs from the student "
    "(another size, quantised, a tied head where the student has one of its own); or its precision is another one "
    "than the student's (a larger canary_tolerance)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and what the server wrote after it."""

    ids: tuple[int, ...]
    start: int  # where the written part begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What both sides said of some texts after one update; `[n]` float64 each, of the written parts in order."""

    texts: tuple[Text, ...]
    server: Tensor
    trainer: Tensor


def canary_prompts(given: Sequence[Sequence[int]], *, num_ids: int, room: int | None) -> list[Prompt]:
    """Eight prompts, one of them long: from the rows that are given, and from the whole vocabulary where they end.

    `room`: the tokens that a prompt may have at most; None: any number.
    """
    longest = max(1, _LONG if room is None else min(_LONG, room))
    stream = [i for row in given for i in row]
    spread = [round(i * 0.6180339887498949 % 1 * (num_ids - 1)) for i in range(1, longest + 1)]
    short = [tuple(row[-min(_SHORT, longest) :]) for row in given if len(row)][: _NUM_PROMPTS - 1]
    for i in range(_NUM_PROMPTS - 1 - len(short)):
        short.append(tuple(spread[i : i + min(_SHORT, longest) // 2] or spread[:1]))
    prompts = [*short, tuple((stream + spread)[:longest])]
    return [Prompt(name=f"canary {i}", ids=ids) for i, ids in enumerate(prompts)]


def texts_of(prompts: Sequence[Prompt], written: Sequence[Completion]) -> tuple[Text, ...]:
    return tuple(Text(ids=p.ids + c.ids, start=len(p.ids)) for p, c in zip(prompts, written, strict=True))


def as_prompts(texts: Sequence[Text]) -> list[Prompt]:
    return [Prompt(name=f"canary {i}", ids=text.ids) for i, text in enumerate(texts)]


def written_part(texts: Sequence[Text], scores: Sequence[Sequence[float]]) -> Tensor:
    """`[n]` float64: of scores of every token but the first, those of the written parts."""
    values = [v for text, row in zip(texts, scores, strict=True) for v in row[text.start - 1 :]]
    return torch.tensor(values, dtype=torch.float64)


def sent_to_all(texts: Sequence[Text]) -> tuple[Text, ...]:
    """Rank 0's texts, on every rank."""
    flat = [v for text in texts for v in (len(text.ids), text.start, *text.ids)]
    mine = flat if current_world().rank == 0 else []
    values = gather_rows(torch.tensor(mine, dtype=torch.int64)).tolist()
    found, at = [], 0
    while at < len(values):
        length, start = values[at : at + 2]
        found.append(Text(ids=tuple(values[at + 2 : at + 2 + length]), start=start))
        at += 2 + length
    return tuple(found)


@torch.no_grad()
def trainer_logprobs(model: nn.Module, texts: Sequence[Text]) -> Tensor:
    """`[n]` float64 on the CPU: the student's own log-probabilities of the written parts. Every rank must call it.

    Texts of one length class go through the model together, padded on the right, in eval mode.
    """
    model = unwrapped(model)
    device = next(model.parameters()).device
    found: list[Tensor] = [torch.empty(0, dtype=torch.float64)] * len(texts)
    for long in (False, True):
        rows = [r for r, text in enumerate(texts) if (len(text.ids) > _SHORT + NUM_TOKENS) == long]
        if not rows:
            continue
        width = max(len(texts[r].ids) for r in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, r in enumerate(rows):
            ids[i, : len(texts[r].ids)] = torch.tensor(texts[r].ids)
            mask[i, : len(texts[r].ids)] = 1
        with eval_mode(model):
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
        for i, r in enumerate(rows):
            start, end = texts[r].start, len(texts[r].ids)
            chosen = logits[i, start - 1 : end - 1].float().log_softmax(-1)
            own = chosen.gather(-1, ids[i, start:end, None].to(device))
            found[r] = own.squeeze(-1).double().cpu()
    return torch.cat(found)


def check_agreement(now: Heard, written: Sequence[Completion], *, tolerance: float, name: str) -> float:
    """The mean difference between both sides, in nats.

    Raises:
        ServerResponseError: above `tolerance`, or the server's prefix cache disagrees with its weights.
    """
    gap = float((now.server - now.trainer).abs().mean())
    if not gap <= tolerance:
        raise ServerResponseError(
            f"after an update {name} finds its own text less like the student than it should: the log-probabilities "
            f"of {len(now.server)} tokens differ by {gap:.3g} nats on average (allowed: {tolerance:g}). Nothing was "
            f"sampled with these weights. {_HINT}"
        )
    as_written = torch.tensor([v for one in written for v in one.logprobs], dtype=torch.float64)
    apart = (as_written - now.server).abs()
    cached = float(torch.stack([apart.mean(), apart[-len(written[-1].ids) :].mean()]).max())  # the long one alone, too
    if not cached <= tolerance:
        raise ServerResponseError(
            f"after an update {name} gives its own text other log-probabilities when it writes it than when it reads "
            f"it anew, by {cached:.3g} nats on average (allowed: {tolerance:g}): it kept prefixes that older weights "
            "have computed, although it was told to reset its prefix cache. Start it with --no-enable-prefix-caching."
        )
    return gap


def check_change(before: Heard, now: Heard, *, name: str) -> bool:
    """Whether the server shows that it has other weights than `before`; both speak of the same texts.

    False where the trainer has hardly moved either: then the next update is measured from `before`, too.

    Raises:
        ServerResponseError: the trainer moved and the server did not at all.
    """
    moved = float((now.trainer - before.trainer).abs().mean())
    if not torch.equal(now.server, before.server):
        return True
    if moved > _MOVED:
        raise ServerResponseError(
            f"{name} did not change by an update: it gives {len(now.server)} tokens the very log-probabilities of "
            f"before, while the student's moved by {moved:.3g} nats on average. It dropped the update, or reads "
            "another folder than the one that is written (server_folder). Nothing was sampled with these weights."
        )
    return False
