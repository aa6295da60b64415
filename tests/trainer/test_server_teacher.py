# SPDX-License-Identifier: Apache-2.0
"""A step with a teacher on a server is the step with the same teacher here, compared on the same ids."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ServerResponseError
from cohobate.functional.scores import TopKScores
from cohobate.objectives import DivergenceObjective
from cohobate.teachers import LocalTeacher, ServerTeacher, server_support
from cohobate.teachers.server_support import ServerSupport
from cohobate.trainer import DistillationConfig, DistillationTrainer
from fake_server import FakeServer

ROWS = [{"prompt": prompt} for prompt in ("1+2=", "a", "30+3=", "gh cd")]
TEACHER = tiny.llama(7, hidden=12)


class LocalSparseTeacher:
    """The teacher's own logits at every pair, cut to the ids that a server would have said."""

    provides = TopKScores

    def __init__(self, support: ServerSupport) -> None:
        self.inner, self.support = LocalTeacher(TEACHER), support

    def score(self, batch: AlignedBatch, /) -> TopKScores:
        logits = self.inner.score(batch).logits()
        rows = []
        for row, token in zip(logits.tolist(), batch.target_ids.tolist(), strict=True):
            likeliest = sorted(range(len(row)), key=lambda v: -row[v])[: self.support.top_k]
            if self.support.keep_sampled and token not in likeliest:
                likeliest[-1] = token
            rows.append(sorted(likeliest))
        ids = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self.support.top_k)
        normalizer = logits.logsumexp(-1)
        return TopKScores(
            ids=ids,
            logits=logits.gather(1, ids),
            log_normalizer=normalizer,
            log_normalizer_t1=normalizer,
            realized_logit=logits.gather(1, batch.target_ids[:, None])[:, 0],
            temperature=1.0,
            vocab_size=logits.shape[1],
        )


def one_step(folder: Path, teacher: Any, objective: Any, batch: int, accumulation: int) -> tuple[float, list[Any]]:
    """The loss of one step of gradient descent, and the weights after it."""
    args = DistillationConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        max_completion_length=6,
        seed=3,
    )
    run = DistillationTrainer(
        model=tiny.llama(1),
        teacher=teacher,
        args=args,
        train_dataset=ROWS,
        processing_class=tiny.char_tokenizer(),
        objective=objective,
        rollouts=tiny.CannedRollouts(lambda prompt: [5, 9, 4, 11, 6][: (len(prompt) * 3) % 5]),  # empty for "gh cd"
    )
    run.train()
    return run.state.log_history[0]["loss"], [p.detach().clone() for p in run.model.parameters()]


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("setting", [(0.0, 3), (0.5, 1), (1.0, 1)], ids=str)
def test_a_step_equals_that_of_a_local_teacher_on_the_same_ids(
    tmp_path: Path, setting: tuple[float, int], batch: int, accumulation: int
):
    support = server_support(beta=setting[0], loss_top_k=setting[1])
    objective = DivergenceObjective(beta=setting[0], tail=support.tail)
    remote = ServerTeacher(
        "http://localhost:8000",
        vocab_size=23,
        top_k=support.top_k,
        keep_sampled=support.keep_sampled,
        surroundings=FakeServer(TEACHER).surroundings,
    )
    loss, weights = one_step(tmp_path, remote, objective, batch, accumulation)
    wanted, local = one_step(tmp_path, LocalSparseTeacher(support), objective, batch, accumulation)
    assert loss == pytest.approx(wanted, rel=1e-5)
    start = list(tiny.llama(1).parameters())
    for ours, theirs, before in zip(weights, local, start, strict=True):
        torch.testing.assert_close(ours - before, theirs - before, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(ours, before) for ours, before in zip(weights, start, strict=True))


def test_a_bad_answer_stops_before_the_weights_move(tmp_path: Path):
    server = FakeServer(TEACHER)
    server.edit = lambda answer, payload: answer["choices"][0]["prompt_logprobs"].pop() and None
    teacher = ServerTeacher("http://localhost:8000", vocab_size=23, top_k=3, surroundings=server.surroundings)
    with pytest.raises(ServerResponseError):
        one_step(tmp_path, teacher, DivergenceObjective(beta=0.0), 2, 1)
