# SPDX-License-Identifier: Apache-2.0
"""The model card that goes with every save: what was trained, from what, on what, how, and whose method it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cohobate.files import written_whole

PAPERS: dict[str, tuple[str, str]] = {
    "gkd": ("On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", "2306.13649"),
    "opd": ("On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", "2306.13649"),
    "iw_opd": ("IW-OPD", "2606.22600"),
    "opsd": ("OPSD: on-policy self-distillation", "2601.18734"),
    "sdft": ("SDFT: self-distillation fine-tuning", "2601.19897"),
    "sdpo": ("Reinforcement Learning via Self-Distillation", "2601.20802"),
    "xtoken": ("X-Token: Projection-Guided Cross-Tokenizer Knowledge Distillation", "2605.21699"),
}
_PACKAGES = ("cohobate", "torch", "transformers", "accelerate", "tokenizers", "datasets", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """What a card says; plain values only, so nothing secret or machine-bound slips in."""

    method: str = "distillation"  # a key of PAPERS, or a word of the user's own
    student: str = "unnamed"
    teacher: str = "none"
    objective: str = ""
    data_fingerprint: str = ""
    num_rows: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] | None = None  # the resolved recipe, when there is one


def model_card(run: RunDescription, *, step: int, metrics: Mapping[str, float]) -> str:
    """The text of `README.md`, with a metadata block that model hubs read."""
    paper = PAPERS.get(run.method)
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        "- cohobate",
        "- distillation",
        f"- {run.method}",
        "---",
        "",
    ]
    lines += [f"# {run.student}, distilled with Cohobate ({run.method})", ""]
    if paper:
        title, arxiv = paper
        lines += [f"Method: {title} ([arXiv:{arxiv}](https://arxiv.org/abs/{arxiv})).", ""]
    facts = {
        "student": run.student,
        "teacher": run.teacher,
        "objective": run.objective,
        "optimizer steps": step,
        "training rows": run.num_rows,
        "data fingerprint": run.data_fingerprint,
    }
    lines += ["| | |", "|---|---|"] + [f"| {k} | {_cell(v)} |" for k, v in facts.items()]
    lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
    lines += [f"| `{k}` | {_cell(v)} |" for k, v in sorted(run.settings.items())]
    if metrics:
        lines += ["", "## Last logged numbers", "", "| metric | value |", "|---|---|"]
        lines += [f"| `{k}` | {v:.6g} |" for k, v in sorted(metrics.items())]
    if run.recipe is not None:
        lines += ["", "## Recipe", "", "```json", json.dumps(run.recipe, indent=2, default=str), "```"]
    lines += ["", "## Versions", ""] + [f"- {name} {found}" for name, found in versions().items()]
    return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """Installed versions of the packages a result depends on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_model_card(folder: str | Path, text: str) -> None:
    with written_whole(Path(folder, "README.md")) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
