# SPDX-License-Identifier: Apache-2.0
import pytest

from cohobate.rollouts import vllm_sync


@pytest.fixture(autouse=True)
def _a_short_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of its tokens: these tests hand weights over more often than they do anything else."""
    monkeypatch.setattr(vllm_sync, "NUM_TOKENS", 8)
