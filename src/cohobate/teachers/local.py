# SPDX-License-Identifier: Apache-2.0
"""A teacher that is a model in this process, with weights of its own."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cohobate.align.rollout import AlignedBatch, AlignedSide
from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, HiddenScores, OutputHead
from cohobate.parallel.modules import eval_mode, unwrapped
from cohobate.teachers.forward import check_head, dense_pair_scores, pair_scores
from cohobate.teachers.packing import can_pack, check_packing, packed_side

_log = logging.getLogger(__name__)


class ModelScorer:
    """Scores with a model and leaves no trace on it: no gradients, eval mode inside, every `training` flag back.

    Shared by the teachers that hold a model; what differs between them is whose weights it runs under (`call`).
    """

    def __init__(self, model: nn.Module, vocab_size: int | None):
        self.model = unwrapped(model)
        self.vocab_size = vocab_size
        self.provides: type = HiddenScores if check_head(self.model) else DenseScores
        self._packs, self._always = can_pack(self.model), False
        if self.provides is DenseScores:
            name = type(self.model).__name__
            _log.info("%s: its output head is not a plain linear map, so it is scored by its own logits [N, V].", name)

    def pack_rows(self, name: str) -> None:
        """Pack every batch from now on, as it was planned to fit only so; `ConfigError` if the model cannot."""
        check_packing(self.model, name)
        self._packs = self._always = True

    def __call__(self, side: AlignedSide, call: Callable[..., Any] | None = None) -> HiddenScores | DenseScores:
        device = next(self.model.parameters()).device
        inputs = {name: value.to(device) for name, value in side.model_inputs.items()}
        side = AlignedSide(model_inputs=inputs, pair_index=side.pair_index.to(device))
        if self._packs:  # where the tensors stay: one that stands for two is moved as two
            side = packed_side(side, self.model, always=self._always)
        score = pair_scores if self.provides is HiddenScores else dense_pair_scores
        with torch.no_grad(), eval_mode(self.model):
            scores = score(self.model, side.model_inputs, side.pair_index, vocab_size=self.vocab_size, call=call)
        return scores if isinstance(scores, DenseScores) else _detached(scores)


def _detached(scores: HiddenScores) -> HiddenScores:
    """Parameters keep `requires_grad` under `no_grad`: a loss that forgets `detach` would train the teacher's head."""
    head = scores.head
    return HiddenScores(
        hidden=scores.hidden.detach(),
        head=OutputHead(
            weight=head.weight.detach(),
            bias=None if head.bias is None else head.bias.detach(),
            scale=head.scale,
            softcap=head.softcap,
        ),
    )


class LocalTeacher:
    """A model with weights of its own and the student's vocabulary; `score` reads the batch's teacher side."""

    def __init__(self, model: nn.Module, *, vocab_size: int | None = None, device: torch.device | str | None = None):
        """`vocab_size`: the real ids that both sides share; a wider, padded head is cut to them.

        `device`: the model is moved there now, once (default: it stays where it is).
        """
        config = getattr(unwrapped(model), "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(f"a teacher must be a causal model, got the encoder-decoder {type(model).__name__}.")
        self.model = model if device is None else model.to(device)
        self._scorer = ModelScorer(self.model, vocab_size)

    @property
    def provides(self) -> type:
        """`HiddenScores`, or `DenseScores` for a head that is no plain linear map."""
        return self._scorer.provides

    def score(self, batch: AlignedBatch, /) -> HiddenScores | DenseScores:
        """The N pairs' scores, detached, on the device of the model."""
        return self._scorer(batch.teacher)

    def pack_rows(self, name: str = "teacher") -> None:
        """Pack every batch, planned to fit only without padding. `name` is for the error of a model that cannot."""
        self._scorer.pack_rows(name)
