# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Callable

import pytest
import torch

from cohobate.errors import ConfigError, VocabularyMismatch
from cohobate.functional.scores import DenseScores, HiddenScores, OutputHead, SampledScores, TopKScores, top_k_scores
from cohobate.objectives import DivergenceObjective, pair_divergences
from functional.memory import NewMemory

from .cases import (
    VOCAB,
    batch_of,
    check_empty,
    check_split_invariance,
    dense_of,
    dense_scores,
    entropy_of,
    generalized,
    hidden_scores,
    kl,
    metric_value,
    near,
    rows_of,
    softmax,
)


def as_hidden(scores: DenseScores) -> HiddenScores:
    """The same prediction as hidden states that an identity head reads out."""
    identity = torch.eye(scores.vocab_size, dtype=scores.dense.dtype)
    return HiddenScores(hidden=scores.dense, head=OutputHead(weight=identity))


def as_top_k(teacher: HiddenScores, k: int, temperature: float = 1.0) -> TopKScores:
    logits = teacher.logits().detach()
    return top_k_scores(logits, torch.zeros(logits.shape[0], dtype=torch.int64), k, temperature=temperature)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("form", ["hidden", "dense", "hidden student", "dense student"])
def test_the_loss_is_the_weighted_sum_of_each_pairs_divergence(beta: float, temperature: float, form: str):
    batch = batch_of([3, 0, 2])
    student, teacher = hidden_scores(5, 1), hidden_scores(5, 2)
    s = student if form in ("hidden", "hidden student") else dense_of(student)
    t = teacher if form in ("hidden", "dense student") else dense_of(teacher)
    out = DivergenceObjective(beta=beta, temperature=temperature)(s, t, batch)
    pairs = zip(rows_of(student, temperature), rows_of(teacher, temperature), strict=True)
    expected = [generalized(p, q, beta) * w for (p, q), w in zip(pairs, batch.weights.tolist(), strict=True)]
    assert near(out.terms["kd"].sum, sum(expected))
    assert out.terms["kd"].count == "pairs"
    assert out.pair_loss is not None
    assert all(near(a, b) for a, b in zip(out.pair_loss, expected, strict=True))


@pytest.mark.parametrize("dense", [False, True])
def test_the_metrics_are_unweighted_means_over_pairs_at_the_objectives_temperature(dense: bool):
    batch = batch_of([2, 3])
    student, teacher = hidden_scores(5, 1), hidden_scores(5, 2)
    inputs = (dense_of(student), dense_of(teacher)) if dense else (student, teacher)
    out = DivergenceObjective(beta=0.3, temperature=1.7)(*inputs, batch)
    p, q = rows_of(student, 1.7), rows_of(teacher, 1.7)
    both = list(zip(p, q, strict=True))
    expected = {
        "kl/forward": sum(kl(t, s) for s, t in both) / 5,
        "kl/reverse": sum(kl(s, t) for s, t in both) / 5,
        "entropy/student": sum(map(entropy_of, p)) / 5,
        "entropy/teacher": sum(map(entropy_of, q)) / 5,
        "top1_agreement": sum(s.index(max(s)) == t.index(max(t)) for s, t in both) / 5,
    }
    assert set(out.metrics) == set(expected)
    for name, value in expected.items():
        assert near(metric_value(out, name), value), name
        assert not out.metrics[name].sum.requires_grad


def test_micro_batches_add_up_to_the_whole():
    check_split_invariance(DivergenceObjective(beta=0.1), hidden_scores(9, 1, grad=True), hidden_scores(9, 2))


def test_the_dense_path_has_the_gradient_of_the_hidden_path():
    batch = batch_of([4, 2])
    teacher = hidden_scores(6, 2)
    student = hidden_scores(6, 1, grad=True)
    leaves = [student.hidden, student.head.weight, student.head.bias]
    objective = DivergenceObjective(beta=0.9, temperature=0.8)
    fused = torch.autograd.grad(objective(student, teacher, batch).terms["kd"].sum, leaves)
    plain = torch.autograd.grad(objective(student, dense_of(teacher), batch).terms["kd"].sum, leaves)
    torch.testing.assert_close(fused, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["hidden", "dense", "top_k"])
def test_the_gradient_reaches_the_student_only(kind: str):
    batch = batch_of([3])
    student, teacher = hidden_scores(3, 1, grad=True), hidden_scores(3, 2, grad=True)
    dense = DenseScores(dense=teacher.logits().detach().requires_grad_())
    scores = {"hidden": teacher, "dense": dense, "top_k": as_top_k(teacher, 3)}[kind]
    DivergenceObjective()(student, scores, batch).terms["kd"].sum.backward()
    for leaf in (student.hidden, student.head.weight, student.head.bias):
        assert leaf is not None
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() > 0
    for leaf in (teacher.hidden, teacher.head.weight, teacher.head.bias, dense.dense):
        assert leaf is not None
        assert leaf.grad is None


@pytest.mark.parametrize("kind", ["hidden", "dense", "top_k"])
def test_another_teacher_gives_another_loss(kind: str):
    batch, student = batch_of([3]), hidden_scores(3, 1)

    def loss(seed: int) -> float:
        teacher = hidden_scores(3, seed)
        scores = {"hidden": teacher, "dense": dense_of(teacher), "top_k": as_top_k(teacher, 3)}[kind]
        return float(DivergenceObjective()(student, scores, batch).terms["kd"].sum)

    assert abs(loss(2) - loss(5)) > 1e-3
    assert loss(2) == loss(2)


def test_a_teacher_that_equals_the_student_gives_exactly_zero():
    student = hidden_scores(4, 1, dtype=torch.float32)
    out = DivergenceObjective(beta=0.5)(student, student, batch_of([4]))
    assert float(out.terms["kd"].sum.detach()) == 0.0
    assert metric_value(out, "kl/forward") == metric_value(out, "kl/reverse") == 0.0
    assert metric_value(out, "top1_agreement") == 1.0


@pytest.mark.parametrize(
    "objective",
    [
        DivergenceObjective(),
        DivergenceObjective(clip="token", clip_limit=0.1),
        DivergenceObjective(clip="pointwise", clip_limit=0.1),
        DivergenceObjective(top_k=2),
        DivergenceObjective(top_k=2, top_k_of="student"),
    ],
)
def test_a_batch_without_pairs_gives_a_connected_zero(objective: DivergenceObjective):
    check_empty(objective, hidden_scores(0, 1))


@pytest.mark.parametrize("clip", [{}, {"clip": "token", "clip_limit": 0.1}, {"clip": "pointwise", "clip_limit": 0.1}])
def test_a_nan_of_the_teacher_stays_visible_in_its_own_pair(clip: dict):
    batch = batch_of([2, 2])
    teacher = hidden_scores(4, 2)
    teacher.hidden[2, 0] = math.nan
    out = DivergenceObjective(**clip)(hidden_scores(4, 1), teacher, batch)
    assert out.pair_loss is not None
    assert out.pair_loss.isnan().tolist() == [False, False, True, False]
    assert batch.sample_ids[batch.row[out.pair_loss.isnan()].item()] == "row-1"
    assert torch.isnan(out.terms["kd"].sum)


@pytest.mark.parametrize("objective", [DivergenceObjective(beta=1.0), DivergenceObjective(beta=1.0, top_k=2)])
@pytest.mark.parametrize("dense", [False, True])
def test_a_pair_of_weight_zero_adds_nothing_even_if_it_is_nan(objective: DivergenceObjective, dense: bool):
    batch = batch_of([3], weights=torch.tensor([1.0, 0.0, 1.0]))
    student, teacher = hidden_scores(3, 1, grad=True), hidden_scores(3, 2)
    teacher.hidden[1] = math.nan
    out = objective(student, dense_of(teacher) if dense else teacher, batch)
    out.terms["kd"].sum.backward()
    assert math.isfinite(float(out.terms["kd"].sum.detach()))
    assert student.head.weight.grad is not None
    assert student.head.weight.grad.isfinite().all()
    assert student.hidden.grad is not None
    assert [bool(row.any()) for row in student.hidden.grad] == [True, False, True]
    assert out.pair_loss is not None
    assert out.pair_loss.isfinite().all()


# ------------------------------------------------------------------ clipping (values worked out by hand)

CLIPPED = [
    ("none", [0.55, 0.3, 0.15], 0.0472, [-0.15, 0.10, 0.05], 0.0),
    ("token", [0.55, 0.3, 0.15], 0.0472, [-0.15, 0.10, 0.05], 0.0),
    ("token", [0.1, 0.2, 0.7], 0.05, [0.0, 0.0, 0.0], 1.0),
    ("pointwise", [0.55, 0.3, 0.15], -0.0716, [0.165, -0.11, -0.055], 1 / 3),
]


@pytest.mark.parametrize(("clip", "student", "value", "gradient", "share"), CLIPPED)
@pytest.mark.parametrize("hidden", [False, True])
def test_clipping_says_what_it_does_to_value_and_gradient(
    clip: str, student: list[float], value: float, gradient: list[float], share: float, hidden: bool
):
    s, t = dense_scores([student], grad=True), dense_scores([[0.7, 0.2, 0.1]])
    leaf = s.dense
    inputs = (as_hidden(s), as_hidden(t)) if hidden else (s, t)
    limit = None if clip == "none" else 0.05
    objective = DivergenceObjective(beta=0.0, clip=clip, clip_limit=limit)  # pyright: ignore[reportArgumentType]
    out = objective(*inputs, batch_of([1], weights=torch.ones(1)))
    assert math.isclose(float(out.terms["kd"].sum.detach()), value, abs_tol=5e-5)
    assert out.pair_loss is not None
    assert math.isclose(float(out.pair_loss[0]), value, abs_tol=5e-5)
    out.terms["kd"].sum.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[0], torch.tensor(gradient, dtype=torch.float64), atol=1e-6, rtol=0)
    if clip != "none":
        assert near(metric_value(out, "kd/clipped_share"), share)


@pytest.mark.parametrize("form", [lambda scores: scores, as_hidden])
def test_a_token_clip_counts_the_held_pair_at_its_weight(form: Callable):
    s = dense_scores([[0.1, 0.2, 0.7], [0.55, 0.3, 0.15]])
    t = dense_scores([[0.7, 0.2, 0.1]] * 2)
    objective = DivergenceObjective(beta=0.0, clip="token", clip_limit=0.05)
    out = objective(form(s), form(t), batch_of([2], weights=torch.tensor([3.0, 2.0])))
    assert near(out.terms["kd"].sum, 3 * 0.05 + 2 * kl([0.7, 0.2, 0.1], [0.55, 0.3, 0.15]))


# ------------------------------------------------------------------ top-k


def test_a_top_k_teacher_uses_the_tail_and_names_a_useless_support():
    s, t = dense_scores([[0.7, 0.2, 0.1]]), dense_scores([[0.5, 0.3, 0.2]])
    batch = batch_of([1], weights=torch.ones(1))

    def loss(**options) -> float:
        return float(DivergenceObjective(beta=0.0, **options)(s, t, batch).terms["kd"].sum)

    assert math.isclose(loss(), 0.0920, abs_tol=5e-5)
    assert math.isclose(loss(top_k=1), 0.0872, abs_tol=5e-5)
    assert math.isclose(loss(top_k=1, tail="drop"), -0.1682, abs_tol=5e-5)
    assert math.isclose(loss(top_k=2, tail="renormalize"), 0.0595, abs_tol=5e-5)
    assert near(loss(top_k=3), loss())
    with pytest.raises(ConfigError, match="identically zero"):
        DivergenceObjective(top_k=1, tail="renormalize")


@pytest.mark.parametrize("k", [1, 3, VOCAB])
def test_scores_that_arrive_as_top_k_equal_a_full_teacher_cut_to_top_k(k: int):
    batch = batch_of([4])
    student, teacher = hidden_scores(4, 1), hidden_scores(4, 2)
    arrived = DivergenceObjective(beta=0.4)(student, as_top_k(teacher, k), batch)
    cut_here = DivergenceObjective(beta=0.4, top_k=k)(student, teacher, batch)
    whole = DivergenceObjective(beta=0.4)(student, teacher, batch)
    assert near(arrived.terms["kd"].sum, float(cut_here.terms["kd"].sum))
    assert float(arrived.terms["kd"].sum) <= float(whole.terms["kd"].sum) + 1e-12
    for name in ("entropy/student", "top1_agreement"):
        assert near(metric_value(arrived, name), metric_value(whole, name)), name
    for name in ("kl/forward", "kl/reverse", "entropy/teacher"):
        assert near(metric_value(cut_here, name), metric_value(whole, name)), name
        assert metric_value(arrived, name) <= metric_value(whole, name) + 1e-12, name
        assert (k < VOCAB) or near(metric_value(arrived, name), metric_value(whole, name)), name


def test_the_metrics_of_a_top_k_teacher_are_those_of_k_ids_and_one_bucket():
    student, teacher = hidden_scores(1, 1), hidden_scores(1, 2)
    out = DivergenceObjective()(student, as_top_k(teacher, 2), batch_of([1]))
    (p,), (q,) = rows_of(student), rows_of(teacher)
    kept = sorted(range(VOCAB), key=lambda v: -q[v])[:2]
    coarse_p = [p[v] for v in kept] + [sum(p[v] for v in range(VOCAB) if v not in kept)]
    coarse_q = [q[v] for v in kept] + [sum(q[v] for v in range(VOCAB) if v not in kept)]
    assert near(metric_value(out, "kl/forward"), kl(coarse_q, coarse_p))
    assert near(metric_value(out, "kl/reverse"), kl(coarse_p, coarse_q))
    assert near(metric_value(out, "entropy/teacher"), entropy_of(coarse_q))


def test_top_k_scores_are_read_at_their_own_temperature_or_at_one():
    batch = batch_of([3])
    student, teacher = hidden_scores(3, 1), hidden_scores(3, 2)
    scores = as_top_k(teacher, 3, temperature=2.0)
    for temperature in (1.0, 2.0):
        got = DivergenceObjective(temperature=temperature)(student, scores, batch)
        want = DivergenceObjective(temperature=temperature, top_k=3)(student, teacher, batch)
        assert near(got.terms["kd"].sum, float(want.terms["kd"].sum))
    with pytest.raises(ConfigError, match=r"temperature 2\.0 and 1, not at 1\.5"):
        DivergenceObjective(temperature=1.5)(student, scores, batch)


TOP_K = [
    {"top_k": 3},
    {"top_k": 3, "tail": "renormalize", "temperature": 0.7},
    {"top_k": 1, "clip": "token", "clip_limit": 0.1},
    {"top_k": 3, "top_k_of": "student"},
    {"top_k": 3, "top_k_of": "student", "tail": "renormalize", "temperature": 0.7},
    {"top_k": 2, "top_k_of": "student", "tail": "drop", "clip": "token", "clip_limit": 0.05},
    {"tail": "bucket", "temperature": 0.7},
    {"tail": "drop"},
    {"clip": "token", "clip_limit": 0.2},
]


@pytest.mark.parametrize("options", TOP_K)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_a_hidden_student_on_a_top_k_support_equals_the_same_student_as_logits(options: dict, beta: float):
    batch, teacher = batch_of([4, 2]), hidden_scores(6, 2)
    student = hidden_scores(6, 1, grad=True)
    leaves = [student.hidden, student.head.weight, student.head.bias]
    scores = teacher if "top_k" in options else as_top_k(teacher, 3, options.get("temperature", 1.0))
    objective = DivergenceObjective(beta=beta, **options)
    fused = objective(student, scores, batch)
    plain = objective(DenseScores(dense=student.logits()), scores, batch)
    assert near(fused.terms["kd"].sum.detach(), float(plain.terms["kd"].sum.detach()))
    assert set(fused.metrics) == set(plain.metrics)
    for name in plain.metrics:
        assert near(metric_value(fused, name), metric_value(plain, name)), name
    assert fused.pair_loss is not None
    torch.testing.assert_close(fused.pair_loss, plain.pair_loss, rtol=1e-10, atol=1e-12)
    if "clip" in options:
        assert 0 < metric_value(fused, "kd/clipped_share") < 1
    got, want = (torch.autograd.grad(out.terms["kd"].sum, leaves) for out in (fused, plain))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["top_k", "dense", "pointwise", "cut", "student's"])
def test_chunks_of_rows_change_neither_loss_nor_gradient_nor_metrics(kind: str, monkeypatch: pytest.MonkeyPatch):
    batch = batch_of([3, 4])
    teacher = hidden_scores(7, 2)
    scores = {"top_k": as_top_k(teacher, 3), "dense": dense_of(teacher)}.get(kind, teacher)
    options: dict = {
        "pointwise": {"clip": "pointwise", "clip_limit": 0.05},
        "cut": {"top_k": 3},
        "student's": {"top_k": 3, "top_k_of": "student"},
    }.get(kind, {})

    def read() -> tuple:
        student = hidden_scores(7, 1, grad=True)
        out = DivergenceObjective(beta=0.3, **options)(student, scores, batch)
        out.terms["kd"].sum.backward()
        return out, student.hidden.grad, student.head.weight.grad

    whole, *expected = read()
    monkeypatch.setattr(pair_divergences, "_CHUNK_ENTRIES", 2 * VOCAB)
    chunked, *gradients = read()
    torch.testing.assert_close(chunked.terms["kd"].sum, whole.terms["kd"].sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-13)
    for name in whole.metrics:
        assert near(metric_value(chunked, name), metric_value(whole, name)), name


# ------------------------------------------------------------------ the student's top-k


def over(kept: list[int], p: list[float], tail: str) -> list[float]:
    """One side over the kept ids, by the definition of each tail."""
    inside = [p[v] for v in kept]
    if tail == "renormalize":
        return [x / sum(inside) for x in inside]
    rest = [p[v] for v in range(len(p)) if v not in kept]
    return inside + ([sum(rest)] if tail == "bucket" and rest else [])


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
@pytest.mark.parametrize("k", [1, 2, 4, VOCAB])
@pytest.mark.parametrize("form", ["hidden", "dense"])
def test_the_students_likeliest_ids_are_compared_on_both_sides(beta: float, tail: str, k: int, form: str):
    if tail == "renormalize" and k == 1:
        return
    batch = batch_of([3, 0, 2])
    student, teacher = hidden_scores(5, 1), hidden_scores(5, 2)
    objective = DivergenceObjective(beta=beta, temperature=0.7, top_k=k, top_k_of="student", tail=tail)
    sides = (student, teacher) if form == "hidden" else (dense_of(student), dense_of(teacher))
    out = objective(*sides, batch)
    expected = []
    for p, q, weight in zip(rows_of(student, 0.7), rows_of(teacher, 0.7), batch.weights.tolist(), strict=True):
        kept = sorted(range(VOCAB), key=lambda v: -p[v])[:k]
        expected.append(weight * generalized(over(kept, p, tail), over(kept, q, tail), beta))
    assert out.pair_loss is not None
    assert all(near(a, b) for a, b in zip(out.pair_loss, expected, strict=True))
    assert near(out.terms["kd"].sum, sum(expected))
    whole = DivergenceObjective(beta=beta, temperature=0.7)(student, teacher, batch)
    for name in whole.metrics:  # they are of the whole vocabulary, also the teacher's likeliest id
        assert near(metric_value(out, name), metric_value(whole, name)), name
    if k == VOCAB:
        assert near(out.terms["kd"].sum, float(whole.terms["kd"].sum))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_students_top_k_passes_gradcheck_and_the_choice_has_no_gradient(beta: float):
    student, teacher, batch = hidden_scores(3, 1, grad=True), hidden_scores(3, 2), batch_of([3])
    objective = DivergenceObjective(beta=beta, top_k=3, top_k_of="student")

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        head = OutputHead(weight=weight, bias=student.head.bias, scale=0.7, softcap=3.0)
        return objective(HiddenScores(hidden=hidden, head=head), teacher, batch).terms["kd"].sum

    assert torch.autograd.gradcheck(loss, (student.hidden, student.head.weight))


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_with_every_id_kept_the_students_top_k_has_the_gradient_of_the_full_divergence(tail):
    student, teacher, batch = hidden_scores(6, 1, grad=True), hidden_scores(6, 2), batch_of([6])
    leaves = [student.hidden, student.head.weight]
    kept = DivergenceObjective(beta=0.4, top_k=VOCAB, top_k_of="student", tail=tail)(student, teacher, batch)
    whole = DivergenceObjective(beta=0.4)(student, teacher, batch)
    got, want = (torch.autograd.grad(out.terms["kd"].sum, leaves) for out in (kept, whole))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_the_two_sides_choices_differ_and_the_bucket_keeps_either_below_the_full_divergence():
    student, teacher, batch = hidden_scores(9, 1), hidden_scores(9, 2), batch_of([9])

    def loss(**options) -> float:
        return float(DivergenceObjective(beta=0.5, **options)(student, teacher, batch).terms["kd"].sum)

    by_student, by_teacher = loss(top_k=2, top_k_of="student"), loss(top_k=2)
    assert abs(by_student - by_teacher) > 1e-3
    assert max(by_student, by_teacher) <= loss() + 1e-12


@pytest.mark.parametrize("form", [lambda scores: scores, as_hidden])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_ids_that_the_student_finds_equally_likely_the_lower_is_kept(form: Callable, dtype: torch.dtype):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]], dtype=dtype)
    teacher = dense_scores([[0.1, 0.2, 0.3, 0.25, 0.15]])
    out = DivergenceObjective(beta=0.0, top_k=2, top_k_of="student")(
        form(DenseScores(dense=logits)), form(teacher), batch_of([1], weights=torch.ones(1), vocab=5)
    )
    p, q = softmax([0.0, 2.0, 1.0, 2.0, 2.0]), [0.1, 0.2, 0.3, 0.25, 0.15]
    assert near(out.terms["kd"].sum, kl(over([1, 3], q, "bucket"), over([1, 3], p, "bucket")), rel=1e-5)


def test_more_ids_than_there_are_is_refused_with_both_numbers():
    for form in (lambda scores: scores, dense_of):
        sides = form(hidden_scores(2, 1)), form(hidden_scores(2, 2))
        for side in ("teacher", "student"):
            with pytest.raises(ConfigError, match=f"top_k={VOCAB + 1} is more than the {VOCAB} ids"):
                DivergenceObjective(top_k=VOCAB + 1, top_k_of=side)(*sides, batch_of([2]))


def test_the_students_top_k_never_makes_all_logits(monkeypatch: pytest.MonkeyPatch):
    """With 64 rows of 512 ids read 4 rows at a time, no operation makes a tensor of half the logits."""
    monkeypatch.setattr(pair_divergences, "_CHUNK_ENTRIES", 4 * 512)
    fused = pair_divergences.fused_linear_topk
    monkeypatch.setattr(pair_divergences, "fused_linear_topk", lambda *a, **k: fused(*a, **k, chunk_size=4))
    g = torch.Generator().manual_seed(0)
    hidden, weight, other = (torch.randn(n, 4, generator=g) for n in (64, 512, 64))
    student = HiddenScores(hidden=hidden.requires_grad_(), head=OutputHead(weight=weight.requires_grad_()))
    teacher = HiddenScores(hidden=other, head=OutputHead(weight=weight.detach()))
    batch = batch_of([64], vocab=512)
    with NewMemory(hidden, weight, other) as memory:
        out = DivergenceObjective(top_k=8, top_k_of="student")(student, teacher, batch)
        out.terms["kd"].sum.backward()
    assert memory.sizes
    assert memory.larger_than(32 * 512 * 4) == 0


# ------------------------------------------------------------------ what is refused


def test_options_that_cannot_apply_shrink_what_the_objective_accepts():
    assert set(DivergenceObjective().accepts) == {HiddenScores, DenseScores, TopKScores}
    assert set(DivergenceObjective(top_k=4).accepts) == {HiddenScores, DenseScores}
    assert set(DivergenceObjective(clip="pointwise", clip_limit=1.0).accepts) == {HiddenScores, DenseScores}
    assert DivergenceObjective(tail="drop").accepts == (TopKScores,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, r"beta must be in \[0, 1\].*1\.5"),
        ({"beta": math.nan}, "beta must be"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"clip": "entry", "clip_limit": 1.0}, "'entry'"),
        ({"clip": "token"}, "give both"),
        ({"clip_limit": 1.0}, "give both"),
        ({"clip": "token", "clip_limit": 0.0}, "without gradient"),
        ({"top_k": 0}, "top_k must be"),
        ({"top_k": 3, "top_k_of": "both"}, "'teacher' or 'student', got 'both'"),
        ({"top_k_of": "student"}, "without top_k chooses nothing"),
        ({"top_k": 1, "top_k_of": "student", "tail": "renormalize"}, "identically zero"),
        ({"tail": "ignore"}, "'ignore'"),
        ({"clip": "pointwise", "clip_limit": 1.0, "top_k": 3}, "every vocabulary entry"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_made(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DivergenceObjective(**options)


def test_scores_that_do_not_belong_to_the_batch_are_refused():
    batch = batch_of([3])
    objective = DivergenceObjective()
    with pytest.raises(ConfigError, match="got SampledScores"):
        objective(hidden_scores(3, 1), SampledScores(logprobs=torch.zeros(3)), batch)
    with pytest.raises(ConfigError, match="got NoneType"):
        objective(hidden_scores(3, 1), None, batch)
    with pytest.raises(
        ValueError, match=r"the teacher scored 4 pairs but the batch has 3.*batch\.teacher\.pair_index"
    ):
        objective(hidden_scores(3, 1), hidden_scores(4, 2), batch)
    with pytest.raises(ValueError, match="the student scored 2 pairs"):
        objective(hidden_scores(2, 1), hidden_scores(3, 2), batch)
    wide = DenseScores(dense=torch.zeros(3, VOCAB + 1))
    with pytest.raises(VocabularyMismatch, match=f"student predicts {VOCAB} ids, the teacher {VOCAB + 1}"):
        objective(hidden_scores(3, 1), wide, batch)
