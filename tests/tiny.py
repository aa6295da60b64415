# SPDX-License-Identifier: Apache-2.0
"""Small things that many tests need: a character tokenizer, models that run in milliseconds, and canned rollouts."""

from collections.abc import Callable, Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cohobate.align.rollout import RolloutBatch, RolloutRequest, SamplingConfig

CHARACTERS = "0123456789+=abcdefgh "
PAD, EOS = 0, 1


def char_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One id for each character; pad 0, eos 1."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def llama(
    seed: int = 0, *, vocab_size: int = 23, hidden: int = 16, layers: int = 1, tie: bool = True
) -> LlamaForCausalLM:
    """A random Llama of a few thousand parameters, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=tie,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
            initializer_range=0.5,  # far from uniform, so that wrong positions show
        )
        return LlamaForCausalLM(config).eval()


class CannedRollouts:
    """A rollout source that answers each prompt with `answer(prompt ids)`: exact, and the same in any batch."""

    def __init__(self, answer: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
        self.answer = answer

    def sample(self, request: RolloutRequest, sampling: SamplingConfig, /) -> RolloutBatch:
        prompts = [
            tuple(ids[mask.bool()].tolist())
            for ids, mask in zip(request.prompt_ids, request.prompt_attention_mask, strict=True)
            for _ in range(sampling.n_samples_per_prompt)
        ]
        answers = [list(self.answer(prompt)) for prompt in prompts]
        left, right = max(map(len, prompts), default=1), max(map(len, answers), default=0)
        ids = torch.full((len(prompts), left + right), PAD)
        mask = torch.zeros_like(ids)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            row = torch.tensor([*prompt, *answer])
            ids[i, left - len(prompt) : left + len(answer)] = row
            mask[i, left - len(prompt) : left + len(answer)] = 1
        return RolloutBatch(
            input_ids=ids,
            attention_mask=mask,
            response_start_idx=torch.full((len(prompts),), left),
            sampler_logprobs=torch.full(ids.shape, -1.0),
        )
