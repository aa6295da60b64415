# SPDX-License-Identifier: Apache-2.0
"""Packed rows under a mask and under boundaries: the same states, loss and gradients, and no row sees another."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cohobate.align.packed_rows import (
    PackedSide,
    attention_backend,
    bounded_rows,
    masked_rows,
    packed_side,
    packing_refusals,
)
from cohobate.align.rollout import AlignedSide
from cohobate.functional import divergence
from cohobate.teachers import pair_scores
from tiny import llama

PROMPT = [3, 4, 5, 6]
ROWS = [(0, [*PROMPT, 7, 8, 9], 2), (3, [*PROMPT, 9], 1), (1, [5, 2, 7, 7, 7], 3), (0, [9, 9], 0)]
Row = tuple[int, list[int], int]


def side_of(rows: Sequence[Row], width: int = 9) -> AlignedSide:
    """Rows of (left padding, tokens, number of tokens that are predicted: the last ones)."""
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    pairs = []
    for i, (left, tokens, predicted) in enumerate(rows):
        end = left + len(tokens)
        ids[i, left:end], mask[i, left:end] = torch.tensor(tokens, dtype=torch.int64), 1
        pairs += [i * width + end - 1 - predicted + j for j in range(predicted)]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return AlignedSide(model_inputs=inputs, pair_index=torch.tensor(pairs, dtype=torch.int64))


def by_boundaries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What a flash kernel computes from boundaries, row by row; from a padded batch, with the mask of two axes."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if (bounds := given.get("cu_seq_lens_q")) is None:
        causal = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        seen = causal if attention_mask is None else causal & attention_mask[:, None, None].bool()
        seen = seen | torch.eye(query.shape[2], dtype=torch.bool)  # a padding token sees itself, or nothing at all
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return out.transpose(1, 2), None
    assert attention_mask is None
    assert given["cu_seq_lens_k"] is bounds
    assert given["max_length_q"] is given["max_length_k"]
    assert int(given["max_length_q"]) == int(bounds.diff().max())
    parts = [
        nn.functional.scaled_dot_product_attention(*(x[:, :, a:b] for x in (query, key, value)), is_causal=True)
        for a, b in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


@pytest.fixture
def flash_model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", by_boundaries)
    return of_backend("flash_attention_2")


def of_backend(name: str) -> nn.Module:
    model: Any = llama(hidden=32, layers=2).double()
    model.config._attn_implementation = name
    return model


def loss_of(model: nn.Module, side: AlignedSide) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Hidden states, a loss that weighs each pair on its own, and every gradient."""
    model.zero_grad()
    scores = pair_scores(model, side.model_inputs, side.pair_index)
    logprobs = scores.logits().log_softmax(-1)
    num_pairs, vocab_size = logprobs.shape
    teacher = torch.linspace(-1, 1, num_pairs * vocab_size, dtype=torch.float64).reshape(num_pairs, vocab_size).sin()
    values = divergence(logprobs, (5 * teacher).log_softmax(-1), beta=0.3)
    loss = (values * torch.linspace(1, 2, num_pairs, dtype=torch.float64)).sum()
    loss.backward()
    return (
        scores.hidden.detach(),
        loss.detach(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def check_same(model: nn.Module, side: AlignedSide, packed: AlignedSide) -> None:
    (wanted, wanted_loss, wanted_grads), (found, loss, grads) = loss_of(model, side), loss_of(model, packed)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-10, atol=1e-12)
    # Llama's norms work in float32 whatever the weights are, and sum the shared tokens' gradients in another order.
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=2e-5)


def test_a_mask_gives_the_same_states_loss_and_gradients():
    side = side_of(ROWS)
    check_same(of_backend("sdpa"), side, masked_rows(side, dtype=torch.float64))


def test_eager_attention_takes_the_mask_too():
    model = of_backend("eager").float()  # its softmax is in float32, where a float64 mask becomes -inf
    side = side_of(ROWS)
    with torch.no_grad():
        wanted, found = (pair_scores(model, s.model_inputs, s.pair_index).hidden for s in (side, masked_rows(side)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row_multiple", [1, 4, 5])
def test_boundaries_give_the_same_states_loss_and_gradients(flash_model: nn.Module, row_multiple: int):
    side = side_of(ROWS)
    check_same(flash_model, side, bounded_rows(side, row_multiple=row_multiple))
    check_same(flash_model, side, packed_side(side, flash_model))


ANY_ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(2, 4), min_size=2, max_size=6), st.integers(0, 5)),
    min_size=1,
    max_size=4,
)


@given(rows=ANY_ROWS, row_multiple=st.integers(1, 4))
def test_tokens_positions_and_pairs_are_those_of_the_rows(rows: list[Row], row_multiple: int):
    rows = [(left, tokens, min(n, len(tokens) - 1)) for left, tokens, n in rows]
    side = side_of(rows)
    packed = bounded_rows(side, row_multiple=row_multiple)
    kept = [(i, tokens[:-1]) for i, (_, tokens, n) in enumerate(rows) if n]  # the last token predicts nothing
    if not kept:
        assert packed is side
        return
    assert isinstance(packed, PackedSide)
    assert packed.rows.tolist() == [i for i, _ in kept]
    assert packed.boundaries.diff().tolist() == [len(tokens) for _, tokens in kept]
    starts = packed.model_inputs["cu_seq_lens_q"].tolist()
    assert all(start % row_multiple == 0 for start in starts)
    ids, positions = packed.model_inputs["input_ids"][0], packed.model_inputs["position_ids"][0]
    assert len(ids) == starts[-1]
    pairs = []
    for (i, tokens), start in zip(kept, starts, strict=False):
        assert ids[start : start + len(tokens)].tolist() == tokens
        assert positions[start : start + len(tokens)].tolist() == list(range(len(tokens)))
        pairs += [start + len(tokens) - rows[i][2] + j for j in range(rows[i][2])]
    assert packed.pair_index.tolist() == pairs


def test_a_backend_that_wants_padding_gets_the_same_padded_tensor_twice_and_the_loss_the_raw_one():
    packed = bounded_rows(side_of([(0, [3, 4, 5, 6], 1), (0, [3, 4], 1)]), row_multiple=4)
    assert isinstance(packed, PackedSide)
    inputs = packed.model_inputs
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 8]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] is inputs["max_length_k"]
    assert inputs["max_length_q"].tolist() == 4
    assert packed.boundaries.tolist() == [0, 3, 4]
    assert inputs["input_ids"].tolist() == [[3, 4, 5, 5, 3, 3, 3, 3]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 2, 0, 0, 0, 0]]


def row_states(model: nn.Module, side: AlignedSide, form: str) -> list[Tensor]:
    packed = masked_rows(side, dtype=torch.float64) if form == "mask" else bounded_rows(side, row_multiple=2)
    with torch.no_grad():
        hidden = pair_scores(model, packed.model_inputs, packed.pair_index).logits()
    row = side.pair_index // side.model_inputs["input_ids"].shape[1]
    return [hidden[row == i] for i in range(len(ROWS))]


@pytest.mark.parametrize("form", ["mask", "boundaries"])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_another_row_changes_no_logit_of_a_row(flash_model: nn.Module, form: str, changed: int):
    model = of_backend("sdpa") if form == "mask" else flash_model
    rows = [(left, [11, *tokens[1:]] if i == changed else tokens, n) for i, (left, tokens, n) in enumerate(ROWS)]
    before, after = row_states(model, side_of(ROWS), form), row_states(model, side_of(rows), form)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if i == changed:
            assert (a - b).abs().max() > 1e-3
        else:
            torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_rows_planned_without_padding_are_packed_though_it_costs_more():
    side = side_of([(0, [i, *range(2, 20)], 18) for i in (2, 3, 4, 5, 6, 7, 8, 9)] * 4, 19)
    small = llama(hidden=2)
    assert packed_side(side, small) is side
    assert packed_side(side, small, always=True).model_inputs["input_ids"].shape == (1, 32 * 18)


def test_the_mask_has_the_precision_of_autocast():
    side = side_of(ROWS)
    model = llama(hidden=32)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed_side(side, model, always=True).model_inputs["attention_mask"].dtype == torch.bfloat16


def mistral(backend: str) -> nn.Module:
    shape: Any = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=2, intermediate_size=16, sliding_window=4))
    model.config._attn_implementation = backend
    return model


def bloom() -> nn.Module:
    return BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2))


def mamba() -> nn.Module:
    return MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, state_size=4))


class Closed(nn.Module):
    """Hands nothing on that it does not know."""

    config = SimpleNamespace(_attn_implementation="flash_attention_2", layer_types=["linear_attention"])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        (lambda: of_backend("sdpa"), []),
        (lambda: of_backend("flash_attention_3"), []),
        (
            lambda: of_backend("flex_attention"),
            ["its attention backend is 'flex_attention', and rows can be packed for"],
        ),
        (lambda: mistral("sdpa"), ["layers of other kinds than full attention (sliding_attention)"]),
        (lambda: mistral("flash_attention_2"), []),
        (bloom, ["its forward takes no position_ids"]),
        (mamba, ["takes no position_ids", "it carries a state from token to token", "(linear_attention)"]),
        (Closed, ["hands no cu_seq_lens_q on", "other kinds than full attention (linear_attention)"]),
        (lambda: nn.Linear(2, 2), ["it has no config"]),
    ],
)
def test_every_reason_against_packing_is_told(model: Any, reasons: list[str]):
    made = model()
    found = packing_refusals(made)
    assert len(found) == len(reasons), found
    for reason, wanted in zip(found, reasons, strict=True):
        assert wanted in reason
    assert attention_backend(made) == getattr(getattr(made, "config", None), "_attn_implementation", None)
