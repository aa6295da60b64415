# SPDX-License-Identifier: Apache-2.0
"""An output head whose vocabulary is split over a tensor-parallel group, and the fused divergence over two of them.

Each rank holds the rows of its own ids, `[V_local, H]`, and makes `[..., V_local]` logits of hidden states that all
ranks share. Nothing is gathered: the ops of `vocab.py` read such logits as they are, and
`vocab_parallel_fused_divergence` does not even make them all at once. What crosses ranks is the gradient by the hidden
states, `[..., H]`, which every shard knows a part of; the gradient of a shard's weight is the shard's own.

Every rank of the group computes the same loss from the same hidden states and goes backward through it; that is what
makes the sums right. Data parallelism is another group. V ids of the whole vocabulary, V_local of this rank, H hidden.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cohobate.functional.fused_linear import FusedDivergence, fused_linear_divergence
from cohobate.parallel.gather import gather_rows
from cohobate.parallel.modules import gathered
from cohobate.parallel.shards import Group, rank_and_size, shards_of
from cohobate.parallel.world import World, current_world


def vocab_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """`[start, end)` of the ids of `rank` among `size`: contiguous, and no two ranks differ by more than one id."""
    each, more = divmod(vocab_size, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


class VocabParallelLMHead(nn.Module):
    """Ids `[vocab_start_index, vocab_end_index)` of a linear output head over `vocab_size` ids.

    `weight` is `[V_local, H]` and `bias [V_local]`: the state of a rank is its shard, and says which one it is. A head
    that is tied to an embedding (`from_linear(..., tied=True)`) keeps the whole `[V, H]` parameter instead and reads
    its rows: one parameter, which gets the gradients of both uses, equal on every rank.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        tp_group: Group = None,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Weights are uninitialised: load them, or use `from_linear`. `tp_group=None` holds all ids."""
        super().__init__()
        rank, size = rank_and_size(tp_group)
        self.tp_group = tp_group
        self.vocab_size = vocab_size
        self.vocab_start_index, self.vocab_end_index = vocab_range(vocab_size, rank, size)
        num_ids = self.vocab_end_index - self.vocab_start_index
        self.tied = False
        self.weight = nn.Parameter(torch.empty(num_ids, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_ids, device=device, dtype=dtype)) if bias else None
        mark = torch.tensor([self.vocab_start_index, self.vocab_end_index, vocab_size])
        self.register_buffer("vocab_range", mark)

    @classmethod
    def from_linear(
        cls,
        head: nn.Linear,
        tp_group: Group = None,
        *,
        vocab_size: int | None = None,
        tied: bool = False,
    ) -> "VocabParallelLMHead":
        """This rank's shard of a loaded `head`, for training or a teacher; every rank passes the same weights.

        Args:
            head: `[V, H]`, with or without bias. Its `requires_grad` is kept.
            vocab_size: the real ids; a padded head is cut to them, so that padding takes no probability.
            tied: share `head.weight` with its other owner, the embedding. Otherwise the shard is a copy: an embedding
                that owned the weight too stays whole and as it is, gets the gradients of the input side alone, and
                parts from the head at the first step. That is right for a frozen teacher, and it saves the memory of
                a whole head's gradient and optimizer state.

        Raises:
            TypeError: a head that is no plain linear layer (an adapter is merged first).
            ValueError: a `vocab_size` beyond the head; a tied DTensor.
        """
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise TypeError(
                f"from_linear needs a plain nn.Linear, got {type(head).__name__}. Merge adapters first "
                "(merge_and_unload), and dequantize the weights."
            )
        whole, bias = gathered(head.weight), None if head.bias is None else gathered(head.bias)
        if tied and whole is not head.weight:
            raise ValueError(
                "a head whose weight is a DTensor cannot stay tied to it: only this rank's part of the gradient would "
                "find its place. Use tied=False, or shard the model before it is split otherwise."
            )
        vocab_size = whole.shape[0] if vocab_size is None else vocab_size
        if not 1 <= vocab_size <= whole.shape[0]:
            raise ValueError(f"vocab_size must be in [1, {whole.shape[0]}], the width of the head, got {vocab_size}.")
        sharded = cls(whole.shape[1], vocab_size, tp_group, bias=bias is not None, device="meta")
        rows = slice(sharded.vocab_start_index, sharded.vocab_end_index)
        sharded.tied = tied
        sharded.weight = head.weight if tied else _like(whole[rows], head.weight)
        if bias is not None:
            sharded.bias = _like(bias[rows], head.bias)
        mark = torch.tensor([rows.start, rows.stop, vocab_size], device=whole.device)
        sharded.register_buffer("vocab_range", mark, persistent=not tied)  # a tied weight is whole, as in any head
        return sharded

    @property
    def is_whole(self) -> bool:
        """Whether this rank makes the logits of all ids."""
        return self.vocab_end_index - self.vocab_start_index == self.vocab_size

    @property
    def shard_weight(self) -> Tensor:
        """`[V_local, H]` as it takes part in a graph: `weight`, or its rows of the tied one."""
        if not self.tied:
            return self.weight
        rows: Any = _RowsOfTied.apply(self.weight, self.vocab_start_index, self.vocab_end_index, self.tp_group)
        return rows

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V_local]` of `hidden [..., H]`, equal on all ranks; its gradient is summed over them, once."""
        shared: Any = _IntoShards.apply(hidden, self.tp_group)
        return nn.functional.linear(shared, self.shard_weight, self.bias)

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """`[vocab_size, H]` on every rank, detached. It gathers, so every rank must call it: for saving and tests."""
        if self.tied:
            return self.weight[: self.vocab_size].detach().clone()
        return gather_rows(self.weight.detach(), world=_world(self.tp_group))

    @torch.no_grad()
    def full_bias(self) -> Tensor | None:
        """`[vocab_size]` on every rank, likewise."""
        if self.bias is None:
            return None
        return gather_rows(self.bias.detach()[:, None], world=_world(self.tp_group))[:, 0]

    @torch.no_grad()
    def to_linear(self, into: nn.Linear | None = None) -> nn.Linear:
        """The whole head again, on every rank: a new one of `vocab_size` ids, or `into`, whose padding stays as it is.

        What `from_linear` was given comes back bit for bit. Every rank must call it.
        """
        weight, bias = self.full_weight(), self.full_bias()
        if into is None:
            into = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
            into.weight = _like(weight, self.weight)
            if bias is not None and self.bias is not None:
                into.bias = _like(bias, self.bias)
            return into
        if into.in_features != weight.shape[1] or into.out_features < self.vocab_size:
            raise ValueError(
                f"to_linear needs a head of at least {self.vocab_size} ids of {weight.shape[1]} features, got "
                f"{into.out_features} of {into.in_features}."
            )
        if (into.bias is None) != (bias is None):
            raise ValueError("to_linear needs a head with a bias if, and only if, the shards have one.")
        into.weight[: self.vocab_size] = weight
        if bias is not None:
            into.bias[: self.vocab_size] = bias
        return into

    def extra_repr(self) -> str:
        ids = f"ids {self.vocab_start_index} to {self.vocab_end_index} of {self.vocab_size}"
        return f"{ids}, in_features={self.weight.shape[1]}, bias={self.bias is not None}, tied={self.tied}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "VocabParallelLMHead":
        """A head with its own weights over the same ranks, for a frozen or averaged teacher: groups have no copy."""
        memo[id(self.tp_group)] = self.tp_group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found = state_dict.get(f"{prefix}vocab_range")
        own = [self.vocab_start_index, self.vocab_end_index, self.vocab_size]
        if found is not None and found.tolist() != own:
            raise ValueError(
                f"this state has [start, end, vocabulary] {found.tolist()}, the head {own}. Load the state that the "
                "same rank of an equal group saved; for another number of ranks, save to_linear() and shard it again."
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def shard_lm_head(model: nn.Module, tp_group: Group = None, *, vocab_size: int | None = None) -> VocabParallelLMHead:
    """Put this rank's shard in the place of a loaded model's output head, and return it.

    A tied head stays tied. The model's logits are then `[B, T, V_local]`, from which `model.generate` would draw each
    rank's own tokens: it raises instead (`vocab_parallel_sample` draws from shards). Before saving: `head.to_linear()`
    and `model.set_output_embeddings` with it.
    """
    whole: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    tied = getattr(embedding, "weight", None) is whole.weight
    head = VocabParallelLMHead.from_linear(whole, tp_group, vocab_size=vocab_size, tied=tied)
    model.set_output_embeddings(head)  # pyright: ignore[reportCallIssue]
    if not head.is_whole:
        model.__dict__["generate"] = _refuse_to_generate  # in front of the class's own
    return head


def _refuse_to_generate(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "this model's output head is one rank's shard of the vocabulary, and generate would choose among that shard's "
        "ids only. Draw with vocab_parallel_sample; or, with the whole head put back by "
        "model.set_output_embeddings(head.to_linear()), `del model.generate`."
    )


def vocab_parallel_fused_divergence(
    student_hidden: Tensor,
    student_head: VocabParallelLMHead,
    teacher_hidden: Tensor,
    teacher_head: VocabParallelLMHead,
    *,
    beta: float,
    **options: Any,
) -> FusedDivergence:
    """`fused_linear_divergence` over heads that are split over one group: equal on every rank, no `[N, V_local]` kept.

    Args:
        student_hidden: `[N, Hs]`, the same on every rank; its gradient is whole on every rank.
        teacher_hidden: `[N, Ht]`, a constant, as is `teacher_head`.
        beta: 0 forward KL, 1 reverse KL, between them JSD.
        options: `temperature`, `weights [N]`, scales, soft-caps and chunking of `fused_linear_divergence`.

    For each chunk of rows one maximum, one sum, a second sum for a JSD, and one for the most likely token cross ranks,
    each of a few numbers per row; with a gradient, once, the sum of `[N, Hs]`.

    Raises:
        ValueError: heads that are not split alike; shapes and numbers that do not fit.
    """
    _check_split_alike(student_head, teacher_head)
    return fused_linear_divergence(
        student_hidden,
        student_head.shard_weight,
        teacher_hidden,
        teacher_head.shard_weight,
        beta=beta,
        student_bias=student_head.bias,
        teacher_bias=teacher_head.bias,
        shards=shards_of(student_head.tp_group, student_head.vocab_start_index),
        **options,
    )


def _check_split_alike(student: VocabParallelLMHead, teacher: VocabParallelLMHead) -> None:
    """Both are known to every rank, so every rank raises, or none."""
    if student.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"the student's head has {student.vocab_size} ids and the teacher's {teacher.vocab_size}. Padded heads "
            "over one tokenizer are cut to the real ids: from_linear(..., vocab_size=...)."
        )
    ours, theirs = (_ranks(head.tp_group) for head in (student, teacher))
    if ours != theirs:
        raise ValueError(
            f"the student's head is split over ranks {ours} and the teacher's over {theirs}. A rank compares the ids "
            "that it holds of both; any other split would move [N, V] logits between ranks. Split both over one "
            "group, or keep the teacher's top k (vocab_parallel_topk), which fits any split."
        )


def _ranks(group: Group) -> list[int]:
    return [0] if group is None else dist.get_process_group_ranks(group)


def _world(group: Group) -> World:
    return World(rank=0, size=1) if group is None else current_world(group)


def _like(values: Tensor, parameter: Tensor) -> nn.Parameter:
    """A parameter of its own with these values, trained if `parameter` is."""
    return nn.Parameter(values.detach().clone(), requires_grad=parameter.requires_grad)


class _IntoShards(torch.autograd.Function):
    """The same hidden states for every shard of a head; each knows a part of their gradient, and parts add up."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_hidden: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return shards_of(ctx.group).sum(grad_hidden), None  # group: no number


class _RowsOfTied(torch.autograd.Function):
    """Rows of a parameter that every rank holds whole: its gradient must be whole too, so the shards' are added up."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, start: int, end: int, group: Group) -> Tensor:
        ctx.place, ctx.shape = (slice(start, end), group), whole.shape
        return whole[start:end]

    @staticmethod
    @once_differentiable
    # torch types backward as (ctx, *grads); naming the gradient is clearer.
    def backward(ctx: Any, grad_rows: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, group = ctx.place
        whole = grad_rows.new_zeros(ctx.shape)  # [V, H]
        whole[rows] = grad_rows
        if group is not None:
            dist.all_reduce(whole, group=group)  # in place: it is the largest tensor of the step
        return whole, None, None, None  # start, end, group: no numbers
