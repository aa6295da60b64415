# SPDX-License-Identifier: Apache-2.0
"""Weights sharded over two ranks against whole ones in one process: logits, gradients, and two training steps.

By FSDP2, where the ranks read batches of their own, and by tensor parallelism, where they read the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks

from cohobate.teachers import LocalTeacher

from .ranks import CASES, PAIRS, batch, make, train

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("untied", "tied")}
    for name, folder in made.items():
        make(tie=name == "tied", vocab_size=25).save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path]) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__).parent / "ranks.py", [str(f) for f in folders.values()], world=2, timeout=300)


def test_a_sharded_model_gives_its_own_logits_and_gradients_also_beside_a_rank_without_pairs(ranks):
    model = make()
    inputs = batch(0, PAIRS[0]).student.model_inputs
    logits = model(**inputs).logits.reshape(12, -1)[PAIRS[0]]
    logits.square().sum().backward()
    for name, tolerance in (("float32", 1e-4), ("bfloat16", 5e-2)):
        for result in (r["logits"][name] for r in ranks):
            assert result["dtypes"] == [f"torch.{name}"] * 2
            for parameter, values in model.named_parameters():  # the mean over ranks, one of which adds nothing
                seen = torch.tensor(result["gradients"][parameter])  # read twice: half of it each time
                assert (seen - values.grad).norm() <= tolerance * values.grad.norm()
        for seen in ranks[0]["logits"][name]["logits"]:
            assert (torch.tensor(seen) - logits).abs().max() <= tolerance * logits.abs().max()
        assert ranks[1]["logits"][name]["logits"] == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_the_fused_loss_equals_that_of_the_whole_model(ranks, name: str):
    case = CASES[name]
    pairs = case.get("pairs", PAIRS)
    batches = [batch(rank + 2 * i, pairs[rank]) for i in range(case.get("micro", 1)) for rank in (0, 1)]
    model = make(tie=case.get("tie", False), lora=case.get("lora", False))
    expected = train(model, LocalTeacher(make(seed=7)), batches, factor=1.0)
    found = [r["cases"][name] for r in ranks]
    assert sum(f["loss"] for f in found) == pytest.approx(expected["loss"], rel=1e-5)
    for result in found:
        for kind in ("gradients", "values"):
            assert result[kind].keys() == expected[kind].keys()
            for parameter, values in expected[kind].items():
                wanted = torch.tensor(values)
                seen = torch.tensor(result[kind][parameter])
                torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, p=parameter: f"{p}: {m}")
    if "lora" in case:
        assert all(torch.tensor(g).abs().max() > 1e-3 for g in expected["gradients"].values())


def test_the_head_is_gathered_once_a_step_and_its_gradient_scattered_once(ranks):
    head = 2 * 12 * 16  # 23 ids in shards of 12
    for result in ranks:
        seen = [kind for kind, size in result["cases"]["every part"]["collectives"] if size == head]
        # The teacher's, which has the same size and stays; the student's, for an evaluation and the step after it.
        assert seen == ["gather", "gather", "scatter", "gather", "scatter"]


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_tensor_parallel_head_is_gathered_and_its_gradient_cut_to_the_shard(ranks, folders, name: str):
    model = make(tie=name == "tied", vocab_size=25)
    inputs = batch(0, PAIRS[0]).student.model_inputs
    logits = model(**inputs).logits.reshape(12, -1)[PAIRS[0]]
    logits.square().sum().backward()
    for result in (r["tensor parallel"][str(folders[name])] for r in ranks):
        assert result["readable"] is True
        assert "Shard(dim=0)" in result["placements"]
        torch.testing.assert_close(torch.tensor(result["logits"]), logits, rtol=1e-4, atol=1e-5)
        for parameter, values in model.named_parameters():
            seen = torch.tensor(result["gradients"][parameter])
            torch.testing.assert_close(seen, values.grad, rtol=1e-4, atol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}")


def test_what_cannot_work_on_shards_says_so(ranks):
    for result in ranks:
        assert result["readable"] is True
        assert "sharded over ranks" in result["refusals"]["frozen"]
        assert "Call fully_shard on the head" in result["refusals"]["part"]
