# SPDX-License-Identifier: Apache-2.0
"""What a run of the command came to, and how a refusal must look."""


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
