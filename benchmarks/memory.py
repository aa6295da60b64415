# SPDX-License-Identifier: Apache-2.0
"""Peak resident memory of this process over a stretch of work, read from Linux.

Allocation counters would miss what a matrix library or a compiled kernel takes; the resident set sees every page that
was touched. Freed pages that the allocator keeps are given back first, else the next work would reuse them unseen.
"""

import contextlib
import ctypes
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"no {field} in {_STATUS}")


def start_peak() -> int | None:
    """Bytes resident now, with the high-water mark set back to it; None where this cannot be measured."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, AttributeError):  # another C library: what it keeps stays in the base
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        _CLEAR.write_text("5")
        return _kilobytes("VmRSS") * 1024
    except OSError:
        return None


def peak_since(base: int | None) -> int | None:
    """Bytes of the high-water mark above `base`, or None."""
    return None if base is None else _kilobytes("VmHWM") * 1024 - base
