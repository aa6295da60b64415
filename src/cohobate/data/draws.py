# SPDX-License-Identifier: Apache-2.0
"""Whether a row is sampled or taken as recorded, in this epoch.

The draw belongs to the row, not to a batch or a rank, so it is the same for any world size, batch size and order.
"""

from cohobate.parallel.world import keyed_seed


def draw_on_policy(sample_id: str, *, seed: int, epoch: int, fraction: float) -> bool:
    """True, with probability `fraction`, if the student samples this row in this epoch; a function of its arguments.

    The draws of one row at two fractions are coupled: a row that is sampled at 0.3 is also sampled at 0.7.

    Raises:
        ValueError: `fraction` is not in [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"on_policy_fraction must be in [0, 1], got {fraction}.")
    return keyed_seed("on_policy", seed, epoch, sample_id) < fraction * 2**63
