# SPDX-License-Identifier: Apache-2.0
"""The formulas of `functional` over process groups, and the groups themselves."""

from cohobate.parallel.world import World, all_reduce_max, all_reduce_sum, any_rank, current_world, keyed_seed

__all__ = ["World", "all_reduce_max", "all_reduce_sum", "any_rank", "current_world", "keyed_seed"]
