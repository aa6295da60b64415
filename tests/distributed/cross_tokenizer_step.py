# SPDX-License-Identifier: Apache-2.0
"""One optimizer step with teachers that have tokenizers of their own, over the same eight rows, however arranged.

`test_cross_tokenizer_invariance.py` calls `one_step` in its own process and starts this file on several ranks. In
float64, so that only what is wrong can differ.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import tiny
import tiny_bpe
from cohobate.data import PrivilegedConfig
from cohobate.objectives.cross_tokenizer import CommonSupportObjective, ProjectedObjective
from cohobate.teachers import LocalTeacher, OwnTokenizerTeacher, Routing, SeveralTeachers
from cohobate.trainer import DistillationConfig, DistillationTrainer
from cohobate.vocab import Projection, SubtokenTables

TOTAL_ROWS = 8
STUDENT, TEACHER = tiny_bpe.student_tokenizer(), tiny_bpe.teacher_tokenizer()
TABLES = SubtokenTables.build(STUDENT, TEACHER)
PROJECTION = Projection.build(STUDENT, TEACHER)


def answer(prompt: tuple[int, ...]) -> list[int]:
    """Up to 8 tokens that depend on the prompt alone: one answer is empty, some end, some go on behind their end."""
    length = sum(prompt) % 8
    ids = [2 + (prompt[0] * 7 + 5 * j) % (len(STUDENT) - 2) for j in range(length)]
    return [*ids, 1] if length in (3, 6) else [*ids, 1, 5, 6] if length == 5 else ids


def rows(*, recorded: bool) -> list[dict[str, str]]:
    found = [{"prompt": f"{3 * i}+{i * 412}=", "hint": "abc"[: 1 + i % 3]} for i in range(1, TOTAL_ROWS + 1)]
    return [{**row, "completion": f"{120 * i}12 bc=5{'3' * i}"} for i, row in enumerate(found)] if recorded else found


@dataclass(frozen=True)
class Arrangement:
    """How the eight rows are spread; nothing here but the method may change the result."""

    method: str  # csd | csd-recorded | csd-top-k | several | routed | twins | xtoken
    accumulation: int = 1
    world: int = 1
    token_budget: int | None = None
    packing: bool = False


def own_teacher(seed: int, **options: Any) -> OwnTokenizerTeacher:
    model = tiny.llama(seed, hidden=12, vocab_size=40).double()  # a head that is wider than its tokenizer
    return OwnTokenizerTeacher(LocalTeacher(model), TEACHER, **options)


def parts(method: str) -> dict[str, Any]:
    """Teacher and objective of a method."""
    if method == "several":
        same = LocalTeacher(tiny.llama(6, hidden=12, vocab_size=32).double(), vocab_size=len(STUDENT))
        teacher: Any = SeveralTeachers([own_teacher(5, top_k=6), same, own_teacher(7, max_length=13)])
        objective: Any = CommonSupportObjective(parts=(TABLES, None, TABLES), weights=(1.0, 0.5, 0.7))
        privileged = PrivilegedConfig(source="hint", template="{privileged}{question}")
        return {"teacher": teacher, "objective": objective, "privileged": privileged}
    if method == "routed":  # three kinds of teachers, each for the rows of one hint
        same = LocalTeacher(tiny.llama(6, hidden=12, vocab_size=32).double(), vocab_size=len(STUDENT))
        routing = Routing(column="hint", routes=(("ab",), ("abc",), None))
        teacher = SeveralTeachers([own_teacher(5, top_k=6), same, own_teacher(7, max_length=13)], routing)
        objective = CommonSupportObjective(parts=(TABLES, None, TABLES), weights=(1.0, 0.5, 0.7), routed=True)
        privileged = PrivilegedConfig(source="hint", template="{privileged}{question}")
        return {"teacher": teacher, "objective": objective, "privileged": privileged}
    if method == "twins":  # the teacher of csd twice
        routing = Routing(column="hint", routes=(("ab",), None))
        objective = CommonSupportObjective(parts=(TABLES, TABLES), ce_rows="all", dynamic_scaling="off", routed=True)
        return {"teacher": SeveralTeachers([own_teacher(5), own_teacher(5)], routing), "objective": objective}
    if method == "xtoken":
        return {"teacher": own_teacher(5), "objective": ProjectedObjective(parts=(PROJECTION,), vocab_top_k=9)}
    options = {"top_k": 6} if method == "csd-top-k" else {}
    ce_rows = "recorded" if method == "csd-recorded" else "all"
    objective = CommonSupportObjective(parts=(TABLES,), ce_rows=ce_rows, dynamic_scaling="off")
    return {"teacher": own_teacher(5, **options), "objective": objective}


def trainer(args: Arrangement, folder: str, **changes: Any) -> DistillationTrainer:
    recorded = args.method == "csd-recorded"
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 1,
        "per_device_train_batch_size": TOTAL_ROWS // args.accumulation // args.world,
        "gradient_accumulation_steps": args.accumulation,
        "token_budget": args.token_budget,
        "packing": args.packing,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "max_completion_length": 9,
        "on_policy_fraction": 0.0 if recorded else 1.0,
        "seed": 3,
    }
    model: nn.Module = tiny.llama(1, layers=2, vocab_size=32).double()
    return DistillationTrainer(
        model=model,
        args=DistillationConfig(**settings | changes),
        train_dataset=rows(recorded=recorded),
        processing_class=STUDENT,
        rollouts=tiny.CannedRollouts(answer),
        **parts(args.method),
    )


def one_step(arrangement: Arrangement) -> dict[str, Any]:
    """Train one step; the log of that step and the sum of all weights after it."""
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(arrangement, folder)
        run.train()
    log = next(entry for entry in run.state.log_history if "loss" in entry)
    model = run.accelerator.unwrap_model(run.model)
    return {"log": log, "weights": sum(float(p.detach().abs().sum()) for p in model.parameters())}


METHODS = ("csd", "csd-recorded", "csd-top-k", "several", "routed", "twins", "xtoken")


def arrangements(world: int) -> list[Arrangement]:
    """Every arrangement of the eight rows on `world` ranks that the test compares."""
    # With room for all rows in one micro-batch, the others of an accumulation have none.
    # Packed, 40 tokens of each model hold two to four rows, and 500 hold them all: then bins are divided or empty.
    alone = [(8, None, False), (2, 70, False), (8, 10_000, False), (1, 40, True), (4, 500, True)]
    ways = alone if world == 1 else [(2, 70, False), (4, 10_000, False), (1, 40, True)]
    return [
        Arrangement(method=method, accumulation=accumulation, world=world, token_budget=budget, packing=packing)
        for method in METHODS
        for accumulation, budget, packing in ways
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [[asdict(a), one_step(a)] for a in arrangements(int(sys.argv[1]))]
    sys.stdout.write("RESULT " + json.dumps(results) + "\n")
