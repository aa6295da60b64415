# SPDX-License-Identifier: Apache-2.0
"""Handing the student's weights to a server, and knowing which ones it has.

Each update is a folder of its own, which the server is told only when it is complete; older ones are deleted. Rank 0
writes, tells and asks. What it does between two collectives is caught and agreed upon, so that no rank waits for one
that has failed. Until the canary has been heard the server's weights count as unknown, whatever it said.
"""

import contextlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cohobate.errors import ConfigError, ServerResponseError, ServerUnreachable
from cohobate.parallel.modules import unwrapped
from cohobate.parallel.world import all_reduce_max, any_rank, current_world
from cohobate.rollouts.vllm_answers import Completion, Prompt
from cohobate.rollouts.vllm_canary import (
    NUM_TOKENS,
    Heard,
    Text,
    as_prompts,
    canary_prompts,
    check_agreement,
    check_change,
    sent_to_all,
    texts_of,
    trainer_logprobs,
    written_part,
)
from cohobate.rollouts.vllm_engine import Engine
from cohobate.rollouts.vllm_weights import delete_versions, version_folder, whole_state, write_weights

# Of the tolerance, what the canary may differ from itself: nothing, unless others use the server, too.
# If its weights have a name, that is what is relied on.
_DRIFT, _DRIFT_OF_NAMED = 0.5, 1.0


class WeightSync:
    """Which weights a server has, and how it gets others. Every rank makes one, and calls its verbs alike."""

    def __init__(
        self,
        engine: Engine,
        *,
        folder: Path,
        server_folder: str | None = None,
        dtype: torch.dtype | None = None,
        tolerance: float = 0.05,
        canary_prompts: Sequence[Sequence[int]] = (),
    ):
        self.version: int | None = None  # of the weights that the server has; None: not known
        self.changes = 0  # in-place changes of the student's weights until then
        self.processed = False  # the server's log-probabilities are those of the distribution drawn from
        self._engine, self._folder, self._server_folder = engine, folder.absolute(), server_folder
        self._dtype, self._tolerance = dtype, tolerance
        self._given_prompts = [tuple(int(i) for i in row) for row in canary_prompts]
        self._mark: str | None = None  # the server's name for its weights, where it keeps one
        self._heard: Heard | None = None  # the canary at the last update
        self._reference: Heard | None = None  # at the last update that the server has shown
        self.last_gap = self.last_seconds = 0.0  # of the last update, on rank 0
        self._made = False  # the folder, by this run
        self._gaps: list[float] = []
        self._seconds: list[float] = []

    def update(self, model: nn.Module, version: int) -> None:
        """Hand the weights over and see that they arrived. What rank 0 does between collectives cannot leave it."""
        started, first = time.perf_counter(), current_world().rank == 0
        self.version = None  # until it is known
        state = whole_state(model, keep=first, dtype=self._dtype)
        written: list[Completion] = []
        texts, failure = (), None  # those of the reference, then those that the server writes now
        try:
            self._engine.connect()
            if first:
                self._hand_over(state, getattr(unwrapped(model), "config", None), version)
                prompts = self._canary_prompts()
                written = self._engine.greedy(prompts, self._canary_length(prompts))
                earlier = () if self._reference is None else self._reference.texts
                texts = (*earlier, *texts_of(prompts, written))
        except Exception as error:
            failure = error
        del state
        agree(failure, self._engine.client.name)
        texts = sent_to_all(texts)
        ours = trainer_logprobs(model, texts)
        gap, processed, failure = 0.0, False, None
        try:
            if first:
                gap = self._compare(texts, written, ours)
                processed = self._engine.gives_processed_logprobs(Prompt(name="a probe", ids=texts[-1].ids[:4]))
        except Exception as error:
            failure = error
        agree(failure, self._engine.client.name)
        self.processed = any_rank(processed)
        self.version, self.changes = version, in_place_changes(model)
        self.last_gap, self.last_seconds = gap, time.perf_counter() - started
        self._gaps.append(gap)
        self._seconds.append(self.last_seconds)

    def _hand_over(self, state: dict[str, Tensor], config: object, version: int) -> None:
        folder = version_folder(self._folder, version)
        self._made = self._made or not self._folder.exists()
        delete_versions(self._folder)
        try:
            write_weights(state, config, folder)
        except OSError as error:
            raise ConfigError(
                f"the student's weights cannot be written to sync_folder={self._folder} "
                f"({error.strerror or error}). Name a folder with room for a copy of the model."
            ) from error
        seen = folder.as_posix() if self._server_folder is None else f"{self._server_folder}/{folder.name}"
        self._engine.load_weights(seen)
        mark = f"cohobate-{version}-{uuid.uuid4().hex[:8]}"
        self._mark = mark if self._engine.mark(mark) else None

    def _canary_prompts(self) -> list[Prompt]:
        limit = self._engine.max_model_len
        room = None if limit is None else limit - NUM_TOKENS - 1
        return canary_prompts(self._given_prompts, num_ids=self._engine.num_ids, room=room)

    def _canary_length(self, prompts: Sequence[Prompt]) -> int:
        limit = self._engine.max_model_len
        longest = max(len(prompt.ids) for prompt in prompts)
        return NUM_TOKENS if limit is None else max(1, min(NUM_TOKENS, limit - longest - 1))

    def _compare(self, texts: tuple[Text, ...], written: Sequence[Completion], ours: Tensor) -> float:
        """Ask the canary, on rank 0; the gap between both sides. `texts` are the reference's, then the new ones."""
        name, earlier = self._engine.client.name, self._reference
        theirs = written_part(texts, self._engine.score(as_prompts(texts)))
        before, new = (0, 0) if earlier is None else (len(earlier.server), len(earlier.texts))
        now = Heard(texts=texts[new:], server=theirs[before:], trainer=ours[before:])
        gap = check_agreement(now, written, tolerance=self._tolerance, name=name)
        self._heard = now
        if earlier is None:
            self._reference = now
        else:
            again = Heard(texts=earlier.texts, server=theirs[:before], trainer=ours[:before])
            self._reference = now if check_change(earlier, again, name=name) else earlier
        return gap

    def holds(self) -> bool:
        """Whether the server answers as after the last update; the same on every rank, and after all have drawn."""
        any_rank(False)  # nobody draws any more
        lost, failure = False, None
        try:
            if current_world().rank == 0:
                assert self._heard is not None
                lost = self._mark is not None and self._engine.marked() != self._mark
                if not lost:
                    scores = self._engine.score(as_prompts(self._heard.texts))
                    drift = (written_part(self._heard.texts, scores) - self._heard.server).abs().mean()
                    allowed = _DRIFT if self._mark is None else _DRIFT_OF_NAMED
                    lost = not bool(drift <= allowed * self._tolerance)
        except Exception as error:
            failure = error
        agree(failure, self._engine.client.name)
        return not any_rank(lost)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Sums and counts since last asked."""
        found = {
            "rollouts/canary_gap": (sum(self._gaps), float(len(self._gaps))),
            "rollouts/sync_seconds": (sum(self._seconds), float(len(self._seconds))),
        }
        self._gaps.clear()
        self._seconds.clear()
        return found

    def close(self) -> None:
        """Delete what was written."""
        if current_world().rank == 0:
            delete_versions(self._folder)
            if self._made:
                with contextlib.suppress(OSError):  # somebody else's files are in it
                    self._folder.rmdir()


def agree(failure: Exception | None, name: str) -> None:
    """Raise on every rank if any has failed with the server `name`: its own error there, one of the same kind here."""
    code = 0 if failure is None else 2 if isinstance(failure, ServerUnreachable) else 1
    worst = all_reduce_max(code)
    if failure is not None:
        raise failure
    if worst:
        kind = ServerUnreachable if worst == 2 else ServerResponseError
        raise kind(f"another rank could not go on with {name}: its message says why.")


def in_place_changes(model: nn.Module) -> int:
    """How often the weights were written to; optimizers, and loading, write in place."""
    return sum(parameter._version for parameter in model.parameters())
