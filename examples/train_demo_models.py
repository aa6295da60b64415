# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's tokenizer, teacher and half-trained student from nothing, in a few minutes on one core.

    python examples/train_demo_models.py --out /tmp/demo-models

The teacher is trained until it adds nearly without fault. The student is stopped on the slope: such models go from 0
to 90 % within a few hundred steps, so it is checked every 25. Both meet wrong totals and learn to go on from what
stands, and have a sound opinion on a student's slips. Half of the student's rows show a worked solution before the
question: with one in sight, it is the teacher of self-distillation. These rows also teach it early to copy numbers, so
what it lacks on the slope is the adding. What is kept is a running average of the weights: it lacks the noise of the
last steps, which any gentle training would take away and call its gain. Training never meets a problem of the demo's
own splits (`task.split_of`).
"""

import argparse
import copy
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from cohobate.demo import task

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one model is made."""

    hidden_size: int
    num_layers: int
    num_heads: int
    learning_rate: float
    batch_size: int
    max_steps: int
    stop_at: float  # exact match, without a solution shown, at which training ends
    shown_share: float  # share of rows that show the worked solution before the question
    slip_rate: float  # share of a total's digits written wrong
    seed: int
    check_every: int
    decay: bool  # linear decay of the learning rate to nothing over max_steps
    average: float = 0.98  # of the running average of the weights, which is what is checked and kept


PLANS = {
    "teacher": Plan(
        hidden_size=96, num_layers=3, num_heads=4, learning_rate=2e-3, batch_size=64,
        max_steps=2500, stop_at=0.99, shown_share=0.0, slip_rate=0.03, seed=1, check_every=100, decay=True,
    ),
    "student": Plan(
        hidden_size=64, num_layers=2, num_heads=4, learning_rate=1e-3, batch_size=64,
        max_steps=3000, stop_at=0.28, shown_share=0.5, slip_rate=0.03, seed=2, check_every=25, decay=False,
    ),
}  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id a character: byte-level BPE without a single merge, so that id -> bytes is plain to every reader."""
    vocab = {token: i for i, token in enumerate([*SPECIAL.values(), *task.CHARACTERS])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=SPECIAL["unk_token"]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=128, clean_up_tokenization_spaces=False, padding_side="left", **SPECIAL
    )


def make_model(plan: Plan, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(plan.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden_size,
        intermediate_size=3 * plan.hidden_size,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=plan.num_heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.02 if plan.num_layers > 2 else 0.04,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def slip(digit: str, rng: random.Random) -> str:
    """Another digit, half of the time a neighbour, as a half-trained model might write it."""
    step = rng.choice((1, 9)) if rng.random() < 0.5 else rng.randrange(1, 10)
    return str((int(digit) + step) % 10)


def work_with_slips(numbers: list[int], rate: float, rng: random.Random) -> tuple[str, str]:
    """Work with wrong digits in its totals, and what should have stood at each of its positions ("$" is the end)."""
    written = right = str(numbers[0])
    total = numbers[0]
    for number in numbers[1:]:
        step, due = f"+{number}=", str(total + number)
        got = "".join(slip(digit, rng) if rng.random() < rate else digit for digit in due)
        written, right, total = written + step + got, right + step + due, int(got)
    return written, right + "$"


def example(row: dict, shown: bool, plan: Plan, rng: random.Random) -> tuple[str, str, str]:
    """(prefix, written, right) of one problem, worked in a fresh order.

    Most shown solutions are this very work, marked; the others are in another order, so that a reader who has left the
    shown path does not insist on it.
    """
    numbers = [int(number) for number in row["prompt"].rstrip(":").split(",")]
    rng.shuffle(numbers)
    written, right = work_with_slips(numbers, plan.slip_rate, rng)
    if not shown:
        return row["prompt"], written, right
    privileged = task.marked(row, written) if rng.random() < 0.7 else row["solution"]
    return task.shown_prompt(privileged, row["prompt"]), written, right


def encode_batch(tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str, str]]) -> tuple[Tensor, Tensor]:
    """(prefix, written, right) rows -> right-padded `input_ids` and `labels` [B, T].

    The label stands at the position that predicts it: no shift is left to do. -100 where nothing is learned.
    """
    vocab = tokenizer.get_vocab() | {"$": tokenizer.eos_token_id}
    width = max(len(prefix) + len(written) for prefix, written, _ in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (prefix, written, right) in enumerate(rows):
        text = [vocab[character] for character in prefix + written]
        ids[i, : len(text)] = torch.tensor(text)
        start = len(prefix) - 1
        labels[i, start : start + len(right)] = torch.tensor([vocab[character] for character in right])
    return ids, labels


def training_step_loss(model: LlamaForCausalLM, groups: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean cross-entropy in nats over the learned tokens. Right padding needs no mask in a causal model."""
    total, count = torch.zeros(()), 0
    for ids, labels in groups:
        logits = model(input_ids=ids).logits
        total = total + cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
    return total / count


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[dict], shown: bool) -> float:
    """Exact match of greedy answers, with or without the worked solution in sight."""
    prompts = [task.shown_prompt(r["solution"], r["prompt"]) if shown else r["prompt"] for r in problems]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    out = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
        max_new_tokens=task.MAX_NEW_TOKENS, do_sample=False,
    )  # fmt: skip
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(task.grade(row, text) for text, row in zip(texts, problems, strict=True)) / len(problems)


def train(
    name: str, plan: Plan, tokenizer: PreTrainedTokenizerFast, keep: Path | None
) -> tuple[LlamaForCausalLM, list[dict]]:
    """The averaged model, and what was found at every check."""
    model = make_model(plan, tokenizer)
    averaged = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.0)
    problems = iter(task.rows("pretrain", plan.batch_size * plan.max_steps, seed=plan.seed))
    check = task.rows("pretrain", 200, seed=-1 - plan.seed)
    rng = random.Random(plan.seed)
    num_shown = round(plan.shown_share * plan.batch_size)
    began, log = time.perf_counter(), []
    for step in range(1, plan.max_steps + 1):
        groups = [
            encode_batch(tokenizer, [example(next(problems), shown, plan, rng) for _ in range(n)])
            for shown, n in ((True, num_shown), (False, plan.batch_size - num_shown))
            if n
        ]
        rate = plan.learning_rate * min(1.0, step / 50)
        if plan.decay:
            rate *= 1 - step / plan.max_steps
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = training_step_loss(model, groups)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - plan.average)
        if step % plan.check_every == 0:
            entry = {"step": step, "loss": round(loss.item(), 4), "plain": accuracy(averaged, tokenizer, check, False)}
            if num_shown:
                entry["shown"] = accuracy(averaged, tokenizer, check, True)
            entry["seconds"] = round(time.perf_counter() - began, 1)
            log.append(entry)
            print(name, json.dumps(entry), flush=True)
            if keep:
                averaged.save_pretrained(keep / f"{name}-{step}")
            if entry["plain"] >= plan.stop_at:
                break
    return averaged, log


def model_card(name: str, plan: Plan, found: dict[str, float], log: list[dict]) -> str:
    """What a person needs to know who finds the weights: what they are, how they were made, how good they are."""
    lines = [
        "---", "license: apache-2.0", "library_name: transformers", "---", "",
        f"# Cohobate demo {name}", "",
        f"A Llama of {plan.num_layers} layers and hidden size {plan.hidden_size}, one token a character, that adds up",
        "four two-digit numbers step by step. It ships with Cohobate for `cohobate demo` and is of no other use.", "",
        f"Trained from nothing by `examples/train_demo_models.py`, seed {plan.seed}: {log[-1]['step']} steps of",
        f"{plan.batch_size} generated problems, AdamW at {plan.learning_rate:g}; kept is the running average of the",
        f"weights ({plan.average:g}). {plan.slip_rate:.0%} of the digits of written totals were wrong, to learn how",
        f"to go on from such. {plan.shown_share:.0%} of the rows showed a worked solution before the question.", "",
        "| greedy answers, 500 held-out problems | right |", "|---|---|",
        *(f"| {what} | {share:.1%} |" for what, share in found.items()), "",
        "The last checks of training, on 200 problems of the training distribution:", "",
        "| step | right |", "|---|---|",
        *(f"| {entry['step']} | {entry['plain']:.1%} |" for entry in log[-8:]), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for teacher/ and student/")
    parser.add_argument("--only", choices=sorted(PLANS), help="train only this one")
    parser.add_argument("--keep", type=Path, help="folder for a copy of the model at every check")
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    for name, plan in PLANS.items():
        if args.only in (None, name):
            model, log = train(name, plan, tokenizer, args.keep)
            model.save_pretrained(args.out / name)
            tokenizer.save_pretrained(args.out / name)
            heldout = task.rows("heldout", 500)
            found = {"question alone": accuracy(model, tokenizer, heldout, False)}
            if plan.shown_share:
                found["with the worked solution shown"] = accuracy(model, tokenizer, heldout, True)
            (args.out / name / "README.md").write_text(model_card(name, plan, found, log), encoding="utf-8")


if __name__ == "__main__":
    main()
