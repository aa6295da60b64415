# SPDX-License-Identifier: Apache-2.0
"""Runs of neighbouring rows, one for each chunk, laid end to end: how chunks of unequal length become flat indices.

What is summed over a chunk is then one `index_add` over all rows, and no `[C, rows]` is made. Only the geometry is
here; which rows belong to a chunk is the losses' own matter (`support_events.py`, `projection.py`).
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def joined_runs(first: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Rows of C chunks end to end, `lengths [C]` of them from `first [C]` on; and the chunk of each: `[R]` twice."""
    chunk = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(chunk)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return first[chunk] + within, chunk
