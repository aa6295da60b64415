# SPDX-License-Identifier: Apache-2.0
"""A task and two tiny models that ship with the package, so that the point of the library shows in minutes on a CPU.

The two folders load with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, offline;
`examples/train_demo_models.py` made them.
"""

from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
TEACHER = ASSETS / "teacher"
STUDENT = ASSETS / "student"

__all__ = ["ASSETS", "STUDENT", "TEACHER", "load_student", "load_teacher"]


def load_student() -> tuple[Any, Any]:
    """(model, tokenizer) of the half-trained student, in fp32."""
    return _load(STUDENT)


def load_teacher() -> tuple[Any, Any]:
    """(model, tokenizer) of the teacher, in fp32."""
    return _load(TEACHER)


def _load(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
