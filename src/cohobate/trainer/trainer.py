# SPDX-License-Identifier: Apache-2.0
"""`DistillationTrainer`: a `transformers.Trainer` whose optimizer step is built whole before its first backward.

It knows no method. A rollout source writes completions, alignment turns them into pairs, a teacher scores the pairs,
an objective gives named sums; here they are divided, once, by their counts over the whole step and all ranks.
transformers keeps what it does well: devices, wrapping, optimizers, schedules, callbacks, logging, checkpoints, hub.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.utils import logging

from cohobate.align.rollout import AlignedBatch
from cohobate.data import PromptConfig, PromptEncoder
from cohobate.errors import ConfigError
from cohobate.functional.reduce import divide_by_count
from cohobate.functional.scores import DenseScores, HiddenScores, TeacherScores
from cohobate.objectives import Objective, ObjectiveOutput, check_accepts, for_step
from cohobate.parallel.gather import gather_rows
from cohobate.parallel.modules import eval_mode
from cohobate.parallel.world import all_reduce_sum, any_rank, current_world
from cohobate.teachers import check_head, dense_pair_scores, pair_scores
from cohobate.teachers.packing import can_pack, packed_side
from cohobate.trainer import resolve
from cohobate.trainer.aligners import aligner_of
from cohobate.trainer.canaries import FiniteCheck, alignment_notice, lessons_notice, teacher_notice, warn_once
from cohobate.trainer.card import RunDescription, model_card, write_model_card
from cohobate.trainer.config import DistillationConfig
from cohobate.trainer.evaluation import Evaluation, Grader, my_rows
from cohobate.trainer.lessons import add_lesson_metrics, taught, with_lessons
from cohobate.trainer.metrics import (
    MetricsFile,
    MetricSums,
    add_alignment_metrics,
    add_policy_metrics,
    add_rollout_metrics,
    completion_columns,
    write_completions,
)
from cohobate.trainer.rolled_out import RolledOut
from cohobate.trainer.sampler import WindowSampler
from cohobate.trainer.signals import GracefulStop
from cohobate.trainer.state import load_objective, load_state, save_objective, save_state
from cohobate.trainer.step import StepAssembler, StepGroup, Window, spread
from cohobate.trainer.step_values import StepValues

logger = logging.get_logger(__name__)


class DistillationTrainer(Trainer):
    """Trains a causal language model on its own (or recorded) completions against a teacher.

    Args:
        model: the student, or a path to it.
        teacher: a model, a path, a `Teacher`, a teacher config with `build(student)`, `"self"` (the adapter switched
            off under PEFT, else a frozen copy), or None for an objective without teacher.
        args: settings; see `DistillationConfig`.
        train_dataset: rows with `prompt`, `prompt` + `completion`, `messages` or `text` (see docs/data.md).
        eval_dataset: rows of the same kinds, or a dict of named row sets.
        processing_class: the student's tokenizer.
        objective: default `DivergenceObjective(beta, temperature=distill_temperature)`.
        rollouts: a `RolloutSource`, a config with `build(student, ...)` (`VLLMRolloutsConfig`), or None for the
            student's own `generate`.
        peft_config: wraps the student in an adapter.
        teacher_processing_class: the teacher's tokenizer; proves that both sides share id -> bytes. A teacher with
            another vocabulary brings its tokenizer itself: `OwnTokenizerTeacher`.
        prompts: how rows become prompts. privileged: what the teacher sees more than the student.
        grader: `(row, completion text) -> [0, 1]`, for `eval/accuracy`.
        description: what the model card says beyond the settings.
        model_init_kwargs, teacher_init_kwargs: for `load_model`, when `model` or `teacher` is a path.

    Raises `ConfigError` (a `ValueError`) for parts that do not fit together, before anything is trained.
    """

    args: DistillationConfig
    # transformers declares wide unions; what stands here is known.
    model: Any
    model_wrapped: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    optimizer: Any

    def __init__(
        self,
        model: nn.Module | str | Path,
        teacher: Any = None,
        args: DistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        objective: Objective | None = None,
        rollouts: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
        *,
        teacher_processing_class: Any = None,
        prompts: PromptConfig | None = None,
        privileged: Any = None,
        grader: Grader | None = None,
        description: RunDescription | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        teacher_init_kwargs: Mapping[str, Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        args = resolve.settings(args)
        student, tokenizer = resolve.student(model, processing_class, peft_config, model_init_kwargs)
        self.objective = resolve.objective(objective, args)
        self._encoder = PromptEncoder(tokenizer, resolve.prompt_config(prompts, args))
        train_rows = resolve.training_rows(train_dataset, self._encoder, rows_per_step=_rows_per_step(args))
        super().__init__(
            model=student,
            args=args,
            data_collator=list,  # pyright: ignore[reportArgumentType]  (batches stay lists of rows)
            train_dataset=train_rows,  # pyright: ignore[reportArgumentType]  (has length and items)
            eval_dataset=resolve.evaluation_rows(eval_dataset, self._encoder),
            processing_class=tokenizer,
            callbacks=[*(callbacks or []), MetricsFile(str(args.output_dir)), _TrainerHooks(self)],
            optimizers=optimizers,
        )
        uses_recorded = args.on_policy_fraction < 1
        teacher, own_tokenizer = resolve.loaded_teacher(teacher, teacher_init_kwargs)
        resolve.check_context(student, train_rows)
        self.teacher, self.vocab_size = resolve.teacher(
            teacher,
            student,
            tokenizer,
            teacher_processing_class or own_tokenizer,
            recorded_text=uses_recorded,
            device=args.device,
        )
        check_accepts(self.objective, self.teacher)
        resolve.check_importance_ratio(self.objective, args)
        resolve.check_top_k(self.objective, self.vocab_size or resolve.head_width(student))
        self._lessons = None if privileged is None else privileged.lessons
        resolve.check_lessons(self._lessons, args, train_rows)
        self.grader = grader
        self.eos_token_ids = resolve.eos_token_ids(student, tokenizer)
        pad = resolve.pad_token_id(tokenizer, self.eos_token_ids)
        self.rollouts = resolve.rollouts(
            rollouts, student, args, train_rows, ends=self.eos_token_ids, pad=pad, vocab_size=self.vocab_size
        )
        aligner = aligner_of(
            self.teacher, tokenizer, privileged=privileged, eos_token_ids=self.eos_token_ids, pad_token_id=pad
        )
        resolve.check_readable(aligner, train_rows, self.eval_dataset)
        resolve.check_recorded(self.teacher, args, aligner, pad, train_rows, self.eval_dataset)
        self._assembler = StepAssembler(
            rollouts=self.rollouts,
            aligner=aligner,
            decode=tokenizer.decode,
            pad_token_id=pad,
            seed=args.seed if args.data_seed is None else args.data_seed,
            on_policy_fraction=args.on_policy_fraction,
            max_rows=args.per_device_train_batch_size * args.num_generations,
            token_budget=args.token_budget,
            packing=args.packing,
        )
        self._reads_head = check_head(student)
        self._packs = args.packing or can_pack(student)
        if args.packing:
            resolve.packing(student, self.teacher)
        self._sums = MetricSums()
        self._finite = FiniteCheck()
        self._step_values = StepValues()
        self._said: set[str] = set()
        warn_once(self._said, resolve.labels_notice(self.objective, args, train_rows))
        warn_once(self._said, resolve.calls_notice(self.objective, args))
        self._held: tuple[Window, int] | None = None  # a window of rollouts and how many more steps use it
        self._stop_requested = False
        self._description = resolve.describe(
            description, student, self.teacher, self.objective, train_rows, settings=args.distillation_settings()
        )

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> WindowSampler:
        rows = self.train_dataset if train_dataset is None else train_dataset
        self._sampler = WindowSampler(
            len(rows),
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            window=_rows_per_step(self.args),
            repeats=self.args.num_iterations,
            shuffle=self.args.train_sampling_strategy != "sequential",
        )
        return self._sampler

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[StepGroup], Any]:
        """The whole optimizer step: sample, align, split, count. Returns one group for each batch, and the counts."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if not batches:
            return [], {}
        window = self._window([row for batch in batches for row in batch], num_groups=len(batches))
        micro = window.micro_batches()
        prefetch = getattr(self.teacher, "prefetch", None)
        if prefetch is not None:  # a teacher that is far away answers while the first of them are trained on
            for batch in micro:
                prefetch(batch)
        own = _summed([self.objective.counts(batch) for batch in micro])
        totals = all_reduce_sum({**own, "stop requested": float(self._signal_received())})
        self._stop_requested = totals.pop("stop requested") > 0
        # One that must see the whole step first (token selection) scores it here.
        scored = (self._scores(self.model_wrapped, batch) for batch in micro)
        objective = for_step(self._step_values.begin(self.objective, totals), scored, join_ranks=gather_rows)
        return [StepGroup(batches=group, objective=objective) for group in window.groups], totals

    def _window(self, rows: Sequence[Any], *, num_groups: int) -> Window:
        if self._held is not None:
            window, uses = self._held
            self._held = (window, uses - 1) if uses > 1 else None
            return window
        epoch, step = self._sampler.epoch, self.state.global_step
        self._prepare_rollouts()
        rolled = self._assembler.roll_out(rows, sampling=self.args.sampling(), epoch=epoch).stamped(step)
        self._sums.spent("sampling", rolled.sampling_seconds)
        for name, (total, count) in getattr(self.rollouts, "metrics", dict)().items():
            self._sums.add(name, total, count)
        add_policy_metrics(self._sums, rolled, step=step, max_staleness=self.args.max_staleness)
        rolled = rolled.fresh(step=step, max_staleness=self.args.max_staleness)
        rolled = self._with_lessons(rolled, self._sums)
        trained = taught(rolled)
        add_rollout_metrics(
            self._sums,
            rolled.rollout,
            rolled.is_sampled,
            eos_token_ids=self.eos_token_ids,
            max_new_tokens=self.args.max_completion_length,
            trained=trained,
        )
        aligned = self._assembler.align(rolled if trained is None else rolled.select(trained), at_least=num_groups)
        add_alignment_metrics(self._sums, aligned)
        window = Window(groups=spread(aligned, num_groups))
        if self.args.num_iterations > 1:
            self._held = (window, self.args.num_iterations - 1)
        if self.args.log_completions:
            name = f"step-{self.state.global_step + 1:06d}-rank{current_world().rank}.parquet"
            columns = completion_columns(rolled, self.processing_class.decode, step=self.state.global_step + 1)
            write_completions(Path(str(self.args.output_dir), "completions", name), columns)
        return window

    def _with_lessons(self, rolled: RolledOut, sums: MetricSums) -> RolledOut:
        """With what each completion's group teaches, if the teacher's context is made of that."""
        if self._lessons is None:
            return rolled
        rolled = with_lessons(rolled, self._lessons, self.processing_class.decode)
        add_lesson_metrics(sums, rolled, self._lessons)
        return rolled

    def _prepare_rollouts(self) -> None:
        """Let a source that samples elsewhere have the weights of now. Every rank comes here."""
        prepare = getattr(self.rollouts, "prepare", None)
        if prepare is not None:
            prepare(self.model_wrapped, self.state.global_step)

    def try_rollouts(self) -> str:
        """Let a source that samples elsewhere have the student's weights as they are; what came of it, to read."""
        rollouts: Any = self.rollouts
        if not hasattr(rollouts, "prepare"):
            return "by the student itself"
        rollouts.prepare(self.model, self.state.global_step)
        return rollouts.describe() if hasattr(rollouts, "describe") else "prepared"

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one group; returns its share of the global loss times the number of ranks."""
        assert isinstance(inputs, StepGroup)
        model.train()
        self.optimizer.train()  # an optimizer that averages weights trains others than it evaluates
        total = torch.zeros((), device=self.args.device)
        for i, batch in enumerate(inputs.batches):
            last = i == len(inputs.batches) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model=model):
                total += self._forward_backward(model, batch, inputs.objective, num_items_in_batch)
        return total

    def _forward_backward(
        self, model: nn.Module, batch: AlignedBatch, objective: Objective, counts: dict[str, float]
    ) -> Tensor:
        with self.compute_loss_context_manager():
            student, teacher, batch = self._scores(model, batch)
            output = objective(student, teacher, batch)
            parts = [divide_by_count(term.sum, counts[term.count]) for term in output.terms.values()]
            loss = torch.stack(parts).sum()
        self._finite.see(batch, output, loss)
        self._step_values.see(output)
        self._sums.add_metrics(output.metrics)
        self._sums.add_loss_by_origin(output, batch)
        scaled = loss * current_world().size  # gradients (and the logged loss) are averaged over ranks afterwards
        options = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        self.accelerator.backward(scaled, **options)
        return scaled.detach()

    def _scores(
        self, model: nn.Module, batch: AlignedBatch
    ) -> tuple[HiddenScores | DenseScores, TeacherScores | None, AlignedBatch]:
        batch = batch.to(self.args.device)
        teacher = None if self.teacher is None else self.teacher.score(batch)
        read = pair_scores if self._reads_head else dense_pair_scores
        side = packed_side(batch.student, model, always=self.args.packing) if self._packs else batch.student
        student = read(model, side.model_inputs, side.pair_index, vocab_size=self.vocab_size)
        return student, teacher, batch

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm; stops every rank before the optimizer step if it, or any rank's loss, is not finite."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        value = float(grad_norm) if grad_norm is not None else 0.0
        scaled = getattr(self.accelerator, "scaler", None) is not None  # an overflow is the scaler's to handle
        if any_rank(not self._finite.loss_is_finite() or not (scaled or math.isfinite(value))):
            self._finite.refuse(step=self.state.global_step + 1, grad_norm=value)
        self._finite.clear()
        self.objective = self._step_values.end(self.objective)
        return grad_norm

    # ---- logging and evaluation -------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            metrics = self._sums.reduce()
            logs = {**logs, **metrics}
            width = self.vocab_size or resolve.head_width(self.accelerator.unwrap_model(self.model))
            warn_once(self._said, teacher_notice(metrics, vocab_size=width))
            warn_once(self._said, alignment_notice(metrics))
            warn_once(self._said, lessons_notice(metrics))
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics under `eval/…` (`eval/accuracy`, `eval/loss`, …), of several row sets under `eval_<name>/…`.

        The loss and `metric_for_best_model` are also there as transformers looks for them, `eval_<metric>`.

        On-policy methods sample a completion for every row; with `on_policy_fraction=0` the recorded ones are scored,
        and completions are sampled only for a grader. A teacher that sees something of a group has none to see here:
        such a run is only graded.
        """
        given = self.eval_dataset if eval_dataset is None else resolve.evaluation_rows(eval_dataset, self._encoder)
        if given is None:
            raise ConfigError("evaluation needs rows: pass eval_dataset to the trainer or to evaluate().")
        if isinstance(given, dict):
            result: dict[str, float] = {}
            for name, rows in given.items():
                result |= self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return result
        if self.optimizer is not None and hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        rows = [given[i] for i in my_rows(len(given))]
        self._prepare_rollouts()
        recorded = self.args.on_policy_fraction == 0 and all(row.completion_ids is not None for row in given.rows)
        score = self._lessons is None
        found = self._evaluation(recorded=recorded, score=score, grader=None if recorded else self.grader)(rows)
        if recorded and self.grader is not None:  # a grade needs an answer of the student's own
            found |= self._evaluation(recorded=False, score=False, grader=self.grader)(rows)
        metrics = {f"{metric_key_prefix}/{name}": value for name, value in found.items()}
        for name in ("loss", (self.args.metric_for_best_model or "loss").removeprefix("eval_")):
            if name in found:
                metrics[f"{metric_key_prefix}_{name}"] = found[name]
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluation(
        self, *, recorded: bool, score: bool, grader: Grader | None, as_trained: bool = False
    ) -> Evaluation:
        """`as_trained` samples and shows to the teacher what a training step would."""

        def scored(batch: AlignedBatch) -> ObjectiveOutput:
            with torch.no_grad(), eval_mode(self.model), self.compute_loss_context_manager():
                student, teacher, moved = self._scores(self.model, batch)
                return getattr(self.objective, "held_out", self.objective)(student, teacher, moved)

        return Evaluation(
            assembler=self._assembler,
            sampling=self.args.sampling(evaluation=not as_trained),
            eos_token_ids=self.eos_token_ids,
            batch_size=self.args.per_device_eval_batch_size,
            recorded=recorded,
            grader=grader,
            score=scored if score else None,
            with_lessons=self._with_lessons if as_trained else None,
            counts=self.objective.counts,
        )

    # ---- saving -----------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            last = next((entry for entry in reversed(self.state.log_history) if "loss" in entry), {})
            numbers = {k: v for k, v in last.items() if isinstance(v, float) and k != "epoch"}
            text = model_card(self._description, step=self.state.global_step, metrics=numbers)
            write_model_card(str(output_dir or self.args.output_dir), text)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The card is written by every save; transformers' generic one would replace it."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        save_state(folder, teacher=self.teacher, held=self._held, world=current_world())
        save_objective(folder, self.objective, world=current_world())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Every resumed training comes through here, whatever loaded its weights (transformers or DeepSpeed)."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._held = load_state(Path(checkpoint), teacher=self.teacher, world=current_world())
            self.objective = load_objective(Path(checkpoint), self.objective)

    def restore(self, checkpoint: str | Path) -> None:
        """Be as at the end of the run whose last checkpoint this is, without training on."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
        load_state(Path(checkpoint), teacher=self.teacher, world=current_world())
        self.objective = load_objective(Path(checkpoint), self.objective)

    def save_unfinished(self) -> Path | None:
        """A checkpoint of the last whole step, for a run that an error has ended within the next; where it is.

        One process only: ranks that do not know of the error would not take part.
        """
        step = self.state.global_step
        if step == 0 or current_world().size > 1:
            return None
        folder = Path(str(self.args.output_dir), f"checkpoint-{step}")
        if not folder.exists():
            self._save_checkpoint(self.model, trial=None)
        return folder

    def _forget(self, *, resumed: bool) -> None:
        """Drop what an earlier `train()` of this object left behind, also one that ended in an error."""
        self._sums, self._finite, self._stop_requested = MetricSums(), FiniteCheck(), False
        if not resumed:
            self._held = None

    # ---- what transformers asks of its inputs -----------------------------------------------------------------------

    def floating_point_ops(self, inputs: Any) -> int:
        parameters = getattr(self.model, "num_parameters", None)
        return 0 if parameters is None else 6 * inputs.num_tokens() * parameters(exclude_embeddings=True)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            total = all_reduce_sum({"tokens": float(inputs.num_tokens())})["tokens"]
            self.state.num_input_tokens_seen += int(total)

    def _signal_received(self) -> bool:
        return any(isinstance(c, GracefulStop) and c.received is not None for c in self.callback_handler.callbacks)


class _TrainerHooks(TrainerCallback):
    """Moments of transformers' loop that only callbacks can reach."""

    def __init__(self, trainer: DistillationTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._forget(resumed=state.global_step > 0)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The data loader sets it too, but not through the shards of a resumed epoch on several ranks.
        self._trainer._sampler.set_epoch(int(state.epoch or 0))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        update = getattr(self._trainer.teacher, "after_optimizer_step", None)
        if update is not None and not self._trainer.accelerator.optimizer_step_was_skipped:
            update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._trainer._stop_requested:
            control.should_training_stop = control.should_save = True
        return control


def _rows_per_step(args: DistillationConfig) -> int:
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size)


def _summed(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(c[name] for c in counts) for name in counts[0]}
