# SPDX-License-Identifier: Apache-2.0
"""Tiles are used again within a thread, a gradient's memory only once nobody holds it, and all is bounded."""

import threading

import pytest
import torch

from cohobate.functional import workspace
from cohobate.functional.workspace import fresh, gradient, release_workspace, set_aside, tile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty():
    release_workspace()
    yield
    release_workspace()


def test_a_tile_of_one_name_lies_where_the_last_did_and_starts_a_cache_line():
    a = tile("a", (3, 5), torch.float32, CPU)
    assert a.shape == (3, 5)
    assert a.data_ptr() % 64 == 0
    assert tile("a", (2, 4), torch.bfloat16, CPU).data_ptr() == a.data_ptr()
    assert tile("b", (3, 5), torch.float32, CPU).data_ptr() != a.data_ptr()


def test_a_larger_tile_is_made_anew_and_replaces_the_smaller():
    a = tile("a", (3, 5), torch.float32, CPU).fill_(1.0)
    b = tile("a", (30, 50), torch.float32, CPU).fill_(2.0)
    assert a.eq(1.0).all()
    assert tile("a", (3, 5), torch.float32, CPU).data_ptr() == b.data_ptr()


def test_another_thread_has_its_own():
    a = tile("a", (3, 5), torch.float32, CPU)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(tile("a", (3, 5), torch.float32, CPU).data_ptr()))
    thread.start()
    thread.join()
    assert seen != [a.data_ptr()]


def test_nothing_above_the_bound_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workspace, "KEEP_BYTES", 100)
    tile("a", (2, 10), torch.float32, CPU)
    tile("b", (2, 10), torch.float32, CPU)
    gradient((2, 20), torch.float32, CPU)
    assert {name: buffer.size for name, buffer in workspace._kept.buffers.items()} == {"a": 80}


def test_a_gradients_memory_is_lent_again_only_when_nobody_holds_it():
    a = gradient((3, 5), torch.float32, CPU).fill_(1.0)
    b = gradient((3, 5), torch.float32, CPU).fill_(2.0)
    assert a.eq(1.0).all()
    view, address = b[1:], b.data_ptr()
    del b
    c = gradient((3, 5), torch.float32, CPU).fill_(3.0)
    assert view.eq(2.0).all()
    address = c.data_ptr()
    del c
    assert gradient((3, 5), torch.float32, CPU).data_ptr() == address


def test_fresh_memory_is_never_kept():
    fresh((3, 5), torch.float64, CPU)
    assert not workspace._kept.buffers


def test_a_tile_made_in_inference_mode_serves_outside():
    with torch.inference_mode():
        tile("a", (2, 2), torch.float32, CPU)
    tile("a", (2, 2), torch.float32, CPU).add_(1.0)


def test_what_is_released_is_gone():
    tile("a", (3, 5), torch.float32, CPU)
    gradient((3, 5), torch.float32, CPU)
    release_workspace()
    assert not workspace._kept.buffers


def test_other_devices_keep_nothing():
    meta = torch.device("meta")
    for made in (tile("a", (2, 3), torch.float32, meta), gradient((2, 3), torch.float32, meta)):
        assert made.device == meta
    assert not workspace._kept.buffers


def test_what_is_set_aside_is_not_used_inside_and_is_there_afterwards():
    a, b = tile("a", (3, 5), torch.float32, CPU).fill_(1.0), gradient((3, 5), torch.float32, CPU).fill_(2.0)
    with set_aside():
        tile("a", (3, 5), torch.float32, CPU).fill_(3.0)
        gradient((3, 5), torch.float32, CPU).fill_(4.0)
    assert a.eq(1.0).all()
    assert tile("a", (3, 5), torch.float32, CPU).data_ptr() == a.data_ptr()
    gradient((3, 5), torch.float32, CPU).fill_(5.0)
    assert b.eq(2.0).all()
