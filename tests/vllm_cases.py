# SPDX-License-Identifier: Apache-2.0
"""What the tests of rollouts from a server share: a source on a fake engine, requests, and the oracle of log-probs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cohobate.align import RolloutBatch, RolloutRequest
from cohobate.rollouts import VLLMRollouts, VLLMRolloutsConfig
from fake_engine import FakeEngine

EOS = (1, 4)
PROMPTS = [[5, 6], [7, 8, 9], [2], [10, 11, 12, 13, 14, 15, 16]]


def source(engine: FakeEngine, model: Any, folder: Path, **options: Any) -> VLLMRollouts:
    building = {name: options.pop(name) for name in ("vocab_size", "max_staleness") if name in options}
    config = VLLMRolloutsConfig(
        url="http://localhost:8000", sync_folder=str(folder), surroundings=engine.surroundings, **options
    )
    return config.build(model, eos_token_ids=EOS, pad_token_id=0, canary_prompts=PROMPTS, **building)


def request(prompts: list[list[int]] | None = None, seeds: list[int] | None = None) -> RolloutRequest:
    """Left-padded; each prompt's key is its own unless `seeds` says others."""
    prompts = PROMPTS if prompts is None else prompts
    width = max(map(len, prompts), default=0)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], dtype=torch.int64).reshape(len(prompts), width)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], dtype=torch.int64).reshape(
        len(prompts), width
    )
    keys = [101 * (i + 1) for i in range(len(prompts))] if seeds is None else seeds
    return RolloutRequest(prompt_ids=ids, prompt_attention_mask=mask, seeds=torch.tensor(keys, dtype=torch.int64))


def completions(batch: RolloutBatch) -> list[list[int]]:
    columns = torch.arange(batch.input_ids.shape[1])
    chosen = (batch.attention_mask != 0) & (columns >= batch.response_start_idx[:, None])
    return [ids[mask].tolist() for ids, mask in zip(batch.input_ids, chosen, strict=True)]


@torch.no_grad()
def own_logprobs(model: Any, batch: RolloutBatch, change: Any = lambda logits: logits) -> Tensor:
    """`[B, T]` float64: the model's log-probabilities of the completions after `change`, row by row, unpadded."""
    found = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for row, (ids, mask, start) in enumerate(
        zip(batch.input_ids, batch.attention_mask, batch.response_start_idx.tolist(), strict=True)
    ):
        columns = mask.nonzero()[:, 0]
        logits = change(model(ids[columns][None]).logits[0].double())
        for at, column in enumerate(columns.tolist()):
            if column >= start:
                kept = logits[at - 1] - logits[at - 1].exp().sum().log()
                found[row, column] = kept[ids[column]]
    return found


@torch.no_grad()
def moved(model: Any, by: float, seed: int = 0) -> None:
    """As an optimizer step would: every trained weight is changed in place."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(by * torch.randn(parameter.shape, generator=draw))
