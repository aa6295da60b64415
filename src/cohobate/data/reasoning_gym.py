# SPDX-License-Identifier: Apache-2.0
"""Rows from reasoning-gym: procedural problems with a scorer, and a worked solution for the teacher to see.

reasoning-gym draws item i of a data set from `seed + i`, so the data sets of seeds 1 and 2 share all items but one;
and a small task has few problems at all. Training and held-out rows are therefore drawn together, from seeds that lie
far apart (`reasoning_gym_splits`), and a held-out question is never trained on.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from cohobate.errors import ConfigError, DataError, MissingExtra, did_you_mean

# A data set of fewer draws than this cannot reach the seeds of the next one.
SEED_STRIDE = 10_000_000
_MAX_DRAWS_PER_ROW = 50


def reasoning_gym_splits(
    task: str, *, train_size: int, eval_size: int, seed: int = 0, config: Mapping[str, Any] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows; no question is in both or comes twice. Equal for equal arguments.

    Each row has the columns `sample_id`, `prompt` (a conversation), `solution` (worked, for the teacher), `answer`,
    and `task`, `question`, `metadata` (JSON), from which the task's scorer rebuilds its entry.

    Args:
        task: a task of reasoning-gym, for example `"chain_sum"`.
        config: settings of that task, for example `{"max_terms": 2}`.

    Raises:
        ConfigError: for an unknown task or setting, or a task too small for so many different questions.
        MissingExtra: if reasoning-gym is not installed.
    """
    seen: set[str] = set()
    held_out = _distinct_rows(task, eval_size, seed=2 * seed + 1, config=config or {}, seen=seen)
    train = _distinct_rows(task, train_size, seed=2 * seed, config=config or {}, seen=seen)
    return train, held_out


def score_reasoning_gym(row: Mapping[str, Any], answer: str) -> float:
    """What the task's own scorer gives to `answer`, in [0, 1].

    Raises:
        DataError: if the row lacks a column that the scorer needs.
    """
    missing = [name for name in ("task", "question", "answer", "metadata") if row.get(name) is None]
    if missing:
        raise DataError(
            f"the reasoning-gym scorer needs the columns {missing}, and row {row.get('sample_id', '(unnamed)')!r} "
            "lacks them. Use rows of reasoning_gym_splits, and keep their columns."
        )
    entry = {"question": row["question"], "answer": row["answer"], "metadata": json.loads(row["metadata"])}
    return float(_gym().get_score_answer_fn(row["task"])(answer, entry))


def worked_solution(task: str, entry: Mapping[str, Any]) -> str:
    """The steps to the answer, then "The answer is …."; a task whose steps are not known here gives only that."""
    ending = f"The answer is {entry['answer']}."
    steps = _STEPS.get(task)
    return f"{steps(entry['metadata'])}\n{ending}" if steps else ending


def _distinct_rows(
    task: str, size: int, *, seed: int, config: Mapping[str, Any], seen: set[str]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    draws = max(size, 1) * _MAX_DRAWS_PER_ROW
    for index, entry in enumerate(_entries(task, draws, seed, config)):
        if len(rows) == size:
            break
        if entry["question"] not in seen:
            seen.add(entry["question"])
            rows.append(_row(task, f"{task}-{seed}-{index}", entry))
    if len(rows) < size:
        raise ConfigError(
            f"{task} with {dict(config)} gave only {len(rows)} different questions of the {size} asked for, after "
            f"{draws} draws. Ask for fewer rows, or for larger problems."
        )
    return rows


def _entries(task: str, size: int, seed: int, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    gym = _gym()
    names = sorted(gym.factory.DATASETS)
    if task not in names:
        raise ConfigError(f"reasoning-gym has no task {task!r}.{did_you_mean(task, names)}")
    try:
        data = gym.create_dataset(task, size=size, seed=seed * SEED_STRIDE, **config)
    except (TypeError, AssertionError, ValueError) as problem:
        raise ConfigError(f"reasoning-gym refuses {dict(config)} for {task}: {problem}") from None
    return (data[i] for i in range(size))


def _row(task: str, sample_id: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if entry["answer"] is None:
        raise ConfigError(f"{task} has problems without one right answer; choose a task whose entries have an answer.")
    return {
        "sample_id": sample_id,
        "prompt": [{"role": "user", "content": entry["question"].strip()}],
        "solution": worked_solution(task, entry),
        "answer": str(entry["answer"]),
        "task": task,
        "question": entry["question"],
        "metadata": json.dumps(entry["metadata"], default=str),
    }


def _sum_steps(metadata: Mapping[str, Any]) -> str:
    """A chain of + and − from left to right, one line for each operation."""
    first, *rest = metadata["expression"].split()
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return "\n".join(lines)


def _product_steps(metadata: Mapping[str, Any]) -> str:
    """A product from left to right; each factor after the first is split into its decimal places."""
    first, *rest = (int(term) for term in metadata["expression"].split(" * "))
    total, lines = first, []
    for factor in rest:
        digits = str(factor)
        places = [int(d) * 10 ** (len(digits) - 1 - i) for i, d in enumerate(digits) if d != "0"]
        if len(places) > 1:
            lines += [f"{total} * {place} = {total * place}" for place in places]
            parts = " + ".join(str(total * place) for place in places)
            lines.append(f"{total} * {factor} = {parts} = {total * factor}")
        else:
            lines.append(f"{total} * {factor} = {total * factor}")
        total *= factor
    return "\n".join(lines)


_STEPS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "chain_sum": _sum_steps,
    "products": _product_steps,
    "gsm_symbolic": lambda metadata: metadata["answer_cot"].strip(),
}


def _gym() -> Any:
    if find_spec("reasoning_gym") is None:
        raise MissingExtra("rows of reasoning-gym need the extra `smollm2`: pip install 'cohobate[smollm2]'.")
    import reasoning_gym

    return reasoning_gym
