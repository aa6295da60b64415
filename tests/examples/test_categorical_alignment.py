# SPDX-License-Identifier: Apache-2.0
"""The teaching experiment shows what it says: aligned logits teach the student, the classic slice does not."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "categorical_alignment.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("categorical_alignment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_aligned_logits_learn_the_responses_and_the_classic_slice_does_not(example, tmp_path, capsys):
    plot = tmp_path / "new" / "plot.png"
    right, wrong = example.main([str(plot)]).values()
    # both losses fall to nothing: the loss cannot tell them apart
    assert right.loss[0] > 2
    assert wrong.loss[0] > 2
    assert right.loss[-1] < 0.05
    assert wrong.loss[-1] < 0.05
    # the probability of the correct token can
    assert [len(row) for row in right.final] == [5, 3, 4]
    assert min(p for row in right.final for p in row) > 0.95
    assert right.mean_probability[0] < 0.2
    assert right.mean_probability[-1] > 0.95
    assert wrong.mean_probability[-1] < 0.2
    assert max(p for row in wrong.final for p in row) < 0.2
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"{right.mean_probability[-1]:.3f}" in printed
    assert f"{wrong.mean_probability[-1]:.3f}" in printed


def test_the_classic_slice_is_right_when_all_prompts_have_one_length(example, monkeypatch):
    """So the failure above is the alignment's, not the optimiser's."""
    monkeypatch.setattr(example, "STUDENT_PROMPTS", [4, 4, 4])
    monkeypatch.setattr(example, "TEACHER_PROMPTS", [6, 6, 6])
    assert example.train(example.cut_at_the_longest_prompt).mean_probability[-1] > 0.95
