# SPDX-License-Identifier: Apache-2.0
"""Sampling as a pure function of (row key, step, token id): a counter in place of a generator.

A generator's next number depends on everything drawn before it, so a row's completion would change with the rows
beside it, the number of processes, and whoever else draws. Here the noise of token v at step t of a row is a hash of
`(key, t, v)`, computed for all rows at once. The Gumbel-max trick turns it into a draw: `argmax(logits + noise)` is
distributed as `softmax(logits)`, and a rounding difference in the logits can change the draw only between two tokens
that were nearly level.
"""

import torch
from torch import Tensor
from transformers import LogitsProcessor

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no arithmetic on uint64, and two's complement products agree."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """`x ^= x >>> bits` in place; the mask undoes the sign that int64's shift drags in."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place on a tensor of ours."""
    _xor_shift(x, 30).mul_(_MIX_1)
    _xor_shift(x, 27).mul_(_MIX_2)
    return _xor_shift(x, 31)


def hashed_bits(keys: Tensor, counter: int | Tensor) -> Tensor:
    """64 hashed bits for each key and counter, as int64: number `counter` of the SplitMix64 stream seeded by `keys`.

    `keys` int64 of any shape; `counter` a number, or an int64 tensor that broadcasts against `keys`.
    """
    offset = (counter + 1) * _GOLDEN
    return _mix(keys + (_signed(offset) if isinstance(offset, int) else offset))


def sample_keys(seeds: Tensor, num_samples: int) -> Tensor:
    """`[B * n]` int64, prompt-major: a key for each sample of each prompt. Sample j's key does not depend on n."""
    counters = torch.arange(num_samples, dtype=torch.int64, device=seeds.device)
    return hashed_bits(seeds[:, None], counters).reshape(-1)


def gumbel_noise(keys: Tensor, step: int, vocab_size: int) -> Tensor:
    """`[B, V]` float32 standard Gumbel noise, a function of each row's key, the step and the token id alone.

    `-log(E)` with `E = -log1p(-u)` exponential and `u` in (0, 1) from 32 hashed bits. Large noise, which decides who
    wins, comes from small `u`, where float32 is finest: the right tail is right down to probabilities of 2^-32.
    """
    ids = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    bits = hashed_bits(hashed_bits(keys, step)[:, None], ids)
    u = (bits >> 32).bitwise_and_((1 << 32) - 1).to(torch.float32).add_(0.5).mul_(2.0**-32)
    # The largest values round to 1, whose noise -inf could not tell an only candidate from an excluded token.
    u.clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


class KeyedDraw(LogitsProcessor):
    """The last logits processor of a greedy `generate`: adds each row's keyed noise, and notes the chosen log-probs.

    It must come after temperature and truncation, since it takes the scores it is given for the sampling distribution.
    Without keys it adds nothing (greedy) and notes the log-probs of the untempered distribution.
    """

    def __init__(self, keys: Tensor | None, prompt_width: int):
        self._keys = keys
        self._prompt_width = prompt_width
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noisy = scores
        if self._keys is not None:
            noisy = scores + gumbel_noise(self._keys, input_ids.shape[1] - self._prompt_width, scores.shape[1])
        chosen = noisy.argmax(-1, keepdim=True)
        self._logprobs.append(scores.gather(-1, chosen).squeeze(-1) - scores.logsumexp(-1))
        return noisy

    def logprobs(self) -> Tensor:
        """`[B, R]` float32 of the tokens chosen so far; columns after a row's end mean nothing."""
        return torch.stack(self._logprobs, dim=1)
