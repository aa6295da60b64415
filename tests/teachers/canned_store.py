# SPDX-License-Identifier: Apache-2.0
"""Small teacher stores: texts with canned scores, and a store written from them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohobate.functional.scores import TopKScores, top_k_scores
from cohobate.teachers.store_files import ShardEntry
from cohobate.teachers.store_format import Header, Text, data_digest
from cohobate.teachers.store_writer import ShardJob, ShardMaker, Written, plan_shards, write_store

VOCAB = 40


def texts(count: int = 12, seed: int = 0) -> list[Text]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 9, count)
    return [
        Text(sample_id=f"row {i}", ids=rng.integers(0, VOCAB, n).astype(np.int64), first=int(rng.integers(0, n - 1)))
        for i, n in enumerate(lengths)
    ]


def dense(text: Text) -> torch.Tensor:
    """Logits of the text's predictions: a function of the ids before each, as a causal model's are."""
    sums = np.cumsum((text.ids + 1) * 0.37)[text.first : -1]
    return torch.from_numpy(np.sin(np.outer(sums, np.arange(1, VOCAB + 1))) * 6).float()


def scores_of(given: Sequence[Text], *, top_k: int = 7, temperature: float = 1.0) -> TopKScores:
    logits = torch.cat([dense(text) for text in given])
    targets = torch.from_numpy(np.concatenate([text.ids[text.first + 1 :] for text in given]))
    return top_k_scores(logits, targets, top_k, temperature=temperature, rows="pairs")


def header(given: Sequence[Text], **changes: Any) -> Header:
    base: dict[str, Any] = {
        "teacher_config": "a" * 64,
        "teacher_weights": "b" * 64,
        "teacher_dtype": "float32",
        "tokenizer": "c" * 64,
        "merges": "d" * 64,
        "top_k": 7,
        "temperature": 1.0,
        "vocab_size": VOCAB,
        "data": data_digest(given),
        "num_texts": len(given),
        "num_rows": sum(text.num_rows for text in given),
        "shard_rows": 9,
        "batch_tokens": 64,
    }
    return Header(**base | changes)


def write(folder: Path, given: Sequence[Text], *, score: Any = None, **changes: Any) -> Written:
    """The store of `given`, in shards of about 9 predictions."""
    made = header(given, **changes)
    jobs = plan_shards(given, made.shard_rows)

    def scored(part: Sequence[Text]) -> TopKScores:
        return scores_of(part, top_k=made.top_k, temperature=made.temperature)

    make = ShardMaker(folder=folder, header=made, num_shards=len(jobs), score=score or scored)

    def run(missing: Sequence[ShardJob]) -> Iterable[ShardEntry]:
        return (make(job) for job in missing)

    return write_store(folder, made, jobs, run, command=("cohobate", "score", "--teacher", "BIG"))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
