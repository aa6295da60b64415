# SPDX-License-Identifier: Apache-2.0
"""Completions from a vLLM server that is given the student's weights: an engine made for writing writes them.

Tokens go there and tokens come back; vLLM is not needed in this process. Before a step is sampled, the server loads
the weights of that step from a folder that both sides see (`vllm_sync.py`); every rollout says which ones wrote it.
What could go wrong without a sign is tried each time: that the update arrived, whole (`vllm_canary.py`), that answers
can be right (`vllm_answers.py`), and, after each draw, that the server still has those weights. If it has not (it was
restarted, or somebody else loads weights into it), what it drew is dropped, counted, and drawn anew; nothing stale is
trained.

Rank 0 hands the weights over and asks the canary; every rank draws its own rows, and learns how it went.
"""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig
from cohobate.errors import ConfigError, ServerResponseError
from cohobate.parallel.modules import unwrapped
from cohobate.parallel.world import all_reduce_sum, any_rank, current_world
from cohobate.remote.client import Surroundings
from cohobate.remote.workers import Workers
from cohobate.rollouts.keyed_draw import sample_keys
from cohobate.rollouts.local import check_request
from cohobate.rollouts.vllm_answers import Completion, Prompt
from cohobate.rollouts.vllm_engine import Engine
from cohobate.rollouts.vllm_sync import WeightSync, agree, in_place_changes
from cohobate.rollouts.vllm_weights import check_exportable

_DRAWS = 3  # of one window, until a server that keeps losing its weights is an error
_POSITIVE = (1 << 63) - 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMRolloutsConfig:
    """Where the server is and how it gets the weights; `DistillationTrainer(rollouts=...)` takes it and builds.

    `sync_folder`: a folder of this run's own that the server sees too; `server_folder` is its path there, if another.
    `model`: its name on the server, if that has several. `weights_dtype`: what is written, None as it is trained; that
    of the server halves the file for a float32 student and changes nothing. `canary_tolerance`: nats on average
    between the student and the server. `timeout`: seconds for one completion or one update. `token_env`: the
    environment variable with the API token.
    """

    url: str
    sync_folder: str
    server_folder: str | None = None
    model: str | None = None
    weights_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    canary_tolerance: float = 0.05
    timeout: float = 600.0
    concurrency: int = 64
    token_env: str | None = None
    allow_insecure: bool = False
    ca_file: str | None = None
    surroundings: Surroundings | None = field(default=None, repr=False, compare=False)  # for tests

    def __post_init__(self) -> None:
        if not 0 < self.canary_tolerance < math.inf:
            raise ConfigError(f"canary_tolerance must be a number of nats > 0, got {self.canary_tolerance}.")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}.")
        if self.weights_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ConfigError(f"weights_dtype must be float32, bfloat16 or float16, got {self.weights_dtype!r}.")
        if not self.sync_folder:
            raise ConfigError("sync_folder is empty: name a folder that the server sees too.")
        if self.server_folder is not None and not self.server_folder.startswith("/"):
            # vLLM takes what is no path of its machine for a repository of the hub, and would look there.
            raise ConfigError(f"server_folder must be an absolute path on the server, got {self.server_folder!r}.")

    def build(
        self,
        student_model: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        vocab_size: int | None = None,
        max_staleness: int = 0,
        canary_prompts: Sequence[Sequence[int]] = (),
    ) -> "VLLMRollouts":
        """`canary_prompts`: token ids of a few prompts, the same on every rank; as the run's own rows are best."""
        return VLLMRollouts(
            self,
            student_model,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            vocab_size=vocab_size,
            max_staleness=max_staleness,
            canary_prompts=canary_prompts,
        )


class VLLMRollouts:
    """A `RolloutSource` (and `RemoteRollouts`) that samples on a server. Nothing is asked before `prepare`."""

    def __init__(
        self,
        config: VLLMRolloutsConfig,
        student_model: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        vocab_size: int | None = None,
        max_staleness: int = 0,
        canary_prompts: Sequence[Sequence[int]] = (),
    ):
        """See `VLLMRolloutsConfig.build`."""
        check_exportable(student_model)
        head: Any = getattr(unwrapped(student_model), "get_output_embeddings", lambda: None)()
        if head is None:
            raise ConfigError(f"rollouts from a server need a model with a head, got {type(student_model).__name__}.")
        head_size = int(head.weight.shape[0])
        self.config, self.pad_token_id, self.max_staleness = config, int(pad_token_id), max_staleness
        self.engine = Engine(
            config.url,
            model=config.model,
            eos_token_ids=tuple(int(i) for i in eos_token_ids),
            num_ids=head_size if vocab_size is None else vocab_size,
            head_size=head_size,
            timeout=config.timeout,
            surroundings=config.surroundings,
            token_env=config.token_env,
            allow_insecure=config.allow_insecure,
            ca_file=config.ca_file,
            num_connections=config.concurrency,
        )
        self._sync = WeightSync(
            self.engine,
            folder=Path(config.sync_folder),
            server_folder=config.server_folder,
            dtype=None if config.weights_dtype is None else getattr(torch, config.weights_dtype),
            tolerance=config.canary_tolerance,
            canary_prompts=canary_prompts,
        )
        self._workers = Workers(config.concurrency)
        self._model: nn.Module | None = None
        self._policy_version = 0  # of its weights; those of the server may be older
        self._dropped: list[int] = []  # rows of each draw since it was last asked
        self._warned = False

    def __repr__(self) -> str:
        return f"VLLMRollouts({self.engine.client.url!r}, model={self.engine.model!r})"

    def prepare(self, model: nn.Module, policy_version: int, /) -> None:
        """Let the server have the weights of `model`, unless those it has are recent enough. Every rank must call it.

        Raises:
            ServerUnreachable: no answer until the deadline.
            ServerResponseError: the server did not take them, or does not show that it has.
            ConfigError: the weights cannot be handed on, or the server declines.
        """
        self._model, self._policy_version, has = model, policy_version, self._sync.version
        behind = None if has is None else policy_version - has
        # The same version with other weights: training was begun anew, or an optimizer shows averaged weights.
        changed = behind == 0 and in_place_changes(model) != self._sync.changes
        if any_rank(behind is None or not 0 <= behind <= self.max_staleness or changed):
            self._sync.update(model, policy_version)

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch:
        """As `LocalRollouts.sample`, with `policy_version`. Every rank must call it; a request may be empty.

        `sampler_logprobs` are NaN where the server's are not those of the distribution drawn from (see `docs`).
        """
        if self._sync.version is None or self._model is None:
            raise ConfigError(
                "prepare(model, policy_version) comes before sample: the server's weights are not known."
            )
        num_rows = request.prompt_ids.shape[0] * sampling.n_samples_per_prompt
        dropped, keys = 0, self._keys(request, sampling)
        for _ in range(_DRAWS):
            drawn, failure = [], None
            try:
                check_request(request)
                drawn = self._draw(_prompts(request, sampling.n_samples_per_prompt), keys, sampling)
            except Exception as error:
                failure = error
            agree(failure, self.engine.client.name)
            if self._sync.holds():
                self._dropped.append(dropped)
                return self._assembled(request, sampling, drawn)
            stale = int(all_reduce_sum({"rows": float(num_rows)})["rows"])
            dropped += stale
            if current_world().rank == 0:
                _log.warning(
                    "%s has other weights than it was given (restarted, or somebody else loads some): %d rollouts are "
                    "dropped and drawn anew.",
                    self.engine.client.name,
                    stale,
                )
            self._sync.update(self._model, self._policy_version)
        raise ServerResponseError(
            f"{self.engine.client.name} lost the student's weights during each of {_DRAWS} draws in a row. Nothing "
            "was trained on them. Let this run be the only one that loads weights there, and one server answer, not a "
            "balancer before several."
        )

    def describe(self) -> str:
        """What the last update showed, for people to read."""
        engine, gap, seconds = self.engine, self._sync.last_gap, self._sync.last_seconds
        limit = "unknown" if engine.max_model_len is None else f"{engine.max_model_len} tokens"
        kept = "of the distribution drawn from" if self._sync.processed else "raw"
        return (
            f"{engine.client.url} serves {engine.model!r}, rows up to {limit}; it took the student's weights in "
            f"{seconds:.1f} s and agrees with it within {gap:.2g} nats on average; its log-probabilities are {kept}"
        )

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Since last asked: the canary's gap in nats, seconds of an update, and rollouts of a draw that were dropped.

        The numbers are rank 0's, which knows them for all; other ranks add nothing.
        """
        found = self._sync.metrics() | {"rollouts/stale_rows": (float(sum(self._dropped)), float(len(self._dropped)))}
        self._dropped.clear()
        return found if current_world().rank == 0 else dict.fromkeys(found, (0.0, 0.0))

    def close(self) -> None:
        """End the connections and threads, and delete the weights that were written for the server."""
        self._workers.close()
        self.engine.close()
        self._sync.close()

    def _keys(self, request: RolloutRequest, sampling: SamplingConfig) -> list[int]:
        """A seed for each completion, from its row's key or torch's global generator; a greedy draw needs none."""
        seeds, rows = request.seeds, request.prompt_ids.shape[0]
        if sampling.temperature == 0:
            return [0] * (rows * sampling.n_samples_per_prompt)
        if seeds is None:
            seeds = torch.randint(torch.iinfo(torch.int64).max, (rows,))
        return [key & _POSITIVE for key in sample_keys(seeds.long(), sampling.n_samples_per_prompt).tolist()]

    def _draw(self, prompts: Sequence[Prompt], keys: Sequence[int], sampling: SamplingConfig) -> list[Completion]:
        """The completions in the order of `prompts`, whatever the order in which they came."""
        self.engine.connect()
        futures: list[Future[Completion]] = [
            self._workers.submit(lambda prompt=prompt, key=key: self.engine.draw(prompt, sampling, key))
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def _knows_logprobs(self, sampling: SamplingConfig) -> bool:
        """Whether the server's log-probabilities are those of the distribution that was drawn from."""
        whole = sampling.temperature in (0, 1) and not self.engine.excludes_ids
        greedy = sampling.temperature == 0
        untruncated = greedy or (sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0)
        known = self._sync.processed or (whole and untruncated)
        if not known and not self._warned and current_world().rank == 0:
            self._warned = True
            _log.warning(
                "%s gives raw log-probabilities, which are not those of a draw with a temperature, truncation or "
                "excluded ids: sampler_logprobs are unknown (NaN). Start it with --logprobs-mode processed_logprobs.",
                self.engine.client.name,
            )
        return known

    def _assembled(
        self, request: RolloutRequest, sampling: SamplingConfig, drawn: Sequence[Completion]
    ) -> RolloutBatch:
        device, n = request.prompt_ids.device, sampling.n_samples_per_prompt
        ids = request.prompt_ids.long().repeat_interleave(n, dim=0)
        mask = request.prompt_attention_mask.long().repeat_interleave(n, dim=0)
        rows, width = ids.shape
        longest = max((len(one.ids) for one in drawn), default=0)
        new = torch.full((rows, longest), self.pad_token_id, dtype=torch.int64)
        logprobs = torch.zeros(rows, width + longest)
        known = self._knows_logprobs(sampling)
        for row, one in enumerate(drawn):
            new[row, : len(one.ids)] = torch.tensor(one.ids)
            said = torch.tensor(one.logprobs) if known else math.nan
            logprobs[row, width : width + len(one.ids)] = said
        lengths = torch.tensor([len(one.ids) for one in drawn], dtype=torch.int64)
        kept = torch.arange(longest) < lengths[:, None]
        return RolloutBatch(
            input_ids=torch.cat([ids, new.to(device)], dim=1),
            attention_mask=torch.cat([mask, kept.long().to(device)], dim=1),
            response_start_idx=torch.full((rows,), width, dtype=torch.int64, device=device),
            sampler_logprobs=logprobs.to(device),
            policy_version=torch.full((rows,), self._sync.version or 0, dtype=torch.int64, device=device),
        )


def _prompts(request: RolloutRequest, num_samples: int) -> list[Prompt]:
    """The attended tokens of each row, prompt-major, a prompt for each sample."""
    found = []
    for row, (ids, mask) in enumerate(zip(request.prompt_ids, request.prompt_attention_mask, strict=True)):
        own = tuple(ids[mask != 0].tolist())
        for sample in range(num_samples):
            name = f"prompt {row}" if num_samples == 1 else f"prompt {row}, sample {sample}"
            found.append(Prompt(name=name, ids=own))
    return found
