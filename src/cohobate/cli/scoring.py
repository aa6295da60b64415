# SPDX-License-Identifier: Apache-2.0
"""A model's accuracy on a data set, and every completion behind it: a number without them cannot be checked."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.utils import logging

from cohobate.align.rollout import SamplingConfig
from cohobate.cli.progress import Steps
from cohobate.data import PromptConfig, PromptEncoder, PromptRow, load_rows, rollout_request
from cohobate.data.graders import grader_named
from cohobate.errors import ConfigError, MissingExtra
from cohobate.parallel.world import keyed_seed
from cohobate.rollouts import LocalRollouts
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.trainer.resolve import eos_token_ids, pad_token_id
from cohobate.trainer.rolled_out import completion_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured, as the command line says it."""

    model: str
    data: str
    grader: str
    adapter: Path | None = None
    split: str | None = None
    limit: int | None = None
    max_new_tokens: int = 256
    sampling_temperature: float = 0.0
    batch_size: int = 16
    chat: bool = False
    dtype: str | None = None
    seed: int = 42

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One row's completion and its score."""

    sample_id: str
    completion: str
    num_tokens: int
    truncated: bool
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All answers, and the few numbers that are said of them."""

    answers: tuple[Answer, ...]

    @property
    def num_rows(self) -> int:
        return len(self.answers)

    @property
    def num_right(self) -> float:
        return math.fsum(a.score for a in self.answers)

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_rows

    @property
    def standard_error(self) -> float:
        """Of the mean score, from the spread of the scores themselves."""
        if self.num_rows < 2:
            return 0.0
        spread = math.fsum((a.score - self.accuracy) ** 2 for a in self.answers) / (self.num_rows - 1)
        return math.sqrt(spread / self.num_rows)

    @property
    def num_truncated(self) -> int:
        return sum(a.truncated for a in self.answers)

    @property
    def mean_length(self) -> float:
        return sum(a.num_tokens for a in self.answers) / self.num_rows

    def as_dict(self) -> dict[str, Any]:
        numbers = ("accuracy", "standard_error", "num_rows", "num_right", "num_truncated", "mean_length")
        return {name: getattr(self, name) for name in numbers} | {"answers": [asdict(a) for a in self.answers]}


def score(settings: Settings) -> Result:
    """Load, sample, grade. What can fail does so before the first token is sampled."""
    logging.disable_progress_bar()  # of loading: this has its own
    grader = grader_named(settings.grader)
    dataset = load_rows(settings.data, split=settings.split, limit=settings.limit)
    tokenizer = load_tokenizer(settings.model)
    prompts = PromptConfig(string_prompts="user_turn" if settings.chat else "text")
    rows = PromptEncoder(tokenizer, prompts).encode_rows(cast(Any, dataset)).rows
    model = _model(settings)
    ends = eos_token_ids(model, tokenizer)
    pad = pad_token_id(tokenizer, ends)
    source = LocalRollouts(model, eos_token_ids=ends, pad_token_id=pad)
    sampling = SamplingConfig(max_new_tokens=settings.max_new_tokens, temperature=settings.sampling_temperature)
    answers: list[Answer] = []
    with Steps("row", len(rows)) as steps:
        for start in range(0, len(rows), settings.batch_size):
            batch = rows[start : start + settings.batch_size]
            for row, ids in zip(batch, _completions(source, batch, sampling, pad, settings.seed), strict=True):
                text = tokenizer.decode(list(ids), skip_special_tokens=True)
                answers.append(
                    Answer(
                        sample_id=row.sample_id,
                        completion=str(text),
                        num_tokens=len(ids),
                        truncated=not (ids and ids[-1] in ends),
                        score=float(grader(row.row, str(text))),
                    )
                )
            steps.advance_to(len(answers))
    return Result(answers=tuple(answers))


def _completions(
    source: LocalRollouts, rows: Sequence[PromptRow], sampling: SamplingConfig, pad: int, seed: int
) -> list[tuple[int, ...]]:
    seeds = torch.tensor([keyed_seed(seed, "evaluation", 0, row.sample_id) for row in rows])
    return completion_ids(source.sample(rollout_request(rows, pad, seeds=seeds), sampling))


def _model(settings: Settings) -> nn.Module:
    model: Any = load_model(settings.model, dtype=settings.dtype)
    if settings.adapter is not None:
        model = _with_adapter(model, settings.adapter)
    if torch.cuda.is_available():
        model = model.to("cuda")
    return model.eval()


def _with_adapter(model: Any, folder: Path) -> nn.Module:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtra("--adapter needs the package peft: pip install 'cohobate[peft]'.") from error
    if not (folder / "adapter_model.safetensors").is_file() or not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"--adapter {folder} needs adapter_config.json and adapter_model.safetensors; adapters in pickle files "
            "are not read."
        )
    return PeftModel.from_pretrained(model, str(folder), use_safetensors=True)
