# SPDX-License-Identifier: Apache-2.0
"""The teaching experiment of alignment: the same loss, the same data, and one slice that is right or wrong.

There is no network. The student is a table of logits, one categorical distribution for each position of three rows, so
nothing generalises and nothing can make up for a wrong position. Prompts and responses have unequal lengths, and the
teacher's prompts are longer than the student's by a different amount in each row, as with privileged context.

Both runs minimise the same forward KL to the same teacher, which is nearly certain of every next token. One cuts each
row where its own response is predicted (`align_rollout_logits`). The other cuts all rows where the longest prompt
ends, which is what most first versions do. Its loss falls just as nicely. The number that tells them apart is the
probability of the correct token at the actual response positions.

    python examples/categorical_alignment.py [PLOT.png]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cohobate import align_rollout_logits, forward_kl
from cohobate.errors import MissingExtra

VOCABULARY = 12
STUDENT_PROMPTS = [2, 5, 3]
TEACHER_PROMPTS = [4, 6, 9]
RESPONSES = [[3, 7, 1, 4, 8], [5, 2, 9], [6, 10, 3, 11]]

Cut = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Curve:
    """What one run did, step by step; `final` holds the last probability of every response token, row by row."""

    loss: list[float]
    mean_probability: list[float]
    final: list[list[float]]


def right_padded(prompts: Sequence[int], seed: int) -> Tensor:
    """`[B, L]` ids: random prompts of the given lengths, the responses behind them, 0 as padding after that."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [*torch.randint(1, VOCABULARY, (prompt,), generator=generator).tolist(), *response]
        for prompt, response in zip(prompts, RESPONSES, strict=True)
    ]
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def certain_of_the_next(ids: Tensor) -> Tensor:
    """`[B, L, V]` logits with 99.95 % on the id in the next column; the last column predicts nothing in particular."""
    logits = torch.zeros(*ids.shape, VOCABULARY)
    logits[:, :-1].scatter_(-1, ids[:, 1:, None], 10.0)
    return logits


def cut_by_row(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every row from its own prompt's last position on."""
    lengths = [len(response) for response in RESPONSES]
    return align_rollout_logits(student, teacher, STUDENT_PROMPTS, TEACHER_PROMPTS, lengths)


def cut_at_the_longest_prompt(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The classic mistake: all rows from the longest prompt's last position on, each side with its own longest."""
    longest = max(len(response) for response in RESPONSES)
    start, teacher_start = max(STUDENT_PROMPTS) - 1, max(TEACHER_PROMPTS) - 1
    width = min(longest, student.shape[1] - start, teacher.shape[1] - teacher_start)
    mask = torch.arange(width) < torch.tensor([[len(response)] for response in RESPONSES])
    return student[:, start : start + width], teacher[:, teacher_start : teacher_start + width], mask


def probability_of_the_response(logits: Tensor) -> list[list[float]]:
    """The student's probability of every correct token, read row by row in plain Python: the judge of both runs."""
    probability = logits.detach().softmax(-1)
    return [
        [probability[row, prompt - 1 + j, token].item() for j, token in enumerate(response)]
        for row, (prompt, response) in enumerate(zip(STUDENT_PROMPTS, RESPONSES, strict=True))
    ]


def train(cut: Cut, *, steps: int = 120, learning_rate: float = 0.2, seed: int = 0) -> Curve:
    """Gradient descent (Adam) on the mean forward KL over the tokens that `cut` selects."""
    student_ids, teacher_ids = right_padded(STUDENT_PROMPTS, seed), right_padded(TEACHER_PROMPTS, seed + 1)
    teacher_logits = certain_of_the_next(teacher_ids)
    noise = torch.randn(*student_ids.shape, VOCABULARY, generator=torch.Generator().manual_seed(seed + 2))
    student_logits = nn.Parameter(0.1 * noise)
    optimizer = torch.optim.Adam([student_logits], lr=learning_rate)
    loss_curve, probability_curve = [], []
    for _ in range(steps):
        student, teacher, mask = cut(student_logits, teacher_logits)
        divergence = forward_kl(student.log_softmax(-1), teacher.log_softmax(-1))
        loss = divergence[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct = [p for row in probability_of_the_response(student_logits) for p in row]
        loss_curve.append(loss.item())
        probability_curve.append(sum(correct) / len(correct))
    return Curve(loss_curve, probability_curve, probability_of_the_response(student_logits))


def report(name: str, curve: Curve) -> str:
    rows = "  ".join("[" + " ".join(f"{p:.2f}" for p in row) + "]" for row in curve.final)
    loss = f"loss {curve.loss[0]:.2f} -> {curve.loss[-1]:.2f}"
    return f"{name:<26} {loss}   p(correct) {curve.mean_probability[-1]:.3f}   {rows}"


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Loss and probability over the steps, and the last probability of every response token; written to `path`."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingExtra("The plot needs matplotlib: pip install 'cohobate[plots]'.") from error
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    names = [f"row {row}, token {j}" for row, response in enumerate(RESPONSES) for j in range(len(response))]
    height = 0.8 / len(curves)
    for k, (name, curve) in enumerate(curves.items()):
        style = "-" if k == 0 else "--"  # the two losses lie on each other
        left.plot(curve.loss, style, label=name)
        middle.plot(curve.mean_probability, style, label=name)
        final = [p for row in curve.final for p in row]
        right.barh([i + k * height for i in range(len(final))], final, height=height, label=name)
    left.set(title="what is minimised", xlabel="step", ylabel="forward KL (nats per token)")
    middle.set(title="what is wanted", xlabel="step", ylabel="mean p(correct token)", ylim=(0, 1.02))
    right.set(title="after training", xlabel="p(correct token)", xlim=(0, 1.02), yticks=range(len(names)))
    right.set_yticklabels(names, fontsize=7)
    right.invert_yaxis()
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, Curve]:
    parser = argparse.ArgumentParser(description="Train categorical logits with aligned and with misaligned slices.")
    parser.add_argument(
        "plot", nargs="?", type=Path, default=Path("runs/categorical_alignment.png"), help="PNG to write"
    )
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args(arguments)
    curves = {
        "each row by itself": train(cut_by_row, steps=options.steps),
        "all at the longest prompt": train(cut_at_the_longest_prompt, steps=options.steps),
    }
    print("Probability of the correct token at the actual response positions, three rows:")
    for name, curve in curves.items():
        print(report(name, curve))
    draw(curves, options.plot)
    print(f"plot: {options.plot}")
    return curves


if __name__ == "__main__":
    main()
