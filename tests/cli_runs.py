# SPDX-License-Identifier: Apache-2.0
"""What a run of the command came to, and how a refusal must look."""

RUN = [
    "student.model=bpe",
    "teachers.0.model=bpe_teacher",
    "teachers.0.top_k=9",
    "data.train=text.jsonl",
    "training.max_steps=2",
    "training.per_device_train_batch_size=4",
    "training.use_cpu=true",
    "sampling.max_completion_length=5",
]
"""A small run of `csd`; the folder must have the parts of `tests/cli/conftest.py`."""


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def refused(done: Outcome, code: int, *words: str) -> None:
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    paragraph = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert len(paragraph) == 1, done.err
    for word in words:
        assert word in paragraph[0]
