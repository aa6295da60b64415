# SPDX-License-Identifier: Apache-2.0
"""A packed row predicts what the padded rows predict, in value and gradient, and is refused where it would not."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from cohobate.align.rollout import AlignedSide
from cohobate.errors import ConfigError
from cohobate.teachers import pair_scores
from cohobate.teachers.packing import can_pack, check_packing, packed_side
from tiny import llama


def side_of(rows: list[tuple[int, list[int], int]], width: int) -> AlignedSide:
    """Rows of (left padding, tokens, number of tokens that are predicted: the last ones)."""
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    pairs = []
    for i, (left, tokens, predicted) in enumerate(rows):
        end = left + len(tokens)
        ids[i, left:end], mask[i, left:end] = torch.tensor(tokens, dtype=torch.int64), 1
        pairs += [i * width + end - 1 - predicted + j for j in range(predicted)]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return AlignedSide(model_inputs=inputs, pair_index=torch.tensor(pairs, dtype=torch.int64))


def hidden_and_gradients(model: nn.Module, side: AlignedSide) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    hidden = pair_scores(model, side.model_inputs, side.pair_index).hidden
    factor = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).reshape(hidden.shape)
    (hidden * factor).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


MODEL = llama(hidden=32, layers=2).double()
PROMPT = [3, 4, 5, 6]


def check_same(side: AlignedSide) -> AlignedSide:
    packed = packed_side(side, MODEL)
    wanted, wanted_grads = hidden_and_gradients(MODEL, side)
    found, found_grads = hidden_and_gradients(MODEL, packed)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    # Llama's norms work in float32 whatever the weights are, and sum the shared tokens' gradients in another order.
    torch.testing.assert_close(found_grads, wanted_grads, rtol=1e-4, atol=2e-5)
    return packed


def test_a_shared_prefix_runs_once_and_padding_and_last_tokens_not_at_all() -> None:
    rows = [(0, [*PROMPT, 7, 8], 2), (3, [*PROMPT, 9], 1), (1, [*PROMPT, 7, 7, 7], 3)]
    packed = check_same(side_of(rows, 9))
    # The prefix (4), then 7 | nothing (the only prediction stands on the prefix) | 7, 7: but 7 is not shared by all.
    assert packed.model_inputs["input_ids"].tolist() == [[3, 4, 5, 6, 7, 7, 7]]
    assert packed.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 5]]
    assert packed.pair_index.tolist() == [3, 4, 3, 3, 5, 6]


def test_completions_of_one_prompt_share_it() -> None:
    packed = check_same(side_of([(0, [*PROMPT, a, 8], 2) for a in (7, 9, 10)], 6))
    assert packed.model_inputs["input_ids"].shape == (1, 4 + 3)


def test_rows_without_a_pair_do_not_run() -> None:
    packed = check_same(side_of([(0, [9, 9, 9], 0), (2, [3, 4, 5], 2), (0, [], 0)], 5))
    assert packed.model_inputs["input_ids"].tolist() == [[3, 4]]


def test_a_batch_without_pairs_stays_as_it_is() -> None:
    side = side_of([(0, [3, 4], 0)], 2)
    assert packed_side(side, MODEL) is side


def test_what_does_not_pay_stays_as_it_is() -> None:
    side = side_of([(0, [i, *range(2, 20)], 18) for i in (2, 3, 4, 5, 6, 7, 8, 9)] * 4, 19)
    small = llama(hidden=2)
    assert packed_side(side, small) is side  # nothing to save but the last column, and a mask of 576 x 576


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(2, 4), min_size=2, max_size=7), st.integers(0, 6)),
        min_size=1,
        max_size=4,
    )
)
def test_any_rows_predict_the_same(rows: list[tuple[int, list[int], int]]) -> None:
    side = side_of([(left, tokens, min(n, len(tokens) - 1)) for left, tokens, n in rows], 10)
    if side.pair_index.numel():
        check_same(side)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_with_full_attention_can(attention: str) -> None:
    model = llama()
    model.config._attn_implementation = attention
    assert can_pack(model)


def other_model(kind: str) -> Any:
    shape = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "window":
        more = {"num_key_value_heads": 2, "intermediate_size": 16, "sliding_window": 4}
        return MistralForCausalLM(MistralConfig(**shape, **more, initializer_range=0.5))
    return BloomForCausalLM(BloomConfig(**shape, initializer_range=0.5))


@pytest.mark.parametrize("kind", ["window", "positions from the mask"])
def test_a_model_that_would_compute_something_else_cannot(kind: str) -> None:
    assert not can_pack(other_model(kind).eval())


def test_half_precision_is_left_alone() -> None:
    assert not can_pack(llama().to(torch.bfloat16))


def test_trying_leaves_mode_and_gradients_alone() -> None:
    model = llama().train()
    can_pack(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_packing_that_was_asked_for_and_works_raises_nothing() -> None:
    check_packing(llama(), "student")
    check_packing(llama().to(torch.bfloat16), "teacher")


def test_packing_that_was_asked_for_and_cannot_be_names_side_backend_and_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"rows of the teacher \(MistralForCausalLM, attention backend 'sdpa'\).*slid"
    ):
        check_packing(other_model("window"), "teacher")
    with pytest.raises(ConfigError, match=r"takes no position_ids.*Turn packing off"):
        check_packing(other_model("positions from the mask"), "student")


def test_what_only_a_trial_shows_is_refused_too() -> None:
    class Smeared(LlamaForCausalLM):
        """Every token sees the one before it, of whatever row."""

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **given: Any) -> Any:
            embedded = self.model.embed_tokens(input_ids)
            smeared = embedded + torch.nn.functional.pad(embedded, (0, 0, 1, 0))[:, :-1]
            return super().forward(inputs_embeds=smeared, position_ids=position_ids, **given)

    model = Smeared(llama().config).eval()
    assert not can_pack(model)
    with pytest.raises(ConfigError, match="gave other hidden states for two short rows"):
        check_packing(model, "student")
