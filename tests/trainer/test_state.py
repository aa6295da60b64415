# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds beyond transformers' own: it comes back as it was, or not at all."""

from pathlib import Path

import pytest
import torch

from cohobate.errors import ConfigError
from cohobate.parallel.world import World
from cohobate.trainer.aligners import without_pairs
from cohobate.trainer.state import load_state, read_tensors, save_state, write_tensors
from cohobate.trainer.step import Window

ALONE = World(rank=0, size=1)
HELD = Window(groups=((without_pairs(3),), (without_pairs(4), without_pairs(5)))), 2


def test_a_window_comes_back_as_it_was(tmp_path: Path) -> None:
    save_state(tmp_path, teacher=None, held=HELD, world=ALONE)
    found = load_state(tmp_path, teacher=None, world=ALONE)
    assert found is not None
    window, uses = found
    assert uses == 2
    tokens = [[int(b.student.model_inputs["input_ids"]) for b in group] for group in window.groups]
    assert tokens == [[3], [4, 5]]
    assert window.groups[1][0].sample_ids == ("",)
    assert window.groups[1][0].is_sampled.dtype == torch.bool


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_of_another_number_of_ranks_is_refused_on_every_rank(tmp_path: Path, rank: int) -> None:
    save_state(tmp_path, teacher=None, held=HELD, world=ALONE)
    with pytest.raises(ConfigError, match=r"1 processes .* 2 now. Resume with 1"):
        load_state(tmp_path, teacher=None, world=World(rank=rank, size=2))


def test_a_save_without_a_window_removes_the_one_of_an_earlier_run(tmp_path: Path) -> None:
    save_state(tmp_path, teacher=None, held=HELD, world=ALONE)
    save_state(tmp_path, teacher=None, held=None, world=ALONE)
    assert load_state(tmp_path, teacher=None, world=ALONE) is None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": torch.ones(2)}, {"format": 1})
    with pytest.raises(TypeError):
        write_tensors(path, {"x": torch.zeros(2)}, {"format": object()})
    assert read_tensors(path)[0]["x"].tolist() == [1.0, 1.0]
    assert list(tmp_path.iterdir()) == [path]
