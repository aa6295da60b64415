# SPDX-License-Identifier: Apache-2.0
"""One optimizer step over the same eight rows, however they are arranged; its loss, gradient norm and metrics.

`test_invariance.py` calls `one_step` in its own process and starts this file on several ranks: all run the same lines.
"""

import itertools
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch

import tiny
from cohobate.data import PrivilegedConfig
from cohobate.objectives import CrossEntropyObjective, DivergenceObjective, PolicyGradientObjective
from cohobate.trainer import DistillationConfig, DistillationTrainer

TOTAL_ROWS = 8


def answer(prompt: tuple[int, ...]) -> list[int]:
    """0 to 7 tokens that depend on the prompt alone; some rows get none."""
    length = sum(prompt) % 8
    return [2 + (prompt[0] * 7 + 3 * j) % 19 for j in range(length)]


def rows(empty: str) -> list[dict[str, str]]:
    """Prompts of unequal length, of which some have an empty completion: `none`, `odd` places or the `late` half."""
    found: list[dict[str, str]] = []
    tokenizer = tiny.char_tokenizer()
    for candidate in itertools.count(1):
        prompt = f"{candidate}+{candidate * 37 % 1000}="
        place = len(found)
        wanted = {"none": False, "odd": place % 2 == 1, "late": place >= TOTAL_ROWS // 2}[empty]
        if wanted == (not answer(tuple(tokenizer(prompt)["input_ids"]))):
            found.append({"prompt": prompt, "completion": f"{candidate * 38}", "hint": "ab" * (candidate % 4 + 1)})
        if len(found) == TOTAL_ROWS:
            break
    return found


@dataclass(frozen=True)
class Arrangement:
    """How the eight rows are spread; nothing here may change the result."""

    method: str  # gkd | opsd | pg | ce
    empty: str = "none"
    accumulation: int = 1
    world: int = 1
    token_budget: int | None = None


def trainer(args: Arrangement, folder: str) -> DistillationTrainer:
    recorded = args.method == "ce"
    objectives = {
        "gkd": DivergenceObjective(beta=0.1),
        "opsd": DivergenceObjective(beta=1.0),
        "pg": PolicyGradientObjective(),
        "ce": CrossEntropyObjective(),
    }
    config = DistillationConfig(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=TOTAL_ROWS // args.accumulation // args.world,
        gradient_accumulation_steps=args.accumulation,
        token_budget=args.token_budget,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
        max_completion_length=8,
        on_policy_fraction=0.0 if recorded else 1.0,
        seed=3,
    )
    teacher = None if recorded else "self" if args.method == "opsd" else tiny.llama(5, hidden=12)
    data = rows(args.empty)
    if not recorded:
        data = [{k: v for k, v in row.items() if k != "completion"} for row in data]
    return DistillationTrainer(
        model=tiny.llama(1, layers=2),
        teacher=teacher,
        args=config,
        train_dataset=data,
        processing_class=tiny.char_tokenizer(),
        objective=objectives[args.method],
        rollouts=tiny.CannedRollouts(answer),
        privileged=PrivilegedConfig(source="hint") if args.method == "opsd" else None,
    )


def one_step(arrangement: Arrangement) -> dict[str, Any]:
    """Train one step; the log of that step and the sum of all weights after it."""
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(arrangement, folder)
        run.train()
    log = next(entry for entry in run.state.log_history if "loss" in entry)
    model = run.accelerator.unwrap_model(run.model)
    return {"log": log, "weights": sum(float(p.detach().double().abs().sum()) for p in model.parameters())}


def arrangements(world: int) -> list[Arrangement]:
    """Every arrangement of the eight rows on `world` ranks that the test compares."""
    return [
        Arrangement(method=method, empty=empty, accumulation=accumulation, world=world, token_budget=budget)
        for method in ("gkd", "opsd", "pg", "ce")
        for empty in (("none",) if method == "ce" else ("none", "odd", "late"))
        for accumulation in (1, 2, 4, 8)
        for budget in (None, 60)
        if accumulation * world <= TOTAL_ROWS
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [[asdict(a), one_step(a)] for a in arrangements(int(sys.argv[1]))]
    sys.stdout.write("RESULT " + json.dumps(results) + "\n")
