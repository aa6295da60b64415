# SPDX-License-Identifier: Apache-2.0
"""Settings of the whole suite: offline, no telemetry, one thread a process, property tests without deadlines, GPU
kernels interpreted on the CPU, and run-time type checks of the mathematical core."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes on two cores must not start four threads
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; `make test-gpu` compiles instead

import pytest
from beartype import BeartypeConf
from beartype.claw import beartype_packages
from hypothesis import settings

# CI repeats the same cases on every run, so that a red run is about the change; elsewhere each run tries new ones.
settings.register_profile("cohobate", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("cohobate")


class WrongArgument(UserWarning):
    """An argument of another type than annotated; not an error, since many tests pass one to read our own message."""


# What these packages return and assign is checked against their annotations at run time. The others are left out:
# beartype 0.23 fails on some of their annotations (AttributeError: 'Iota' object has no attribute 'hint').
beartype_packages(
    ("cohobate.functional", "cohobate.align", "cohobate.objectives"),
    conf=BeartypeConf(
        is_color=False,
        is_pep484_tower=True,
        violation_param_type=WrongArgument,
        claw_skip_package_names=(
            "cohobate.functional.kernels.gpu_rows",
        ),  # Triton reads its annotations in its own way
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:(?s).*violates type hint:UserWarning")
