# SPDX-License-Identifier: Apache-2.0
"""What each rank of the world tests does; one JSON line to standard output."""

import json

import torch
import torch.distributed as dist

from cohobate.parallel import World, all_reduce_max, all_reduce_sum, any_rank, current_world, keyed_seed


def refused(values: dict[str, float]) -> str:
    try:
        return str(all_reduce_sum(values))
    except RuntimeError as error:
        return str(error)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values = {"loss": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)[rank], "count": rank + 1, "nothing": 0}
    if rank == 1:
        values = dict(reversed(values.items()))
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    mine: World = current_world(pair if rank < 2 else single)
    result = {
        "world": [current_world().rank, current_world().size],
        "sum": all_reduce_sum(values),
        "max": all_reduce_max([3, 12, -5][rank]),
        "any": [any_rank(rank == 2), any_rank(False)],
        "seed": keyed_seed(0, "epoch", 1),
        "unlike keys": refused({"a": 1.0, "b" if rank == 0 else "c": 1.0}),
        "more keys": refused({str(i): 1.0 for i in range(3 + (rank == 2))}),
        "sub-group": all_reduce_sum({"rank": rank}, world=mine)["rank"],
    }
    print("RESULT", json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
