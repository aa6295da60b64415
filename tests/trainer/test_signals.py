# SPDX-License-Identifier: Apache-2.0
"""The first signal is a flag, the second acts; the handlers of before come back."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cohobate.trainer import GracefulStop

NOTHING: Any = None


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the handler below ours was called with."""
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_noted_and_the_second_goes_on_to_the_earlier_handler(heard: list[int]) -> None:
    announced: list[int] = []
    stop = GracefulStop(announce=announced.append)
    stop.on_train_begin(NOTHING, NOTHING, NOTHING)
    signal.raise_signal(signal.SIGTERM)
    assert stop.received == signal.SIGTERM
    assert announced == [signal.SIGTERM]
    assert heard == []
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    stop.on_train_end(NOTHING, NOTHING, NOTHING)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2


def test_training_again_after_an_error_starts_without_the_old_signal_and_still_knows_the_earlier_handler(
    heard: list[int],
) -> None:
    stop = GracefulStop()
    stop.on_train_begin(NOTHING, NOTHING, NOTHING)
    signal.raise_signal(signal.SIGTERM)
    stop.on_train_begin(NOTHING, NOTHING, NOTHING)  # no on_train_end: the first training raised
    assert stop.received is None
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    stop.restore()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2
