# SPDX-License-Identifier: Apache-2.0
"""Every measured claim of this library, by one command: `python benchmarks/run.py`, or `make benchmark`.

Each section is printed as it is measured and put into `docs/benchmarks.md`. What is not installed, or not on this
machine, becomes a row that says so.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cross_tokenizer
import fused
import gpu
import growth
import logits
import tables
import trainer
import vocab_parallel
from harness import Case, Measured, measure

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    module: Any
    cases: Callable[..., list[Case]]
    rounds: int
    render: Callable[[Sequence[Measured]], str] = tables.table


def _trainer_text(measured: Sequence[Measured]) -> str:
    return f"{tables.table(measured)}\n\n{tables.breakdown_table(measured)}"


SECTIONS = {
    "fused": Section(module=fused, cases=fused.cases, rounds=7),
    "fused-bf16": Section(module=fused, cases=fused.bf16_cases, rounds=7),
    "logits": Section(module=logits, cases=logits.cases, rounds=9),
    "vocab-parallel": Section(module=vocab_parallel, cases=vocab_parallel.cases, rounds=5),
    "growth": Section(module=growth, cases=growth.cases, rounds=5, render=tables.growth_table),
    "gpu": Section(module=gpu, cases=gpu.cases, rounds=9),
    "cross-tokenizer": Section(module=cross_tokenizer, cases=cross_tokenizer.cases, rounds=5),
    "trainer": Section(module=trainer, cases=trainer.cases, rounds=5, render=_trainer_text),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure this library beside its peers.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--case", help="only the cases whose name contains this text; the page is left alone")
    parser.add_argument("--rounds", type=int, help="rounds of each rotation")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; the page is left alone")
    arguments = parser.parse_args()
    for name in arguments.only:
        section = SECTIONS[name]
        cases = section.cases(quick=arguments.quick)
        if arguments.case is not None:
            cases = [case for case in cases if arguments.case in case.name]
        if not cases:
            continue
        machine = tables.machine()
        rounds = arguments.rounds or (3 if arguments.quick else section.rounds)
        renew = partial(
            _renew, name, section, f"{machine} {rounds} rounds.", write=not (arguments.quick or arguments.case)
        )
        found = measure(
            section.module.__name__, cases, rounds=rounds, say=partial(print, flush=True), after_case=renew
        )
        print(f"\n## {name}\n\n{renew(found)}\n", flush=True)


def _renew(name: str, section: Section, conditions: str, found: Sequence[Measured], *, write: bool) -> str:
    """Put what was measured so far into the page: some sections take long. Returns the text."""
    parts = [section.render(found), tables.agreement(found), conditions]
    text = "\n\n".join(part for part in parts if part)
    if write:
        tables.put(PAGE, name, text)
    return text


if __name__ == "__main__":
    main()
