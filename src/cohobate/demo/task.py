# SPDX-License-Identifier: Apache-2.0
"""Adding up four numbers step by step, in any order: the demo's task.

One character a token:

    prompt      `81,50,39,91:`
    completion  `50+39=89+91=180+81=261` and the end-of-sequence token

Why this one: a problem has many right solutions, and each order needs other sums. A recorded solution shows one of the
24 orders, so a hundred of them are soon learned by heart; a student that writes its own solutions meets new sums each
time, and new mistakes, and the teacher has an opinion on every token of them. What stands is taken as it stands: after
a wrong total one goes on from that total.

What a teacher may be shown more than the student stands in brackets before the question,
`[50+39=89+91=180+81=261]81,50,39,91:`. It is either the recorded solution (column `solution`) or, by `marked`, the
student's own work with every total put right.

Whether a problem may be trained on follows from its numbers alone (a checksum), so no seed, no order of the numbers
and no order of calls can put a held-out problem into training.
"""

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Split = Literal["pretrain", "train", "heldout"]

NUM_ADDENDS = 4
CHARACTERS = "0123456789+=,:[]"
MAX_NEW_TOKENS = 2 + 7 * (NUM_ADDENDS - 1) + 1
"""`99`, then `+99=297` at the most for each further number, and the end-of-sequence token."""

SHOWN_TEMPLATE = "[{privileged}]{question}"

# Tenths of all problems; "pretrain" made the shipped models, "train" is what the demo distils on.
_TENTHS: dict[Split, range] = {"pretrain": range(0, 7), "train": range(7, 8), "heldout": range(8, 10)}
_STEP = re.compile(r"\+(\d+)=(\d+)")


def split_of(numbers: Sequence[int]) -> Split:
    """The split that the problem with these numbers belongs to, always the same, in whatever order they stand."""
    tenth = zlib.crc32(",".join(map(str, sorted(numbers))).encode()) % 10
    return next(split for split, tenths in _TENTHS.items() if tenth in tenths)


def rows(split: Split, n: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """`n` problems of `split`, no two with the same numbers; the same ones for the same seed.

    Columns: `sample_id`, `prompt`, `completion` (the recorded solution, in an order drawn at random), `solution`
    (privileged text, here the same words), `answer`.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {', '.join(get_args(Split))}, got {split!r}.")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}.")
    rng = random.Random(f"{split}-{seed}")
    problems: dict[tuple[int, ...], list[int]] = {}
    while len(problems) < n:
        numbers = rng.sample(range(10, 100), NUM_ADDENDS)
        if split_of(numbers) == split:
            problems.setdefault(tuple(sorted(numbers)), numbers)
    return [_row(numbers, rng) for numbers in problems.values()]


def _row(numbers: list[int], rng: random.Random) -> dict[str, Any]:
    solution = worked(rng.sample(numbers, len(numbers)))
    name = ",".join(map(str, numbers))
    return {
        "sample_id": name,
        "prompt": f"{name}:",
        "completion": solution,
        "solution": solution,
        "answer": str(sum(numbers)),
    }


def worked(numbers: Sequence[int], written_totals: Sequence[int] = ()) -> str:
    """The steps of adding up `numbers` in this order.

    `written_totals`: what somebody wrote as the total of step 1, 2, ...; the step after goes on from there.
    """
    text, total = str(numbers[0]), numbers[0]
    for step, number in enumerate(numbers[1:]):
        text += f"+{number}={total + number}"
        total = written_totals[step] if step < len(written_totals) else total + number
    return text


def marked(row: Mapping[str, Any], completion: str) -> str:
    """The work of `completion` with every total put right, each given what was written before it.

    Steps are read as far as they use numbers of the problem, each once; what is missing follows in the problem's
    order.
    """
    rest = [int(number) for number in row["prompt"].rstrip(":").split(",")]
    first = re.match(r"\d+", completion)
    if first is None or int(first[0]) not in rest:
        return worked(rest)
    order, totals = [int(first[0])], []
    rest.remove(order[0])
    position = first.end()
    while (step := _STEP.match(completion, position)) and int(step[1]) in rest:
        order.append(int(step[1]))
        totals.append(int(step[2]))
        rest.remove(order[-1])
        position = step.end()
    started = re.match(r"\+(\d+)", completion[position:])
    if started and int(started[1]) in rest:
        order.append(int(started[1]))
        rest.remove(order[-1])
    return worked([*order, *rest], totals)


def shown_prompt(privileged: str, prompt: str) -> str:
    """The question as a teacher reads it that is shown more than the student."""
    return SHOWN_TEMPLATE.format(privileged=privileged, question=prompt)


def grade(row: Mapping[str, Any], completion: str) -> float:
    """1.0 if what stands after the last `=` is exactly the answer, else 0.0; the steps are not looked at."""
    return float("=" in completion and completion.rpartition("=")[2] == str(row["answer"]))


def grade_steps(row: Mapping[str, Any], completion: str) -> float:
    """1.0 if every step is right and every number is used once, else 0.0."""
    used = [int(number) for number in re.findall(r"(?:^|\+)(\d+)", completion)]
    problem = [int(number) for number in row["prompt"].rstrip(":").split(",")]
    return float(sorted(used) == sorted(problem) and completion == worked(used))
