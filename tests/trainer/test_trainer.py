# SPDX-License-Identifier: Apache-2.0
"""The trainer end to end on models of a few thousand parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import tiny
from cohobate.align.rollout import AlignedBatch
from cohobate.data import PrivilegedConfig
from cohobate.errors import CohobateError, ConfigError, DataError, NonFiniteError
from cohobate.functional.scores import HiddenScores
from cohobate.objectives import CrossEntropyObjective, DivergenceObjective, PolicyGradientObjective
from cohobate.teachers import EMATeacher, FrozenTeacher, LocalTeacher
from cohobate.trainer import DistillationConfig, DistillationTrainer

ROWS = [{"prompt": f"{i}+{i * 7}=", "completion": f"{i * 8}", "hint": "abc"} for i in range(8)]
PROMPTS = [{"prompt": row["prompt"]} for row in ROWS]


def settings(folder: Path, **changes: Any) -> DistillationConfig:
    base: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "max_completion_length": 6,
        "seed": 3,
    }
    return DistillationConfig(**base | changes)


def trainer(folder: Path, rows: list[dict[str, Any]] | None = None, **parts: Any) -> DistillationTrainer:
    changes = parts.pop("args", {})
    return DistillationTrainer(
        model=parts.pop("model", None) or tiny.llama(1, layers=2),
        args=settings(folder, **changes),
        train_dataset=ROWS if rows is None else rows,
        processing_class=tiny.char_tokenizer(),
        **parts,
    )


def checksum(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_training_moves_every_parameter_and_leaves_the_teacher(tmp_path: Path, fraction: float) -> None:
    teacher = tiny.llama(5, hidden=12)
    run = trainer(tmp_path, teacher=teacher, args={"on_policy_fraction": fraction, "beta": 0.5})
    student_before, teacher_before = checksum(run.model), checksum(teacher)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    assert not any(torch.equal(a, b) for a, b in zip(student_before, run.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(teacher_before, teacher.parameters(), strict=True))
    assert all(p.grad is None for p in teacher.parameters())


def test_prompts_alone_are_always_sampled(tmp_path: Path) -> None:
    run = trainer(tmp_path, PROMPTS, teacher=tiny.llama(5), args={"on_policy_fraction": 0.0})
    run.train()
    log = run.state.log_history[0]
    assert log["completion/mean_length"] > 0
    assert "completion/recorded_mean_length" not in log
    assert "loss/recorded" not in log


def test_log_history_has_the_metrics_by_their_names(tmp_path: Path) -> None:
    run = trainer(tmp_path, teacher=tiny.llama(5), args={"on_policy_fraction": 0.5, "max_steps": 1})
    run.train()
    log = run.state.log_history[0]
    wanted = {
        "kl/forward", "kl/reverse", "entropy/student", "entropy/teacher", "top1_agreement",
        "completion/mean_length", "completion/min_length", "completion/max_length", "completion/truncated_share",
        "completion/eos_share", "rows/without_pair", "speed/pairs_per_second", "speed/generated_tokens_per_second",
        "loss", "grad_norm", "learning_rate",
    }  # fmt: skip
    assert wanted <= set(log), wanted - set(log)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["kl/forward"] == log["kl/forward"]
    assert lines[0]["step"] == 1


class Spy:
    """An objective that remembers the counts it gave and the pairs that it was asked to sum."""

    accepts = (HiddenScores,)

    def __init__(self) -> None:
        self.inner, self.counted, self.summed = DivergenceObjective(beta=0.0), [], []

    def counts(self, batch: AlignedBatch) -> dict[str, float]:
        self.counted.append(batch.num_pairs)
        return self.inner.counts(batch)

    def __call__(self, student: Any, teacher: Any, batch: AlignedBatch, /) -> Any:
        output = self.inner(student, teacher, batch)
        self.summed.append(int(output.pair_loss.numel()))
        self.last_sums = [*getattr(self, "last_sums", []), float(output.terms["kd"].sum.detach())]
        return output


def test_the_count_in_use_is_the_number_of_pairs_that_were_summed(tmp_path: Path) -> None:
    spy = Spy()
    args = {
        "on_policy_fraction": 0.5,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    run = trainer(tmp_path, teacher=tiny.llama(5), objective=spy, args=args)
    seen: list[dict[str, float]] = []
    inner = run.training_step
    run.training_step = lambda model, inputs, counts=None: seen.append(counts) or inner(model, inputs, counts)
    run.train()
    assert seen == [{"pairs": sum(spy.summed)}] * 4
    assert spy.counted == spy.summed
    log = run.state.log_history[0]
    assert log["loss"] == pytest.approx(sum(spy.last_sums) / sum(spy.summed), rel=1e-6)
    assert {"loss/sampled", "loss/recorded"} <= set(log)


def test_opsd_with_the_default_self_teacher_learns_from_what_it_sees_more(tmp_path: Path) -> None:
    run = trainer(tmp_path, teacher="self", privileged=PrivilegedConfig(source="hint"))
    assert type(run.teacher).__name__ == "Frozen"
    before = checksum(run.model)
    run.train()
    assert run.state.log_history[0]["kl/forward"] > 0
    assert not torch.equal(before[0], next(run.model.parameters()))


def test_a_self_teacher_without_more_context_is_reported_as_equal(tmp_path: Path, caplog: Any) -> None:
    run = trainer(tmp_path, teacher="self", args={"max_steps": 1, "learning_rate": 0.0})
    said = run._said
    run.train()
    assert any("teacher equals student" in message for message in said)


def test_batch_sizes_count_rows_and_each_gives_num_generations(tmp_path: Path) -> None:
    run = trainer(tmp_path, PROMPTS, teacher=tiny.llama(5), args={"num_generations": 3, "max_steps": 1})
    run.args.log_completions = True
    run.train()
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "completions" / "step-000001-rank0.parquet").to_pydict()
    assert len(table["sample_id"]) == 12
    assert table["sample_id"][0] == table["sample_id"][2] != table["sample_id"][3]


def test_completions_are_not_written_unless_asked(tmp_path: Path) -> None:
    trainer(tmp_path, teacher=tiny.llama(5), args={"max_steps": 1}).train()
    assert not (tmp_path / "completions").exists()


def test_ema_starts_from_the_initial_weights_and_resumes_exactly(tmp_path: Path) -> None:
    def run(folder: Path, **args: Any) -> DistillationTrainer:
        parts = {"teacher": EMATeacher(decay=0.5), "privileged": PrivilegedConfig(source="hint")}
        return trainer(folder, args={"save_steps": 1, "save_strategy": "steps", "max_steps": 4, **args}, **parts)

    whole = run(tmp_path / "whole")
    whole.train()
    half = run(tmp_path / "half")
    half.train()
    resumed = run(tmp_path / "half")
    resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    for name, value in whole.teacher.state_dict().items():
        assert torch.equal(value, resumed.teacher.state_dict()[name]), name
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_resuming_in_the_middle_of_an_epoch_goes_on_with_its_rows_and_draws(tmp_path: Path) -> None:
    def run(folder: Path) -> DistillationTrainer:
        args = {"save_steps": 1, "save_strategy": "steps", "max_steps": 4, "on_policy_fraction": 0.5}
        return trainer(folder, teacher=tiny.llama(5), args=args)

    whole = run(tmp_path)
    whole.train()
    resumed = run(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # epoch 1.5
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_second_training_does_not_go_on_with_the_window_of_the_first(tmp_path: Path) -> None:
    args = {"num_iterations": 2, "max_steps": 1, "learning_rate": 3e-2}
    objective = PolicyGradientObjective(clip_epsilon=0.05)
    run = trainer(tmp_path, PROMPTS, teacher=tiny.llama(5), objective=objective, args=args)
    for _ in range(2):
        run.train()
        ratio = next(entry["ratio/mean"] for entry in run.state.log_history if "loss" in entry)
        assert ratio == pytest.approx(1.0, abs=1e-4)


def test_a_run_that_stopped_at_a_nan_can_be_trained_again(tmp_path: Path) -> None:
    run = trainer(tmp_path, teacher=tiny.llama(5), args={"max_steps": 1, "on_policy_fraction": 0.0})
    good = run.teacher

    class Broken:
        def score(self, batch: AlignedBatch) -> HiddenScores:
            scores = good.score(batch)
            return HiddenScores(hidden=scores.hidden * float("nan"), head=scores.head)

    run.teacher = Broken()
    with pytest.raises(NonFiniteError):
        run.train()
    run.teacher = good
    run.train()
    assert run.state.global_step == 1


class AveragingSGD(torch.optim.SGD):
    """As optimizers that keep an average of the weights: it says when it is told what it is used for."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.modes: list[str] = []

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")


def test_an_optimizer_with_modes_is_told_which(tmp_path: Path) -> None:
    model = tiny.llama(1)
    optimizer = AveragingSGD(model.parameters())
    args = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    parts = {"model": model, "teacher": tiny.llama(5), "eval_dataset": ROWS[:2], "optimizers": (optimizer, None)}
    trainer(tmp_path, args=args, **parts).train()
    assert optimizer.modes == ["train", "eval"] * 2


def test_training_runs_under_bfloat16_autocast_and_without_clipping(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "a", teacher=tiny.llama(5), args={"max_steps": 1, "max_grad_norm": 0.0})
    mixed = trainer(tmp_path / "b", teacher=tiny.llama(5), args={"max_steps": 1, "max_grad_norm": 0.0, "bf16": True})
    plain.train()
    mixed.train()
    for name in ("loss", "grad_norm"):
        found, wanted = (run.state.log_history[0][name] for run in (mixed, plain))
        assert found == pytest.approx(wanted, rel=0.05)
        assert found != wanted
    assert next(mixed.model.parameters()).dtype == torch.float32


def test_a_lost_teacher_state_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    parts = {"teacher": EMATeacher(decay=0.5), "privileged": PrivilegedConfig(source="hint")}
    trainer(tmp_path, args={"save_steps": 1, "save_strategy": "steps", "max_steps": 1}, **parts).train()
    (tmp_path / "checkpoint-1" / "teacher_state.safetensors").unlink()
    again = trainer(tmp_path, args={"max_steps": 2}, **parts)
    with pytest.raises(ConfigError, match="teacher_state"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_second_pass_over_one_window_has_a_ratio_and_clips(tmp_path: Path) -> None:
    args = {"num_iterations": 2, "max_steps": 4, "learning_rate": 3e-2, "max_grad_norm": 0.0}
    objective = PolicyGradientObjective(clip_epsilon=0.05)
    run = trainer(tmp_path, PROMPTS, teacher=tiny.llama(5), objective=objective, args=args)
    run.train()
    ratios = [entry["ratio/mean"] for entry in run.state.log_history if "loss" in entry]
    clipped = [entry["ratio/clipped_share"] for entry in run.state.log_history if "loss" in entry]
    assert ratios[0] == pytest.approx(1.0, abs=1e-4)
    assert abs(ratios[1] - 1.0) > 1e-3
    assert clipped[0] == 0.0
    assert clipped[1] > 0.0
    assert ratios[2] == pytest.approx(1.0, abs=1e-4)


def test_the_reused_window_travels_in_the_checkpoint(tmp_path: Path) -> None:
    def run(folder: Path) -> DistillationTrainer:
        args = {"num_iterations": 3, "max_steps": 3, "save_steps": 1, "save_strategy": "steps", "learning_rate": 1e-2}
        objective = PolicyGradientObjective(clip_epsilon=0.2)
        return trainer(folder, PROMPTS, teacher=tiny.llama(5), objective=objective, args=args)

    whole = run(tmp_path / "whole")
    whole.train()
    run(tmp_path / "half").train()
    resumed = run(tmp_path / "half")
    resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-1"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_reusing_rollouts_without_a_ratio_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="importance ratio"):
        trainer(tmp_path, PROMPTS, teacher=tiny.llama(5), args={"num_iterations": 2})


def test_a_ratio_between_a_truncated_draw_and_the_whole_policy_is_refused(tmp_path: Path) -> None:
    objective = PolicyGradientObjective(clip_epsilon=0.2)
    with pytest.raises(ConfigError, match=r"top_p must be 1\.0, got 0\.9"):
        trainer(tmp_path, PROMPTS, teacher=tiny.llama(5), objective=objective, args={"top_p": 0.9})


class NaNTeacher(LocalTeacher):
    """Says NaN about every token of one row."""

    def score(self, batch: AlignedBatch) -> HiddenScores:
        scores = super().score(batch)
        bad = torch.tensor([batch.sample_ids[int(r)] == "bad" for r in batch.row], dtype=torch.bool)
        hidden = scores.hidden.clone()
        hidden[bad] = float("nan")
        return HiddenScores(hidden=hidden, head=scores.head)


def test_a_nan_stops_before_the_optimizer_step_and_names_its_row(tmp_path: Path) -> None:
    rows = [{**row, "sample_id": "bad" if i == 2 else f"good {i}"} for i, row in enumerate(ROWS)]
    from cohobate.data import PromptConfig

    run = trainer(
        tmp_path,
        rows,
        teacher=NaNTeacher(tiny.llama(5)),
        prompts=PromptConfig(sample_id_column="sample_id"),
        args={"on_policy_fraction": 0.0, "per_device_train_batch_size": 8},
    )
    before = checksum(run.model)
    with pytest.raises(NonFiniteError, match="'bad'") as caught:
        run.train()
    assert "good" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_evaluation_is_on_policy_and_graded(tmp_path: Path) -> None:
    def grader(row: Any, text: str) -> float:
        return float(row["completion"] == "8")

    run = trainer(tmp_path, teacher=tiny.llama(5), eval_dataset=ROWS, grader=grader)
    metrics = run.evaluate()
    assert metrics["eval/accuracy"] == pytest.approx(1 / 8)
    assert metrics["eval/loss"] == metrics["eval_loss"] > 0
    assert metrics["eval/completion/mean_length"] > 0


def test_row_sets_with_names_are_evaluated_under_their_names(tmp_path: Path) -> None:
    run = trainer(tmp_path, teacher=tiny.llama(5), eval_dataset={"few": ROWS[:2], "all": ROWS})
    metrics = run.evaluate()
    assert metrics["eval_few/loss"] == run.evaluate(ROWS[:2])["eval/loss"]
    assert metrics["eval_all/loss"] == run.evaluate(ROWS)["eval/loss"]


@pytest.mark.parametrize("name", ["eval/accuracy", "accuracy", "eval_accuracy"])
def test_the_best_checkpoint_is_found_by_a_metric_as_it_is_logged(tmp_path: Path, name: str) -> None:
    grades = iter([0.0] * 8 + [1.0] * 8 + [0.5] * 8)
    args = {
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": name,
    }
    run = trainer(tmp_path, teacher=tiny.llama(5), eval_dataset=ROWS, grader=lambda *_: next(grades), args=args)
    run.train()
    assert run.state.best_metric == 1.0
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_a_rank_whose_rows_are_done_still_samples_and_scores_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a rank with two rows while another has four and cuts them into more micro-batches."""
    from cohobate.trainer import evaluation, step

    run = trainer(tmp_path, teacher=tiny.llama(5), eval_dataset=ROWS[:2], args={"per_device_eval_batch_size": 2})
    alone = run.evaluate()
    asked: list[int] = []
    inner, score = run.rollouts.sample, run.teacher.score
    monkeypatch.setattr(run.rollouts, "sample", lambda r, s: asked.append(len(r.prompt_ids)) or inner(r, s))
    scored: list[int] = []
    monkeypatch.setattr(run.teacher, "score", lambda batch: scored.append(batch.num_pairs) or score(batch))
    monkeypatch.setattr(evaluation, "all_reduce_max", lambda value: value + 1)
    monkeypatch.setattr(step, "all_reduce_max", lambda value: value + 1)
    assert run.evaluate()["eval/loss"] == pytest.approx(alone["eval/loss"], rel=1e-6)
    assert asked == [2, 0]
    assert scored[0] > 0
    assert scored[1:] == [0] * 3


def test_what_was_measured_before_training_stays_in_the_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')  # an earlier run, killed while it wrote
    run = trainer(tmp_path, teacher=tiny.llama(5), eval_dataset=ROWS, args={"max_steps": 1})
    before = run.evaluate()["eval/loss"]
    run.train()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["step"] == 0
    assert lines[0]["eval/loss"] == before
    assert [line["step"] for line in lines[1:]] == [1, 1]  # the step, and the summary of the run


def test_evaluation_of_a_recorded_method_scores_the_held_out_rows_by_the_same_counts(tmp_path: Path) -> None:
    args = {"on_policy_fraction": 0.0, "per_device_eval_batch_size": 3}
    run = trainer(tmp_path, objective=CrossEntropyObjective(), eval_dataset=ROWS, args=args)
    found = run.evaluate()["eval/loss"]
    tokenizer, total, count = tiny.char_tokenizer(), 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        target = [*tokenizer(row["completion"])["input_ids"], tiny.EOS]
        with torch.no_grad():
            logits = run.model(torch.tensor([prompt + target])).logits[0].double()
        logprobs = logits.log_softmax(-1)
        total -= sum(float(logprobs[len(prompt) - 1 + j, t]) for j, t in enumerate(target))
        count += len(target)
    assert found == pytest.approx(total / count, rel=1e-6)


def test_evaluating_changes_nothing_about_the_training(tmp_path: Path) -> None:
    def run(folder: Path, **args: Any) -> DistillationTrainer:
        return trainer(folder, teacher=tiny.llama(5), eval_dataset=ROWS, args={"max_steps": 3, **args})

    never, always = run(tmp_path / "a"), run(tmp_path / "b", eval_strategy="steps", eval_steps=1)
    never.train()
    always.train()
    for a, b in zip(never.model.parameters(), always.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_save_writes_a_model_card(tmp_path: Path) -> None:
    run = trainer(tmp_path, teacher=tiny.llama(5), args={"save_strategy": "steps", "save_steps": 1, "max_steps": 1})
    run.train()
    run.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-1", "final"):
        text = (tmp_path / folder / "README.md").read_text()
        assert "optimizer steps | 1 " in text
        assert "LocalTeacher" in text


def test_settings_that_cannot_be_followed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="DistillationConfig, got TrainingArguments"):
        DistillationTrainer(model=tiny.llama(1), args=TrainingArguments(output_dir=str(tmp_path)))  # pyright: ignore
    monkeypatch.setattr(DistillationConfig, "n_gpu", 2)
    with pytest.raises(ConfigError, match="one process a GPU"):
        trainer(tmp_path, teacher=tiny.llama(5))


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ({"rows": []}, DataError, "empty"),
        ({"rows": ROWS[:3]}, DataError, "3 usable rows.*takes 4"),
        ({"rows": [{"question": "1+1="}] * 8}, DataError, "prompt"),
        ({"teacher": tiny.llama(5, vocab_size=30)}, CohobateError, "csd|xtoken"),
        ({"teacher": 7}, ConfigError, "teacher must be"),
        ({"teacher": None}, ConfigError, "no teacher was given"),
        ({"teacher_init_kwargs": {"dtype": "float32"}}, ConfigError, "already there"),
        (
            {"teacher": "self", "teacher_processing_class": tiny.char_tokenizer()},
            ConfigError,
            "no effect",
        ),
        ({"args": {"beta": 0.3}, "objective": DivergenceObjective(beta=0.1)}, ConfigError, "beta=0.3"),
    ],
)
def test_what_cannot_work_is_refused_when_the_run_is_built(
    tmp_path: Path, parts: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        trainer(tmp_path, parts.pop("rows", None), **{"teacher": tiny.llama(5), **parts})


def test_frozen_teacher_config_builds_from_the_student(tmp_path: Path) -> None:
    run = trainer(tmp_path, teacher=FrozenTeacher(), privileged=PrivilegedConfig(source="hint"))
    run.train()
    assert run.state.log_history[0]["kl/reverse"] > 0


def test_a_padded_head_is_cut_to_the_real_ids_on_both_sides(tmp_path: Path) -> None:
    """Qwen2.5 has heads of 151,936 and 152,064 rows over one tokenizer; padding must get neither mass nor gradient."""
    student, teacher = tiny.llama(1, vocab_size=26, tie=False), tiny.llama(5, vocab_size=30, tie=False)
    run = trainer(tmp_path, model=student, teacher=teacher, teacher_processing_class=tiny.char_tokenizer())
    assert run.vocab_size == 23
    head = student.get_output_embeddings().weight
    before = head.detach().clone()
    run.train()
    assert torch.equal(head[23:], before[23:])
    assert not torch.equal(head[:23], before[:23])
    teacher_alone = trainer(tmp_path, model=tiny.llama(1, vocab_size=26), teacher="self")
    assert teacher_alone.vocab_size == 23


def test_a_prompt_that_leaves_no_room_for_its_completion_is_refused(tmp_path: Path) -> None:
    rows = [*PROMPTS[:7], {"prompt": "1" * 128}]
    with pytest.raises(DataError, match=r"128 prompt tokens .*128 positions .*over_long"):
        trainer(tmp_path, rows, teacher=tiny.llama(5))
    trainer(tmp_path, [*PROMPTS[:7], {"prompt": "1" * 127}], teacher=tiny.llama(5))
