# SPDX-License-Identifier: Apache-2.0
"""What is logged: sums and counts kept apart until all ranks have added theirs, then divided once.

The same names go to every logger; `metrics.jsonl` in the output folder holds them one line a log.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cohobate.align.cross_tokenizer import unaligned
from cohobate.align.rollout import AlignedBatch, RolloutBatch
from cohobate.align.rollout_ops import completion_mask, policy_versions
from cohobate.files import written_whole
from cohobate.objectives import Metric, ObjectiveOutput
from cohobate.parallel.gather import all_reduce_largest, union_of_names
from cohobate.parallel.world import all_reduce_sum
from cohobate.trainer.rolled_out import RolledOut, completion_ids


class MetricSums:
    """Running sums of named means and extremes; `reduce` joins the ranks, divides, and starts anew."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._maxima: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean. Device tensors stay on the device until `reduce`."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + total, old_count + count)

    def maximum(self, name: str, value: float) -> None:
        self._maxima[name] = max(self._maxima.get(name, float("-inf")), value)

    def spent(self, name: str, seconds: float) -> None:
        """Wall-clock seconds of an activity, for rates."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def add_metrics(self, metrics: dict[str, Metric]) -> None:
        for name, metric in metrics.items():
            self.add(name, metric.sum, metric.count)

    def add_loss_by_origin(self, output: ObjectiveOutput, batch: AlignedBatch) -> None:
        """Loss of sampled and of recorded rows apart: they answer different questions."""
        if output.pair_loss is None:
            return
        sampled = batch.is_sampled[batch.row]
        for name, mask in (("loss/sampled", sampled), ("loss/recorded", ~sampled)):
            self.add(name, output.pair_loss[mask].sum(), mask.sum())

    def reduce(self) -> dict[str, float]:
        """Joined over all ranks (every rank must call it). A mean over nothing is left out."""
        names = union_of_names(
            [*self._sums, *(f"max {n}" for n in self._maxima), *(f"sec {n}" for n in self._seconds)]
        )
        means = [n for n in names if not n.startswith(("max ", "sec "))]
        flat: dict[str, Tensor | float] = {}
        for name in means:
            flat[f"{name} sum"], flat[f"{name} count"] = self._sums.get(name, (0.0, 0.0))
        summed = all_reduce_sum(flat)
        own = {f"max {n}": v for n, v in self._maxima.items()} | {f"sec {n}": v for n, v in self._seconds.items()}
        largest = all_reduce_largest({n: own.get(n, float("-inf")) for n in names if n not in means})
        result = {n: summed[f"{n} sum"] / summed[f"{n} count"] for n in means if summed[f"{n} count"] > 0}
        for name, value in largest.items():
            if name.startswith("max ") and math.isfinite(value):
                plain = name.removeprefix("max ")
                result[plain] = -value if plain.endswith("min_length") else value  # a minimum is kept as max of -x
        result |= _rates(summed, largest, time.perf_counter() - self._started)
        self.__init__()
        return result


def _rates(summed: dict[str, float], largest: dict[str, float], elapsed: float) -> dict[str, float]:
    """Throughput over all ranks: trained pairs by wall clock, sampled tokens by the time spent sampling."""
    rates = {}
    pairs = summed.get("rows/pairs sum")
    if pairs is not None and elapsed > 0:
        rates["speed/pairs_per_second"] = pairs / elapsed
    tokens, seconds = summed.get("completion/mean_length sum"), largest.get("sec sampling", 0.0)
    if tokens is not None and seconds > 0:
        rates["speed/generated_tokens_per_second"] = tokens / seconds
    return rates


def add_rollout_metrics(
    sums: MetricSums,
    rollout: RolloutBatch,
    is_sampled: Tensor,
    *,
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int,
    trained: Sequence[int] | None = None,
) -> None:
    """Completion lengths and how they ended, sampled and recorded rows apart. All names appear on every rank.

    `trained` are the rows that are not left out of the step (None: all); `rows/*` are about these.
    """
    columns = torch.arange(rollout.input_ids.shape[1], device=rollout.input_ids.device)
    chosen = completion_mask(rollout)
    lengths = chosen.sum(1)
    last = torch.where(chosen, columns, 0).amax(1)
    last_ids = rollout.input_ids.gather(1, last[:, None]).squeeze(1)
    ended = (lengths > 0) & torch.isin(last_ids, torch.tensor(eos_token_ids, device=last_ids.device))
    kept = lengths if trained is None else lengths[list(trained)]
    sums.add("rows/without_pair", (kept == 0).sum(), kept.numel())
    sums.add("rows/pairs", kept.sum(), kept.numel())  # mean pairs of a row
    for prefix, rows in (("completion/", is_sampled), ("completion/recorded_", ~is_sampled)):
        some, stopped = lengths[rows], ended[rows]
        sums.add(f"{prefix}mean_length", some.sum(), some.numel())
        sums.maximum(f"{prefix}max_length", float(some.max()) if some.numel() else float("-inf"))
        sums.maximum(f"{prefix}min_length", -float(some.min()) if some.numel() else float("-inf"))
        sums.add(f"{prefix}eos_share", stopped.sum(), stopped.numel())
        sums.add(f"{prefix}mean_terminated_length", some[stopped].sum(), stopped.sum())
    cut = ~ended[is_sampled] & (lengths[is_sampled] >= max_new_tokens)
    sums.add("completion/truncated_share", cut.sum(), cut.numel())


def add_policy_metrics(sums: MetricSums, rolled: RolledOut, *, step: int, max_staleness: int) -> None:
    """How many optimizer steps the weights that sampled lie behind, and the share of rows that is dropped for it."""
    lag = step - policy_versions(rolled.rollout)[rolled.is_sampled.to(rolled.rollout.input_ids.device)]
    sums.add("rollouts/policy_lag", lag.sum(), lag.numel())
    sums.add("rollouts/stale_share", (lag > max_staleness).sum(), lag.numel())


def add_alignment_metrics(sums: MetricSums, batches: Sequence[AlignedBatch]) -> None:
    """How much of the completions teachers with their own tokenizers say nothing about, averaged over them."""
    for batch in batches:
        named = torch.tensor([bool(name) for name in batch.sample_ids])  # a rank without rows runs one without a name
        for rows, pairs, outside, chunks in unaligned(batch):
            sums.add("align/unaligned_student_share", outside.sum(), pairs.sum())
            sums.add("align/rows_without_chunk", ((chunks == 0) & (pairs > 0)).sum(), named[rows].sum())


class MetricsFile(TrainerCallback):
    """Appends every log to `metrics.jsonl`.

    When training begins, lines that would come twice are dropped: on resume, of the steps that are trained again; else
    everything an earlier run left, but not what this trainer has evaluated before.
    """

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self._earlier: int | None = None  # lines that stood there before the first of ours

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._lines()
        if state.global_step == 0:
            lines = [] if self._earlier is None else lines[self._earlier :]
            self._earlier = 0
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        self._keep(kept)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if self._earlier is None:
            lines = self._lines()
            self._keep(lines)
            self._earlier = len(lines)
        line = {"step": state.global_step, "epoch": state.epoch, **logs}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> list[str]:
        """The whole lines; a last one without its end is what a killed process left."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def _keep(self, lines: list[str]) -> None:
        with written_whole(self.path) as temporary:
            temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def completion_columns(rolled: RolledOut, decode: Callable[..., str], *, step: int) -> dict[str, list[Any]]:
    """Prompts and completions of one step as text and ids, a column each."""
    completions = completion_ids(rolled.rollout)
    columns: dict[str, list[Any]] = {
        "step": [step] * len(rolled.rows),
        "sample_id": [row.sample_id for row in rolled.rows],
        "is_sampled": rolled.is_sampled.tolist(),
        "prompt": [decode(row.prompt_ids) for row in rolled.rows],
        "completion": [decode(ids) for ids in completions],
        "completion_ids": [list(ids) for ids in completions],
    }
    if rolled.lessons is not None:
        for name in ("score", "demonstration", "feedback"):
            columns[name] = [getattr(lesson, name) for lesson in rolled.lessons]
    return columns


def write_completions(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write one step's prompts and completions as a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
