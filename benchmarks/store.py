# SPDX-License-Identifier: Apache-2.0
"""The teacher store: what writing adds to the forward pass, bytes a token, and reading beside a student's step.

    python benchmarks/store.py [--layers 30] [--rounds 5] [--vocab 49152]

A model of SmolLM2-135M's shape with random weights, one thread. The four ways are run in turn, once a round, since a
shared machine drifts; medians of CPU seconds are compared (and the wall clock is shown).

- bare: the forward pass up to the logits of every prediction, dropped a block at a time
- scored: the same, and the K likeliest ids, normaliser and realized token of each: what any store needs
- stored: the same, and a finished store on the disk (encoded, checksum, fsync, rename, index)
- read: a step's batches from the store; beside the student's forward and backward pass over the same predictions
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cohobate.functional.chunked_head import row_chunks
from cohobate.functional.scores import HiddenScores
from cohobate.objectives import DivergenceObjective
from cohobate.teachers import LocalTeacher, pair_scores
from cohobate.teachers.store_files import ShardEntry
from cohobate.teachers.store_format import Header, Text, asked_texts, data_digest, decoded
from cohobate.teachers.store_reader import Store
from cohobate.teachers.store_scoring import TextScorer, text_batch
from cohobate.teachers.store_writer import ShardJob, ShardMaker, plan_shards, write_store

TOP_K = 128


def model(vocab: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def texts(vocab: int, count: int, length: int, prompt: int) -> list[Text]:
    rng = np.random.default_rng(0)
    return [Text(sample_id=f"row {i}", ids=rng.integers(0, vocab, length), first=prompt - 1) for i in range(count)]


def header(given: Sequence[Text], vocab: int, values: Any) -> Header:
    return Header(
        teacher_config="a" * 64,
        teacher_weights="b" * 64,
        teacher_dtype="float32",
        tokenizer="c" * 64,
        merges="d" * 64,
        top_k=TOP_K,
        temperature=1.0,
        vocab_size=vocab,
        values=values,
        data=data_digest(given),
        num_texts=len(given),
        num_rows=sum(text.num_rows for text in given),
        shard_rows=65_536,
        batch_tokens=2048,
    )


def write(folder: Path, given: Sequence[Text], about: Header, score: Any) -> None:
    jobs = plan_shards(given, about.shard_rows)
    make = ShardMaker(folder=folder, header=about, num_shards=len(jobs), score=score)

    def run(missing: Sequence[ShardJob]) -> list[ShardEntry]:
        return [make(job) for job in missing]

    write_store(folder, about, jobs, run)


def bare(teacher: LocalTeacher, given: Sequence[Text], batch_tokens: int) -> None:
    rows = batch_tokens // len(given[0].ids)
    for start in range(0, len(given), rows):
        scores = teacher.score(text_batch(given[start : start + rows]))
        assert isinstance(scores, HiddenScores)
        for block in row_chunks(len(scores.hidden), 256 * 2**20 // (4 * scores.vocab_size)):
            HiddenScores(hidden=scores.hidden[block], head=scores.head).logits()


def step(student: LlamaForCausalLM, batches: Sequence[Any], scores: Sequence[Any]) -> None:
    """A student's forward and backward pass over the predictions of the batches."""
    objective = DivergenceObjective(beta=0.5)
    for batch, teacher in zip(batches, scores, strict=True):
        own = pair_scores(student, batch.student.model_inputs, batch.student.pair_index)
        objective(own, teacher, batch).terms["kd"].sum.backward()
    student.zero_grad()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="store-"))
    net = model(options.vocab, options.layers)
    teacher = LocalTeacher(net)
    given = texts(options.vocab, options.texts, options.length, options.length // 4)
    predictions = sum(text.num_rows for text in given)
    score = TextScorer(teacher, top_k=TOP_K, batch_tokens=2048)
    about = {values: header(given, options.vocab, values) for values in ("exact", "compact")}
    kept = score(given)
    batches = [text_batch(given[start : start + 8]) for start in range(0, len(given), 8)]
    for values, known in about.items():
        write(folder / values, given, known, lambda _: kept)
        size = sum(path.stat().st_size for path in (folder / values).iterdir())
        print(f"bytes a prediction, {values}: {size / predictions:.1f} (K={TOP_K}, V={options.vocab})", flush=True)

    def stored() -> None:
        shutil.rmtree(folder / "new", ignore_errors=True)
        write(folder / "new", given, about["exact"], score)

    def writing_alone() -> None:
        shutil.rmtree(folder / "new", ignore_errors=True)
        write(folder / "new", given, about["exact"], lambda _: kept)

    def read(values: str) -> list[Any]:
        store = Store(folder / values)  # the first touch of a shard compares its checksum
        return [joined(store, batch) for batch in batches]

    def joined(store: Store, batch: Any) -> Any:
        parts = [store.read(asked) for asked in asked_texts(batch)]
        return decoded({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, store.header)

    found = read("exact")
    ways: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(teacher, given, 2048),
        "scored": lambda: score(given),
        "stored": stored,
        "writing alone": writing_alone,
        "read exact": lambda: read("exact"),
        "read compact": lambda: read("compact"),
        "student step": lambda: step(net, batches, found),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            times[name].append(timed(way))
    shutil.rmtree(folder)
    cpu = {name: statistics.median(pair[0] for pair in pairs) for name, pairs in times.items()}
    for name, pairs in times.items():
        wall = statistics.median(pair[1] for pair in pairs)
        each = cpu[name] / predictions * 1e6
        print(f"{name:14} {cpu[name]:8.3f} s CPU  {wall:8.3f} s wall  {each:9.1f} us CPU a prediction")
    print(f"writing alone / bare:   {cpu['writing alone'] / cpu['bare']:.2%}")
    print(f"scored / bare - 1:      {cpu['scored'] / cpu['bare'] - 1:.2%} (top-K and normaliser)")
    print(f"stored / bare - 1:      {cpu['stored'] / cpu['bare'] - 1:.2%}")
    print(f"student step / read:    {cpu['student step'] / cpu['read exact']:.0f} x")


if __name__ == "__main__":
    main()
