# SPDX-License-Identifier: Apache-2.0
"""On-policy self-distillation with both output heads split over ranks: no rank ever sees a whole row of logits.

The teacher is the student itself, reading a privileged prefix. Its logits are made once and kept for many steps, and
that cache is what a whole vocabulary makes expensive: here each rank keeps the columns of its own ids, and neither the
cache nor the student's logits are gathered. Forward and reverse KL are computed in three ways,

    shards    the student's `[N, V / ranks]` logits beside the cached ones (`vocab_parallel_kl_div`)
    fused     from hidden states and the two heads, without logits of all rows (`vocab_parallel_fused_divergence`)
    gather    both sides gathered to `[N, V]`, which is what the other two spare

and each is compared with one process that holds everything: value, gradient of the body, gradient of the head.

A cache of shards fits a student that is split over the same ranks. One that is split otherwise gets the teacher's top
k instead: made on any number of ranks, saved, and used on any other.

    torchrun --nproc-per-node 2 examples/opsd_tensor_parallel.py [CACHE.safetensors]
    torchrun --nproc-per-node 3 examples/opsd_tensor_parallel.py CACHE.safetensors
    python examples/opsd_tensor_parallel.py CACHE.safetensors

The first makes the top-k cache, if the file is not there yet; every run prints the same loss for it.
"""

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from cohobate import RolloutBatch, TeacherContext, build_opsd_training_batch, forward_kl, reverse_kl
from cohobate.functional import log_tail_mass
from cohobate.parallel import (
    VocabParallelLMHead,
    vocab_parallel_fused_divergence,
    vocab_parallel_kl_div,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
)

VOCABULARY, HIDDEN, ROWS, PROMPT, SOLUTION, COMPLETION = 12_000, 32, 4, 6, 10, 48
PAD, K = 0, 8
GROUP: dist.ProcessGroup | None = None  # the tensor-parallel group; None in one process

KLS = {"forward KL": forward_kl, "reverse KL": reverse_kl}


def random_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def training_batch() -> Any:
    """Completions behind the student's prompts, and the same ones behind prompts that also hold a solution."""
    prompts = torch.randint(1, VOCABULARY, (ROWS, PROMPT))
    completions = torch.randint(1, VOCABULARY, (ROWS, COMPLETION))
    ids = torch.cat([prompts, completions], dim=1)
    mask = torch.ones_like(ids)
    mask[1, -7:] = 0  # one completion is shorter
    rollout = RolloutBatch(input_ids=ids, attention_mask=mask, response_start_idx=torch.full((ROWS,), PROMPT))
    privileged = torch.cat([prompts, torch.randint(1, VOCABULARY, (ROWS, SOLUTION))], dim=1)
    context = TeacherContext(input_ids=privileged, attention_mask=torch.ones_like(privileged))
    return build_opsd_training_batch(rollout=rollout, teacher_context=context, pad_token_id=PAD)


def hidden_states(model: Any, inputs: dict[str, Tensor], index: Tensor) -> Tensor:
    """`[N, H]`: what the head reads at the N positions `index` of the flattened rows. The head itself is not run."""
    return model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[index]


class Gather(torch.autograd.Function):
    """`[N, V]` of every rank's `[N, V_local]`, as a trainer without sharded losses does it; backward keeps our own."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, head: VocabParallelLMHead) -> Tensor:
        ctx.columns = slice(head.vocab_start_index, head.vocab_end_index)
        if GROUP is None:
            return shard.clone()
        whole = torch.zeros(shard.shape[0], head.vocab_size)  # shards differ in width, so zeros are added up
        whole[:, ctx.columns] = shard
        dist.all_reduce(whole, group=GROUP)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[:, ctx.columns], None


class Peak(TorchDispatchMode):
    """The most bytes that tensors took at one time inside, without those of `known` that were there before."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.seen = {id(x.untyped_storage()) for x in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in (*args, *(out if isinstance(out, tuple | list) else (out,))):
            if isinstance(x, Tensor) and id(storage := x.untyped_storage()) not in self.seen:
                self.seen.add(id(storage))
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.now -= nbytes


def gradients(model: Any, head: Any) -> tuple[Tensor, Tensor]:
    """Of one weight deep in the body, and of the head's (on a rank, of its own rows); and clear all."""
    found = model.model.layers[0].mlp.up_proj.weight.grad.clone(), head.weight.grad.clone()
    model.zero_grad()
    head.zero_grad()
    return found


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Relative to the largest entry of each tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def top_k_cache(path: Path, logits: Tensor, head: VocabParallelLMHead) -> dict[str, Tensor]:
    """`ids` and true log-probabilities `[N, K]` of the teacher's top K: from the file, or else from shards."""
    if not path.exists():
        place = {"vocab_start_index": head.vocab_start_index, "vocab_end_index": head.vocab_end_index}
        _, ids = vocab_parallel_topk(logits, K, tp_group=GROUP, **place)
        cache = {"ids": ids, "logprobs": vocab_parallel_logprobs(logits, ids, GROUP)}
        if head.vocab_start_index == 0:
            save_file(cache, path)
        say(f"top-{K} cache made on {size()} ranks: {mebibytes(cache.values())} MiB")
        return cache
    return load_file(path)


def top_k_loss(student_logits: Tensor, cache: dict[str, Tensor]) -> Tensor:
    """Mean forward KL over the K ids and one bucket for all others: two lines, whatever the student's split is."""
    seen, known = vocab_parallel_logprobs(student_logits, cache["ids"], GROUP), cache["logprobs"]
    student, teacher = (torch.cat([x, log_tail_mass(x)[:, None]], dim=1) for x in (seen, known))
    return forward_kl(student, teacher).mean()


def main(arguments: Sequence[str]) -> None:
    student = random_model()
    teacher = copy.deepcopy(student).requires_grad_(False)
    batch = training_batch()
    student_index, teacher_index, _ = batch.pairs()
    num_pairs = student_index.shape[0]
    student_head = VocabParallelLMHead.from_linear(student.lm_head, GROUP)
    teacher_head = VocabParallelLMHead.from_linear(teacher.lm_head, GROUP)

    with torch.no_grad():  # the cache: the hidden states for `fused`, or this rank's columns of the logits
        teacher_hidden = hidden_states(teacher, batch.teacher_model_inputs, teacher_index)  # [N, H]
        cached = teacher_head(teacher_hidden)  # [N, V_local]
        whole = teacher.lm_head(teacher_hidden)  # [N, V]: only for comparison
    say(f"{num_pairs} pairs, {VOCABULARY} ids, heads over {size()} rank(s)")
    say(f"teacher cache of a rank: {mebibytes([cached])} MiB; gathered it would be {mebibytes([whole])} MiB")

    def student_hidden() -> Tensor:
        return hidden_states(student, batch.student_model_inputs, student_index)

    def one_process(kl: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return kl(student.lm_head(student_hidden()).log_softmax(-1), whole.log_softmax(-1)).mean()

    def shards(name: str) -> Tensor:
        return vocab_parallel_kl_div(student_head(student_hidden()), cached, GROUP, name == "reverse KL").mean()

    def fused(name: str) -> Tensor:
        beta = 0.0 if name == "forward KL" else 1.0
        out = vocab_parallel_fused_divergence(
            student_hidden(), student_head, teacher_hidden, teacher_head, beta=beta, chunk_size=32
        )
        return out.loss_sum / num_pairs

    def gather(name: str) -> Tensor:
        logits, theirs = Gather.apply(student_head(student_hidden()), student_head), Gather.apply(cached, teacher_head)
        return KLS[name](logits.log_softmax(-1), theirs.log_softmax(-1)).mean()

    before = [*student.parameters(), *teacher.parameters(), *student_head.parameters(), *teacher_head.parameters()]
    before += [cached, whole, teacher_hidden, student_index, *batch.student_model_inputs.values()]
    say(f"\n{'':12}{'':8}{'loss':>10}{'off by':>10}{'gradients off by':>18}{'peak MiB':>10}")
    mine = slice(student_head.vocab_start_index, student_head.vocab_end_index)
    for name, kl in KLS.items():
        expected = one_process(kl)
        expected.backward()
        body, head = gradients(student, student.lm_head)
        for way in (shards, fused, gather):
            with Peak(before) as peak:
                loss = way(name)
                loss.backward()
            off = largest_difference(gradients(student, student_head), (body, head[mine]))
            away = largest_difference([loss.detach()], [expected.detach()])
            row = f"{name:12}{way.__name__:8}{loss.item():10.6f}{away:10.1e}{off:18.1e}{peak.most / 2**20:10.2f}"
            say(row)
            assert max(off, away) < 1e-3, "the sharded loss is not the loss of one process"

    if arguments:
        cache = top_k_cache(Path(arguments[0]), cached, teacher_head)
        loss = top_k_loss(student_head(student_hidden()), cache)
        say(f"top-{K} forward KL, student over {size()} rank(s): {loss.item():.6f}")


def mebibytes(tensors: Any) -> str:
    return f"{sum(x.numel() * x.element_size() for x in tensors) / 2**20:.2f}"


def size() -> int:
    return 1 if GROUP is None else dist.get_world_size(GROUP)


def say(text: str) -> None:
    if GROUP is None or dist.get_rank(GROUP) == 0:
        print(text, flush=True)


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        GROUP = dist.group.WORLD
    main(sys.argv[1:])
    if GROUP is not None:
        dist.destroy_process_group()
