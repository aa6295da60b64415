# SPDX-License-Identifier: Apache-2.0
"""The trainer's settings: `transformers.TrainingArguments` and the few fields that belong to no part.

What belongs to a part (a teacher's decay, an objective's clip, a prompt's template) is the part's own setting.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from cohobate.align.rollout import SamplingConfig
from cohobate.errors import ConfigError


@dataclass
class DistillationConfig(TrainingArguments):
    """Settings of `DistillationTrainer`. Batch sizes count data rows; each gives `num_generations` completions."""

    beta: float = field(
        default=0.5,
        metadata={"help": "0 is forward KL, 1 is reverse KL, between them generalized JSD (default objective only)."},
    )
    distill_temperature: float = field(
        default=1.0, metadata={"help": "Divides both sides' logits in the loss (default objective only). No T^2."}
    )
    sampling_temperature: float = field(default=1.0, metadata={"help": "Of the rollouts; never enters a loss."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of the rollouts."})
    top_k: int = field(default=0, metadata={"help": "Keep the k likeliest tokens while sampling; 0 keeps all."})
    min_p: float = field(default=0.0, metadata={"help": "Drop tokens below min_p times the likeliest; 0 keeps all."})
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "A longer prompt is an error or a counted skip, never cut."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Tokens sampled at most for a completion."})
    num_generations: int = field(default=1, metadata={"help": "Completions sampled for each prompt."})
    on_policy_fraction: float = field(
        default=1.0,
        metadata={"help": "Share of the recorded rows whose completion is sampled anew (the papers' lambda)."},
    )
    num_iterations: int = field(
        default=1, metadata={"help": "Optimizer steps that use one window of rollouts (needs an importance ratio)."}
    )
    max_staleness: int = field(
        default=0,
        metadata={"help": "Optimizer steps that the weights which sampled may lie behind; older rows are dropped."},
    )
    token_budget: int | None = field(
        default=None,
        metadata={"help": "Padded tokens, both sides, in one micro-batch; None splits by batch size in rows."},
    )
    packing: bool = field(
        default=False,
        metadata={"help": "Rows behind each other without padding; token_budget is what each model's pass holds."},
    )
    log_completions: bool = field(
        default=False, metadata={"help": "Write prompts and completions to Parquet files in the output folder."}
    )
    eval_temperature: float = field(default=0.0, metadata={"help": "Sampling temperature of evaluation; 0 is greedy."})
    lmbda: float | None = field(default=None, metadata={"help": "Old name of on_policy_fraction."})
    temperature: float | None = field(default=None, metadata={"help": "Refused: say which temperature is meant."})

    # transformers' defaults that would hide something here: unknown columns feed graders, and a NaN must be seen.
    remove_unused_columns: bool = False
    logging_nan_inf_filter: bool = False
    # A batch is Python rows until the step is assembled: there is nothing to pin, and torch warns of it on a CPU.
    dataloader_pin_memory: bool = False

    def __post_init__(self) -> None:
        self._resolve_names()
        super().__post_init__()
        self._check_ranges()

    def _resolve_names(self) -> None:
        if self.temperature is not None:
            raise ConfigError(
                f"temperature={self.temperature} could mean two things. Use sampling_temperature (how rollouts are"
                " drawn) or distill_temperature (what divides both sides' logits in the loss)."
            )
        best = self.metric_for_best_model
        if best is not None and best.startswith("eval/"):  # as it is logged; transformers puts `eval_` before names
            self.metric_for_best_model = best.removeprefix("eval/")
        if self.lmbda is None:
            return
        if self.on_policy_fraction != 1.0:
            raise ConfigError(
                f"lmbda={self.lmbda} and on_policy_fraction={self.on_policy_fraction} are two names of one setting;"
                " keep on_policy_fraction."
            )
        if self.lmbda != 1.0:
            warnings.warn("lmbda is the old name of on_policy_fraction.", FutureWarning, stacklevel=4)
        self.on_policy_fraction, self.lmbda = self.lmbda, None

    def _check_ranges(self) -> None:
        def need(ok: bool, name: str, wanted: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}.")

        need(0 <= self.learning_rate < math.inf, "learning_rate", "a number >= 0")
        need(self.max_steps != 0, "max_steps", ">= 1, or -1 for num_train_epochs")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            need(getattr(self, name) >= 1, name, ">= 1")
        need(0 <= self.beta <= 1, "beta", "in [0, 1]")
        need(self.distill_temperature > 0, "distill_temperature", "> 0")
        need(self.sampling_temperature >= 0, "sampling_temperature", ">= 0 (0 is greedy)")
        need(self.eval_temperature >= 0, "eval_temperature", ">= 0 (0 is greedy)")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(self.top_k >= 0, "top_k", ">= 0")
        need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        need(0 <= self.on_policy_fraction <= 1, "on_policy_fraction", "in [0, 1]")
        need(self.num_generations >= 1, "num_generations", ">= 1")
        need(self.num_iterations >= 1, "num_iterations", ">= 1")
        need(self.max_staleness >= 0, "max_staleness", ">= 0")
        need(self.max_completion_length >= 1, "max_completion_length", ">= 1")
        need(self.max_prompt_length is None or self.max_prompt_length >= 1, "max_prompt_length", ">= 1 or None")
        need(self.token_budget is None or self.token_budget >= 1, "token_budget", ">= 1 or None")

        if self.packing and self.token_budget is None:
            raise ConfigError("packing fills micro-batches up to token_budget, the tokens of one pass: set it too.")

    def sampling(self, *, evaluation: bool = False) -> SamplingConfig:
        """How completions are drawn: as configured, or for evaluation one completion at `eval_temperature`."""
        if evaluation:
            return SamplingConfig(max_new_tokens=self.max_completion_length, temperature=self.eval_temperature)
        return SamplingConfig(
            max_new_tokens=self.max_completion_length,
            temperature=self.sampling_temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            n_samples_per_prompt=self.num_generations,
        )

    def distillation_settings(self) -> dict[str, Any]:
        """The fields that this class adds, for model cards and logs."""
        inherited = TrainingArguments.__dataclass_fields__
        own = [n for n in self.__dataclass_fields__ if n not in inherited and n not in ("lmbda", "temperature")]
        return {name: getattr(self, name) for name in own}
