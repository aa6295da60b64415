# SPDX-License-Identifier: Apache-2.0
"""Which ids a server teacher and the student are compared on, from the few settings that a recipe has for it.

A server says the teacher's likeliest ids and the token that stands there; everything else is one bucket, or is left
out. Which of these ids a divergence needs depends on its direction: forward KL weighs by the teacher, so the teacher's
likeliest are the ones that count; reverse KL weighs by the student, whose own draw, the token that stands there, must
be among them. A support on which every student has the loss 0 is refused. The names are those of TRL's
`ServerDistillationConfig`; where this allows more, the docstring says so.
"""

from dataclasses import dataclass
from typing import Literal

from cohobate.errors import ConfigError
from cohobate.functional.divergences import check_beta
from cohobate.functional.topk import Tail

Top1Mode = Literal["sampled", "argmax"]

WHY_NOT_CHOSEN_IDS = (
    "the server is asked through /v1/completions, which scores the teacher's likeliest ids and the token that stands "
    "there, and silently ignores a list of others. (vLLM 0.32 can score chosen ids at /inference/v1/generate, with "
    "--enable-scale-out and its second model runner, which its CPU build cannot run; Cohobate does not ask there)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSupport:
    """`ServerTeacher(top_k=, keep_sampled=)` and `DivergenceObjective(tail=)` that belong together."""

    top_k: int  # ids of each prediction
    keep_sampled: bool  # the token that stands there is always one of them
    tail: Tail  # what becomes of all others


def server_support(
    *, beta: float, loss_top_k: int = 1, loss_add_tail: bool = True, reverse_kl_top_1_mode: Top1Mode = "sampled"
) -> ServerSupport:
    """The support that these settings of a recipe mean.

    `beta` 0 (forward KL): the teacher's `loss_top_k` likeliest ids. Between 0 and 1: these and the token that stands
    there; where it is one of them, the next likeliest joins, so that every prediction has `loss_top_k + 1` (TRL
    allows `loss_top_k=1` only, and one id less there: its bound is looser). 1 (reverse KL): with `loss_top_k=1` the
    token that stands there alone; more (which TRL refuses) are as between 0 and 1. `loss_add_tail` puts all other ids
    into one bucket; without it both sides are normalised over the support.

    Raises:
        ConfigError: `loss_top_k` below 1, a support whose loss is 0 whatever the student does, or ids of the student's
            choice.
    """
    try:
        check_beta(beta)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if reverse_kl_top_1_mode not in ("sampled", "argmax"):
        raise ConfigError(f"reverse_kl_top_1_mode must be 'sampled' or 'argmax', got {reverse_kl_top_1_mode!r}.")
    if reverse_kl_top_1_mode == "argmax":
        raise ConfigError(
            "reverse_kl_top_1_mode='argmax' needs the teacher's log-probability of the student's likeliest token, but "
            f"{WHY_NOT_CHOSEN_IDS}. Use 'sampled', a local teacher, or a larger loss_top_k."
        )
    if loss_top_k < 1:
        raise ConfigError(
            f"loss_top_k must be at least 1, got {loss_top_k}: a server never says the whole vocabulary. For the token"
            " that stands there alone use objective.kind=policy_gradient."
        )
    tail: Tail = "bucket" if loss_add_tail else "renormalize"
    if beta == 0:
        support = ServerSupport(top_k=loss_top_k, keep_sampled=False, tail=tail)
    elif beta == 1 and loss_top_k == 1:
        support = ServerSupport(top_k=1, keep_sampled=True, tail=tail)
    else:
        support = ServerSupport(top_k=loss_top_k + 1, keep_sampled=True, tail=tail)
    if support.top_k == 1 and not loss_add_tail:
        raise ConfigError(
            f"beta={beta:g} with loss_top_k=1 and loss_add_tail=false compares both sides on one id, where each has "
            "the probability 1 after normalising: the loss is identically zero. Set loss_add_tail=true, or a larger "
            "loss_top_k."
        )
    return support
