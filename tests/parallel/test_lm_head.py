# SPDX-License-Identifier: Apache-2.0
"""An output head in shards: the divergence over two of them, gradients, what crosses ranks, and the way back."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from torch import nn

import tiny
from cohobate.functional.fused_linear import fused_linear_divergence
from cohobate.parallel.lm_head import (
    VocabParallelLMHead,
    shard_lm_head,
    vocab_parallel_fused_divergence,
    vocab_range,
)
from functional import heads, oracle

# ------------------------------------------------------------------ over ranks


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__).with_name("lm_head_ranks.py"), [], world=request.param, timeout=300)


@pytest.mark.distributed
def test_value_and_every_gradient_over_shards_equal_those_of_one_process(ranks):
    for result in ranks:
        assert result["count"] == 464
        assert result["wrong"] == []


@pytest.mark.distributed
def test_what_crosses_ranks_is_counted_and_no_logits_of_all_rows_are_made(ranks):
    ids = -(-500 // len(ranks))
    for result in ranks:
        for beta, cost in result["costs"].items():
            # The widest shard, once; of each chunk a maximum, a sum, the most likely token, a JSD's second sum; dX.
            assert cost["forward"] == ["all_reduce"] * (1 + 3 * (4 if beta == "0.5" else 3) + 1)
            assert cost["backward"] == []
            assert cost["largest"] <= 20 * ids * 4  # a chunk, of three
            assert sum(cost["saved"]) <= (60 * 4 + ids * 4) * 4  # dX and dW


@pytest.mark.distributed
def test_a_head_comes_back_from_its_shards_bit_for_bit(ranks):
    for result in ranks:
        assert all(result["round trips"].values()), result["round trips"]


def gradients_of_a_whole_model(*, tied: bool) -> dict[str, torch.Tensor]:
    model = tiny.llama(3, vocab_size=23)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    logits = model(input_ids=torch.arange(2, 14).reshape(2, 6)).logits[..., :21].log_softmax(-1)
    teacher = oracle.draw(2, 6, 21, seed=1, dtype=torch.float32).log_softmax(-1)
    (teacher.exp() * (teacher - logits)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.distributed
def test_a_tied_embedding_gets_both_gradients_whole_on_every_rank(ranks):
    wanted = gradients_of_a_whole_model(tied=True)
    for result in ranks:
        assert result["tied"]["True"]["keys"] == ["lm_head.weight"]  # the whole one: saving needs no gathering
        found = result["tied"]["True"]["gradients"]
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name]), gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
def test_an_embedding_whose_head_is_a_copied_shard_gets_the_gradient_of_its_own_side_alone(ranks):
    wanted = gradients_of_a_whole_model(tied=False)
    shards = []
    for result in ranks:
        assert result["tied"]["False"]["keys"] == ["lm_head.vocab_range", "lm_head.weight"]
        found = {n: torch.tensor(g) for n, g in result["tied"]["False"]["gradients"].items()}
        assert found.keys() == wanted.keys()
        for name in wanted.keys() - {"lm_head.weight"}:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)
        shards.append(found["lm_head.weight"])
    torch.testing.assert_close(torch.cat(shards), wanted["lm_head.weight"][:21], rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
def test_heads_that_are_not_split_alike_are_refused_on_every_rank_with_the_reason(ranks):
    for result in ranks:
        assert "keep the teacher's top k (vocab_parallel_topk)" in result["refusals"]["degree"]
        assert "Padded heads over one tokenizer" in result["refusals"]["width"]
        assert "shard it again" in result["refusals"]["state"]
        assert "whose logits are no distribution" in result["refusals"]["readers"]
        assert "Draw with vocab_parallel_sample" in result["refusals"]["generate"]
        assert "cannot stay tied" in result["refusals"]["tied DTensor"]
        assert result["refusals"]["DTensor"] == "taken"


# ------------------------------------------------------------------ in one process


@pytest.mark.parametrize(("vocab_size", "size"), [(11, 1), (11, 2), (11, 3), (12, 4), (2, 3), (1, 4)])
def test_ranges_cover_the_vocabulary_and_differ_by_one_id_at_most(vocab_size: int, size: int):
    ranges = [vocab_range(vocab_size, rank, size) for rank in range(size)]
    assert [i for start, end in ranges for i in range(start, end)] == list(range(vocab_size))
    widths = [end - start for start, end in ranges]
    assert max(widths) - min(widths) <= 1


@pytest.mark.parametrize("bias", [False, True])
def test_without_a_group_it_is_the_whole_head(bias: bool):
    whole = nn.Linear(5, 11, bias=bias)
    head = VocabParallelLMHead.from_linear(whole)
    hidden = oracle.draw(2, 3, 5, seed=1, dtype=torch.float32).requires_grad_()
    ours, theirs = head(hidden), whole(hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    grads = [
        torch.autograd.grad(x.square().sum(), [hidden, *h.parameters()]) for x, h in ((ours, head), (theirs, whole))
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert torch.equal(head.to_linear().weight, whole.weight)


def test_without_a_group_the_divergence_is_that_of_whole_heads():
    p = heads.problem(1)
    student = VocabParallelLMHead.from_linear(linear(p.weight, p.bias))
    teacher = VocabParallelLMHead.from_linear(linear(p.teacher_weight, p.teacher_bias))
    got = vocab_parallel_fused_divergence(
        p.hidden, student, p.teacher_hidden, teacher, beta=0.5, weights=p.weights, **p.options
    )
    heads.assert_same(got, heads.plain(p, 0.5), rtol=1e-11, atol=1e-13)


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    head = nn.Linear(*weight.shape[::-1], bias=bias is not None, dtype=weight.dtype)
    head.weight.data = weight.detach().clone()
    if bias is not None:
        head.bias.data = bias.detach().clone()
    return head


def test_a_frozen_head_stays_frozen_and_takes_no_gradient():
    whole = nn.Linear(5, 11).requires_grad_(False)
    head = VocabParallelLMHead.from_linear(whole)
    assert not any(p.requires_grad for p in head.parameters())
    assert not head(torch.ones(2, 5)).requires_grad
    assert not any(p.requires_grad for p in head.to_linear().parameters())


def test_a_state_is_loaded_where_it_belongs_and_refused_elsewhere():
    head, other = VocabParallelLMHead(5, 11, bias=True), VocabParallelLMHead(5, 11, bias=True)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.weight, head.weight)
    with pytest.raises(ValueError, match=r"\[0, 11, 11\], the head \[0, 12, 12\]"):
        VocabParallelLMHead(5, 12, bias=True).load_state_dict(head.state_dict())


def test_what_cannot_be_split_says_so():
    with pytest.raises(TypeError, match="Merge adapters first"):
        VocabParallelLMHead.from_linear(nn.Embedding(3, 4))  # pyright: ignore[reportArgumentType]
    for size in (0, 12):
        with pytest.raises(ValueError, match=f"the width of the head, got {size}"):
            VocabParallelLMHead.from_linear(nn.Linear(5, 11), vocab_size=size)
    head = VocabParallelLMHead.from_linear(nn.Linear(5, 11, bias=False))
    with pytest.raises(ValueError, match="at least 11 ids of 5 features, got 10 of 5"):
        head.to_linear(nn.Linear(5, 10, bias=False))
    with pytest.raises(ValueError, match="if, and only if"):
        head.to_linear(nn.Linear(5, 11))


def test_a_tied_models_head_stays_tied_and_a_padded_one_is_cut():
    model = tiny.llama(1, vocab_size=23)
    head = shard_lm_head(model, vocab_size=20)
    assert model.get_output_embeddings() is head
    assert head.tied
    assert head.weight is model.get_input_embeddings().weight
    ids = torch.arange(2, 8)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, tiny.llama(1)(input_ids=ids).logits[..., :20])
    untied = shard_lm_head(tiny.llama(1, tie=False))
    assert not untied.tied
    assert "ids 0 to 23 of 23" in repr(untied)


def test_the_options_are_those_of_the_fused_function():
    own = inspect.signature(vocab_parallel_fused_divergence).parameters
    assert set(own) - {"options"} == {"student_hidden", "student_head", "teacher_hidden", "teacher_head", "beta"}
    head = VocabParallelLMHead.from_linear(nn.Linear(5, 11))
    with pytest.raises(TypeError, match="temprature"):
        vocab_parallel_fused_divergence(torch.ones(2, 5), head, torch.ones(2, 5), head, beta=0.5, temprature=2.0)
    assert "shards" in inspect.signature(fused_linear_divergence).parameters
