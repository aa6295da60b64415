# SPDX-License-Identifier: Apache-2.0
"""One step of a run with lessons over four rows of which the later half, or all, have no successful completion.

`test_lessons_ranks.py` calls `one_step` in its own process and starts this file on two ranks: both run the same lines.
"""

import json
import sys
import tempfile
from typing import Any

import torch

import tiny
from cohobate.data import LessonConfig, PrivilegedConfig
from cohobate.objectives import DivergenceObjective, ImportanceWeightedObjective
from cohobate.teachers import EMATeacher
from cohobate.trainer import DistillationConfig, DistillationTrainer

CASES = ("late", "all")
ANSWERS = ("4", "7a", "4", "bc4", "e")  # of sample j of every prompt


class InTurn:
    """Answers sample j of every prompt with `ANSWERS[j]`, as a policy that drew each token with probability 0.3."""

    def sample(self, request: Any, sampling: Any, /) -> Any:
        tokenizer, n = tiny.char_tokenizer(), sampling.n_samples_per_prompt
        place = iter(range(len(request.prompt_ids) * n))
        return tiny.CannedRollouts(lambda prompt: tokenizer(ANSWERS[next(place) % n])["input_ids"]).sample(
            request, sampling
        )


def one_step(case: str, world: int) -> dict[str, Any]:
    """The log of the step, and the sum of all weights after it."""
    answers = {"late": "4499", "all": "9999"}[case]
    rows = [{"prompt": f"{i}+{4 - i}=", "answer": answer} for i, answer in enumerate(answers)]
    with tempfile.TemporaryDirectory() as folder:
        run = DistillationTrainer(
            model=tiny.llama(1, layers=2),
            teacher=EMATeacher(decay=0.5),
            args=DistillationConfig(
                output_dir=folder,
                max_steps=2,
                per_device_train_batch_size=4 // world,
                num_generations=len(ANSWERS),
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                train_sampling_strategy="sequential",
                max_completion_length=4,
                seed=3,
            ),
            train_dataset=rows,
            processing_class=tiny.char_tokenizer(),
            objective=ImportanceWeightedObjective(
                objective=DivergenceObjective(beta=0.5, top_k=4, top_k_of="student")
            ),
            rollouts=InTurn(),
            privileged=PrivilegedConfig(
                lessons=LessonConfig(grader="exact_match", template="{demonstration}{question}")
            ),
        )
        run.train()
    model = run.accelerator.unwrap_model(run.model)
    return {
        "logs": [entry for entry in run.state.log_history if "loss" in entry],
        "weights": sum(float(p.detach().double().abs().sum()) for p in model.parameters()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {case: one_step(case, int(sys.argv[1])) for case in CASES}
    sys.stdout.write("RESULT " + json.dumps(results) + "\n")
