# SPDX-License-Identifier: Apache-2.0
"""Training beside teachers with tokenizers of their own, end to end on models of a few thousand parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cross_tokenizer_step import STUDENT, TABLES, TEACHER, Arrangement, own_teacher, trainer

import tiny
from cohobate.data import PromptConfig
from cohobate.errors import ConfigError, DataError, VocabularyMismatch
from cohobate.objectives import DivergenceObjective
from cohobate.objectives.cross_tokenizer import CommonSupportObjective
from cohobate.teachers import LocalTeacher, OwnTokenizerTeacher, SeveralTeachers
from cohobate.trainer import DistillationConfig, DistillationTrainer


def losses(run: DistillationTrainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("method", "name"),
    [("csd", "kd/teacher0"), ("csd-recorded", "loss"), ("several", "kd/teacher1"), ("xtoken", "kd/teacher0")],
)
def test_the_divergence_falls(tmp_path: Path, method: str, name: str) -> None:
    args = {"max_steps": 20, "learning_rate": 2e-2, "lr_scheduler_type": "constant"}
    run = trainer(Arrangement(method=method), str(tmp_path), **args)
    run.train()
    found = losses(run, name)
    assert found[-1] < 0.6 * found[0]


def test_the_teacher_stands_still_and_the_students_padded_ids_get_no_gradient(tmp_path: Path) -> None:
    run = trainer(Arrangement(method="csd"), str(tmp_path))
    assert run.vocab_size == len(STUDENT)
    teacher = run.teacher.teacher.model
    before = [p.detach().clone() for p in teacher.parameters()]
    head = run.model.get_output_embeddings().weight
    padded = head[len(STUDENT) :].detach().clone()
    run.train()
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    decay = run.args.learning_rate * run.args.weight_decay
    assert decay == 0
    assert torch.equal(padded, head[len(STUDENT) :])


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    def run(folder: Path, **args: Any) -> DistillationTrainer:
        saving = {"save_steps": 1, "save_strategy": "steps", "max_steps": 4, "learning_rate": 1e-2, **args}
        return trainer(Arrangement(method="several", accumulation=2), str(folder), **saving)

    whole = run(tmp_path)
    whole.train()
    resumed = run(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert losses(whole)[2:] == losses(resumed)[-2:]


@pytest.mark.parametrize("method", ["csd", "csd-recorded", "several"])
def test_evaluation_aligns_and_scores_as_training_does(tmp_path: Path, method: str) -> None:
    run = trainer(Arrangement(method=method), str(tmp_path), learning_rate=0.0, per_device_eval_batch_size=3)
    run.train()
    log = next(entry for entry in run.state.log_history if "loss" in entry)
    found = run.evaluate(run.train_dataset)
    for name in ("kd/teacher0", "align/unaligned_student_share", "align/rows_without_chunk", "chunks/mismatch_share"):
        assert found[f"eval/{name}"] == pytest.approx(log[name], rel=1e-9), name
    assert found["eval/loss"] > 0


def test_a_row_that_one_model_cannot_hold_is_named_with_the_model(tmp_path: Path) -> None:
    run = trainer(Arrangement(method="csd", token_budget=9, packing=True), str(tmp_path))
    with pytest.raises(DataError, match=r"row '.+' has \d+ tokens for the (student|teacher 0), more than the 9"):
        run.train()


def test_packing_needs_a_budget_and_models_that_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packing fills micro-batches up to token_budget"):
        DistillationConfig(output_dir=str(tmp_path), packing=True)
    teacher = own_teacher(5)
    teacher.teacher.model.config._attn_implementation = "flex_attention"
    objective = CommonSupportObjective(parts=(TABLES,))
    with pytest.raises(ConfigError, match=r"rows of the teacher .*cannot be packed"):
        plain(tmp_path, teacher=teacher, objective=objective, packing=True, token_budget=100)


def test_a_same_tokenizer_teacher_alone_is_no_matter_of_chunks(tmp_path: Path) -> None:
    """One teacher in `SeveralTeachers` that reads the student's tokens sees what it sees without."""
    teacher = tiny.llama(6, hidden=12, vocab_size=len(STUDENT)).double()
    objective = CommonSupportObjective(parts=(None,), dynamic_scaling="off", same_vocab_top_k=None)

    def loss(given: Any) -> float:
        run = plain(tmp_path, width=len(STUDENT), teacher=given, objective=objective)
        run.train()
        assert not any(name.startswith("align/") for name in run.state.log_history[0])
        return losses(run)[0]

    inner = LocalTeacher(teacher)
    several = loss(SeveralTeachers([inner]))
    assert several == pytest.approx(loss(inner), rel=1e-9)


def plain(folder: Path, *, width: int = 32, **given: Any) -> DistillationTrainer:
    args = DistillationConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        max_completion_length=4,
        on_policy_fraction=given.pop("on_policy_fraction", 1.0),
        packing=given.pop("packing", False),
        token_budget=given.pop("token_budget", None),
    )
    return DistillationTrainer(
        model=tiny.llama(1, vocab_size=width).double(),
        args=args,
        train_dataset=given.pop("rows", [{"prompt": "12"}, {"prompt": "3+4"}]),
        processing_class=STUDENT,
        rollouts=tiny.CannedRollouts(lambda prompt: [2, 3, 1]),
        **given,
    )


def test_recorded_text_asks_for_no_equal_tokenizers(tmp_path: Path) -> None:
    """Text is compared by its bytes, so what `check_same_vocabulary` demands of recorded text does not apply."""
    objective = CommonSupportObjective(parts=(TABLES,), dynamic_scaling="off")
    rows = [{"text": "123+4=5 bc"}, {"text": "0 1201205"}]
    run = plain(tmp_path, teacher=own_teacher(5), objective=objective, rows=rows, on_policy_fraction=0.0)
    run.train()
    assert losses(run)[0] > 0
    assert run.state.log_history[0]["align/rows_without_chunk"] == 0


def test_parts_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    objective = CommonSupportObjective(parts=(TABLES,), dynamic_scaling="off")
    with pytest.raises(ConfigError, match="teacher_processing_class would have no effect beside OwnTokenizerTeacher"):
        plain(tmp_path, teacher=own_teacher(5), objective=objective, teacher_processing_class=TEACHER)
    with pytest.raises(ConfigError, match=r"DivergenceObjective accepts .* provides SeveralScores"):
        plain(tmp_path, teacher=SeveralTeachers([own_teacher(5)]), objective=DivergenceObjective(beta=0.5))
    with pytest.raises(VocabularyMismatch, match="csd"):
        plain(tmp_path, teacher=tiny.llama(5, vocab_size=40), teacher_processing_class=TEACHER)
    asked, inner = PromptConfig(append_eos=False), LocalTeacher(tiny.llama(5, vocab_size=40))
    with pytest.raises(ConfigError, match=r"prompts.append_eos of a teacher would have no effect"):
        plain(tmp_path, teacher=OwnTokenizerTeacher(inner, TEACHER, prompts=asked), objective=objective)
