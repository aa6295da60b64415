# SPDX-License-Identifier: Apache-2.0
"""The shards of a store made by Ray Data on many machines. The one file that imports `ray`, and late.

Each task is a shard: a worker loads the teacher once, scores the shard's texts and puts its file into the folder,
which all machines must share. Only checksums come back, and the caller writes the index. A task that Ray runs again
writes the same bytes to the same place. What travels between Ray's processes is Ray's own format; no file of it stays.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cohobate.errors import DataError, MissingExtra
from cohobate.teachers.store_files import ShardEntry
from cohobate.teachers.store_format import Header, Text
from cohobate.teachers.store_scoring import model_scorer
from cohobate.teachers.store_writer import ShardJob, ShardMaker


class ScoreShard:
    """A worker: the teacher, and what it does with one shard."""

    def __init__(self, folder: str, header: Mapping[str, Any], num_shards: int, load: Mapping[str, Any]) -> None:
        known = Header(**header)
        self._make = ShardMaker(
            folder=Path(folder), header=known, num_shards=num_shards, score=model_scorer(known, **load)
        )

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        texts = tuple(
            Text(sample_id=str(name), ids=np.asarray(ids, dtype=np.int64), first=int(first))
            for name, ids, first in zip(row["sample_ids"], row["ids"], row["first"], strict=True)
        )
        return asdict(self._make(ShardJob(number=int(row["number"]), texts=texts)))


def run_on_ray(
    jobs: Sequence[ShardJob],
    *,
    folder: Path,
    header: Header,
    num_shards: int,
    load: Mapping[str, Any],
    num_workers: int | None = None,
) -> Iterator[ShardEntry]:
    """Make the shards; each entry comes as soon as its file is in place.

    Args:
        load: what `model_scorer` takes.
        num_workers: models at a time; None: one for each GPU of the cluster, or one if it has none.

    Raises:
        MissingExtra: ray is not installed.
        DataError: a worker failed, with its reason.
    """
    try:
        ray: Any = import_module("ray")
        ray_data: Any = import_module("ray.data")
        failures: Any = import_module("ray.exceptions").RayError
    except ImportError as error:
        raise MissingExtra("--launcher ray needs the package ray: pip install 'cohobate[ray]'.") from error
    started_here = not ray.is_initialized()
    if started_here:
        # A cluster that runs already is found by RAY_ADDRESS. Its news would run through the command's own lines.
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        items = [
            {
                "number": job.number,
                "sample_ids": [text.sample_id for text in job.texts],
                "ids": [text.ids.tolist() for text in job.texts],
                "first": [text.first for text in job.texts],
            }
            for job in jobs
        ]
        ray_data.DataContext.get_current().enable_progress_bars = False  # the command shows its own
        made = ray_data.from_items(items, override_num_blocks=len(items)).map(
            ScoreShard,
            fn_constructor_kwargs={
                "folder": str(folder.absolute()),
                "header": asdict(header),
                "num_shards": num_shards,
                "load": dict(load),
            },
            compute=ray_data.ActorPoolStrategy(size=min(len(jobs), num_workers or max(1, num_gpus))),
            num_gpus=1 if num_gpus else 0,
        )
        for row in made.iter_rows():
            yield ShardEntry(**row)
    except failures as error:
        reason = str(error).strip().splitlines()
        raise DataError(
            f"a worker failed: {reason[-1] if reason else type(error).__name__}. Finished shards stay; run the same "
            "command again."
        ) from error
    finally:
        if started_here:
            ray.shutdown()
