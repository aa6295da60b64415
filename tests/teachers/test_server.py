# SPDX-License-Identifier: Apache-2.0
"""Scores that come from a server are those of the model behind it, or there are none."""

import math
import random
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

import tiny
import tiny_bpe
from cohobate.align import AlignedBatch, AlignedSide, align_tokens
from cohobate.align.rollout import TeacherSide
from cohobate.errors import ConfigError, DataError, ServerResponseError, ServerUnreachable
from cohobate.functional.common_support import common_support_divergence
from cohobate.functional.scores import HiddenScores, OutputHead, SampledScores, TopKScores
from cohobate.objectives import DivergenceObjective, PolicyGradientObjective
from cohobate.teachers import LocalTeacher, OwnTokenizerTeacher, ServerTeacher, SeveralTeachers
from cohobate.teachers.server_support import server_support
from cohobate.vocab.subtokens import SubtokenTables
from fake_server import FakeServer, json_response, refusal
from server_faults import PASSING, RESTARTS, Case, dies, fatal, schedule, status

VOCAB = 23
MODEL, OTHER = tiny.llama(3), tiny.llama(4)


def ragged_batch(lengths: list[tuple[int, int]], *, left_padded: bool = True, seed: int = 0) -> AlignedBatch:
    """Rows of `(prompt, completion)` tokens; the teacher reads the same rows with two more tokens before them."""
    draw = random.Random(seed)
    rows = [([draw.randrange(2, VOCAB) for _ in range(p + c)], p) for p, c in lengths]
    student = _side([(ids, p) for ids, p in rows], left_padded=False)
    teacher = _side([([4, 5, *ids], p + 2) for ids, p in rows], left_padded=left_padded)
    targets = [t for ids, p in rows for t in ids[p:]]
    row = [r for r, (ids, p) in enumerate(rows) for _ in ids[p:]]
    return AlignedBatch(
        student=student,
        teacher=teacher,
        target_ids=torch.tensor(targets, dtype=torch.int64),
        weights=torch.ones(len(targets)),
        row=torch.tensor(row, dtype=torch.int64),
        is_sampled=torch.ones(len(rows), dtype=torch.bool),
        sample_ids=tuple(f"row-{r}" for r in range(len(rows))),
    )


def _side(rows: list[tuple[list[int], int]], *, left_padded: bool) -> AlignedSide:
    width = max(len(ids) for ids, _ in rows) + 1  # a column of padding even for the longest
    ids, mask, index = torch.zeros((len(rows), width), dtype=torch.int64), [], []
    for r, (own, prompt) in enumerate(rows):
        start = width - len(own) if left_padded else 0
        ids[r, start : start + len(own)] = torch.tensor(own)
        mask.append([int(start <= c < start + len(own)) for c in range(width)])
        index += [r * width + start + t - 1 for t in range(prompt, len(own))]
    attention = torch.tensor(mask)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": positions}
    return AlignedSide(model_inputs=inputs, pair_index=torch.tensor(index, dtype=torch.int64))


LENGTHS = [(3, 4), (1, 1), (5, 0), (2, 7), (4, 2)]


def local_logprobs(batch: AlignedBatch, model: Any = MODEL) -> Tensor:
    """`[N, V]` float64 log-probabilities of the teacher side, row by row, without any padding."""
    side, found = batch.teacher, []
    width = side.model_inputs["input_ids"].shape[1]
    for index in side.pair_index.tolist():
        r, column = divmod(index, width)
        seen = side.model_inputs["attention_mask"][r, : column + 1].bool()
        ids = side.model_inputs["input_ids"][r, : column + 1][seen]
        with torch.no_grad():
            found.append(model(ids[None]).logits[0, -1].double().log_softmax(-1))
    return torch.stack(found) if found else torch.zeros(0, VOCAB, dtype=torch.float64)


def teacher_of(server: FakeServer, **options: Any) -> ServerTeacher:
    options = {"vocab_size": VOCAB, "rows_per_request": 2} | options
    return ServerTeacher("http://localhost:8000", surroundings=server.surroundings, **options)


def student_scores(num_pairs: int, seed: int = 9) -> HiddenScores:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_pairs, 6, generator=draw).requires_grad_()
    weight = torch.randn(VOCAB, 6, generator=draw).requires_grad_()
    return HiddenScores(hidden=hidden, head=OutputHead(weight=weight))


def loss_of(objective: Any, scores: Any, batch: AlignedBatch) -> list[Tensor]:
    """The loss and the gradients of a fixed student's hidden states and head."""
    student = student_scores(batch.num_pairs)
    loss = sum(term.sum for term in objective(student, scores, batch).terms.values())
    loss.backward()
    return [loss.detach(), student.hidden.grad, student.head.weight.grad]


# ------------------------------------------------------------------ what is scored


@pytest.mark.parametrize("left_padded", [True, False])
def test_the_likeliest_ids_and_their_logprobs_are_those_of_the_model(left_padded: bool):
    batch = ragged_batch(LENGTHS, left_padded=left_padded)
    wanted = local_logprobs(batch)
    scores = teacher_of(FakeServer(MODEL), top_k=4).score(batch)
    assert isinstance(scores, TopKScores)
    best = wanted.topk(4).indices.sort(-1).values
    assert torch.equal(scores.ids, best)
    torch.testing.assert_close(scores.logprobs().double(), wanted.gather(1, best), rtol=0, atol=1e-5)
    realized = wanted.gather(1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(scores.realized_logit.double(), realized, rtol=0, atol=1e-5)
    assert scores.log_normalizer.abs().max() == 0


def test_a_kept_sampled_token_takes_the_place_of_the_last_of_the_likeliest():
    batch = ragged_batch([(3, 30)])
    wanted = local_logprobs(batch)
    scores = teacher_of(FakeServer(MODEL), top_k=3, keep_sampled=True).score(batch)
    outside = 0
    for i, (row, token) in enumerate(zip(wanted.tolist(), batch.target_ids.tolist(), strict=True)):
        likeliest = sorted(range(VOCAB), key=lambda v: -row[v])
        support = likeliest[:3] if token in likeliest[:3] else [*likeliest[:2], token]
        outside += token not in likeliest[:3]
        assert scores.ids[i].tolist() == sorted(support)
        assert scores.logits[i].tolist() == pytest.approx([row[v] for v in sorted(support)], abs=1e-5)
    assert 0 < outside < 30


def test_the_token_alone_needs_no_likeliest_ids():
    batch, server = ragged_batch(LENGTHS), FakeServer(MODEL)
    wanted = local_logprobs(batch).gather(1, batch.target_ids[:, None])
    scores = teacher_of(server, top_k=1, keep_sampled=True).score(batch)
    assert torch.equal(scores.ids, batch.target_ids[:, None])
    torch.testing.assert_close(scores.logits.double(), wanted, rtol=0, atol=1e-5)
    sampled = teacher_of(server, top_k=0).score(batch)
    assert isinstance(sampled, SampledScores)
    torch.testing.assert_close(sampled.logprobs.double(), wanted[:, 0], rtol=0, atol=1e-5)
    assert {payload["prompt_logprobs"] for payload in server.asked} == {0}


def test_requests_are_the_rows_without_padding_up_to_the_last_prediction():
    batch, server = ragged_batch(LENGTHS), FakeServer(MODEL)
    teacher = teacher_of(server, top_k=2, rows_per_request=2)
    teacher.score(batch)
    canary = list(teacher.canary.asked.ids)
    sent = [prompt for payload in server.asked[1:] for prompt in payload["prompt"] if prompt != canary]
    mask, ids = batch.teacher.model_inputs["attention_mask"].bool(), batch.teacher.model_inputs["input_ids"]
    assert sorted(sent) == sorted(ids[r][mask[r]].tolist() for r in (0, 1, 3, 4))  # row 2 has an empty completion
    assert all(payload["prompt"][-1] == canary for payload in server.asked)
    assert all(payload["max_tokens"] == 1 and payload["temperature"] == 1.0 for payload in server.asked)


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_batch_without_predictions_asks_for_nothing(top_k: int):
    batch, server = ragged_batch([(3, 0), (2, 0)]), FakeServer(MODEL)
    scores = teacher_of(server, top_k=top_k).score(batch)
    assert (scores.ids.shape == (0, 3)) if isinstance(scores, TopKScores) else (scores.logprobs.shape == (0,))
    assert server.seen == []


def test_predictions_keep_the_order_of_the_batch():
    batch = ragged_batch(LENGTHS)
    order = torch.randperm(batch.num_pairs, generator=torch.Generator().manual_seed(5))
    side = replace(batch.teacher, pair_index=batch.teacher.pair_index[order])
    mixed = replace(batch, teacher=side, target_ids=batch.target_ids[order])
    teacher = teacher_of(FakeServer(MODEL), top_k=3)
    assert torch.equal(teacher.score(mixed).logits, teacher.score(batch).logits[order])


def test_a_batch_whose_rows_do_not_hold_their_targets_is_refused():
    batch = ragged_batch(LENGTHS)
    wrong = replace(batch, target_ids=(batch.target_ids + 1) % VOCAB)
    with pytest.raises(ValueError, match="'row-0' of the teacher's side does not hold the tokens"):
        teacher_of(FakeServer(MODEL)).score(wrong)


@pytest.mark.parametrize("concurrency", [1, 4, 64])
@pytest.mark.parametrize("seed", range(10))
def test_order_is_kept_whatever_the_order_of_the_answers(concurrency: int, seed: int):
    batch = ragged_batch([(2, 3)] * 12, seed=seed)
    draw, server = random.Random(seed), FakeServer(MODEL)

    def reorder(answer: dict[str, Any], payload: dict[str, Any]) -> None:
        import time

        time.sleep(draw.random() * 2e-3)
        draw.shuffle(answer["choices"])

    server.edit = reorder
    scores = teacher_of(server, top_k=3, concurrency=concurrency, rows_per_request=1 + seed % 3).score(batch)
    assert torch.equal(scores.logits, teacher_of(FakeServer(MODEL), top_k=3, concurrency=1).score(batch).logits)


def test_ids_that_the_student_lacks_are_dropped_and_the_rest_renormalised():
    shared = 20
    batch = next(
        b
        for b in (ragged_batch([(3, 6)], seed=seed) for seed in range(1000))
        if int(b.teacher.model_inputs["input_ids"].max()) < shared
    )
    wanted, dropped = local_logprobs(batch), 0
    teacher = teacher_of(FakeServer(MODEL), vocab_size=shared, head_size=VOCAB, top_k=5)
    scores = teacher.score(batch)
    for i, row in enumerate(wanted.tolist()):
        likeliest = sorted(range(VOCAB), key=lambda v: -row[v])[:8]
        foreign = [v for v in likeliest if v >= shared]
        normalizer = math.log(1 - sum(math.exp(row[v]) for v in foreign))
        support = sorted([v for v in likeliest if v < shared][:5])
        assert scores.ids[i].tolist() == support
        assert scores.logprobs()[i].tolist() == pytest.approx([row[v] - normalizer for v in support], abs=1e-5)
        dropped += len(foreign)
    assert dropped > 0
    assert teacher.dropped_mass > 0
    every = teacher_of(FakeServer(MODEL), vocab_size=shared, head_size=VOCAB, top_k=shared, temperature=0.5)
    cut = (wanted[:, :shared] / 0.5).log_softmax(-1)  # as a local head that is cut to the shared ids
    torch.testing.assert_close(every.score(batch).logprobs().double(), cut, rtol=0, atol=1e-5)
    with pytest.raises(DataError, match="likeliest shared ids are not known"):
        teacher_of(FakeServer(MODEL), vocab_size=8, head_size=VOCAB, top_k=7).score(
            replace(batch, target_ids=batch.target_ids % 8, teacher=_modulo(batch.teacher, 8))
        )


def _modulo(side: AlignedSide, num: int) -> AlignedSide:
    return replace(side, model_inputs=side.model_inputs | {"input_ids": side.model_inputs["input_ids"] % num})


def test_ids_beyond_the_vocabulary_are_an_error_unless_the_head_is_said_to_be_wider():
    with pytest.raises(ServerResponseError, match=r"predict the ids 0 to 19.*set head_size"):
        teacher_of(FakeServer(MODEL), vocab_size=20, top_k=5).score(ragged_batch([(3, 6)]))


def test_another_temperature_is_exact_from_all_ids_and_refused_from_fewer():
    batch = ragged_batch(LENGTHS)
    scores = teacher_of(FakeServer(MODEL), top_k=VOCAB, temperature=2.0).score(batch)
    wanted = (local_logprobs(batch) / 2).log_softmax(-1)
    torch.testing.assert_close(scores.logprobs().double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.logprobs(1.0).double(), local_logprobs(batch), rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match=r"temperature=2.0 needs all log-probabilities"):
        teacher_of(FakeServer(MODEL), top_k=VOCAB - 1, temperature=2.0)


def test_a_batch_that_is_read_twice_is_asked_for_once():
    batch, server = ragged_batch(LENGTHS), FakeServer(MODEL)
    teacher = teacher_of(server, top_k=3)
    teacher.prefetch(batch)
    first = teacher.score(batch)
    asked = len(server.asked)
    assert torch.equal(teacher.score(batch).logits, first.logits)
    assert len(server.asked) == asked


def test_a_request_that_is_too_large_is_split_and_a_row_that_is_too_large_is_named():
    batch, server = ragged_batch([(2, 3)] * 7), FakeServer(MODEL)
    most = 3

    def always(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response | None:
        scoring = request.url.path == "/v1/completions"
        return refusal(413, "too much") if scoring and len(server.asked[-1]["prompt"]) > most else None

    server.always = always
    scores = teacher_of(server, top_k=3, rows_per_request=7, concurrency=1).score(batch)
    assert torch.equal(scores.logits, teacher_of(FakeServer(MODEL), top_k=3).score(batch).logits)
    most = 1
    with pytest.raises(DataError, match="takes no request as large as row 'row-0'"):
        teacher_of(server, top_k=3, rows_per_request=7, concurrency=1).score(batch)


def test_a_row_that_the_server_cannot_hold_is_named_before_anything_is_asked():
    server = FakeServer(MODEL, max_model_len=17)
    teacher = teacher_of(server, top_k=2)
    teacher.connect()
    with pytest.raises(DataError, match=r"'row-1' has 17 tokens .* needs 18 places .* max_model_len is 17"):
        teacher.score(ragged_batch([(3, 2), (10, 5)]))
    assert len(server.asked) == 1  # the canary


# ------------------------------------------------------------------ the loss


SETTINGS = [
    {"beta": 0.0},
    {"beta": 0.0, "loss_top_k": 5},
    {"beta": 0.0, "loss_top_k": 5, "loss_add_tail": False},
    {"beta": 0.1},
    {"beta": 0.5},
    {"beta": 0.9, "loss_top_k": 3},
    {"beta": 0.5, "loss_add_tail": False},
    {"beta": 1.0},
    {"beta": 1.0, "loss_top_k": 4},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_loss_is_the_definition_over_the_support_in_plain_floats(setting: dict[str, Any]):
    batch = ragged_batch(LENGTHS)
    support = server_support(**setting)
    teacher = teacher_of(FakeServer(MODEL), top_k=support.top_k, keep_sampled=support.keep_sampled)
    objective = DivergenceObjective(beta=setting["beta"], tail=support.tail)
    loss = loss_of(objective, teacher.score(batch), batch)[0]
    student = student_scores(batch.num_pairs).logits().double().log_softmax(-1).tolist()
    wanted = 0.0
    for p, s, token in zip(local_logprobs(batch).tolist(), student, batch.target_ids.tolist(), strict=True):
        wanted += _plain_divergence(p, s, _plain_support(p, token, **setting), setting)
    assert float(loss) == pytest.approx(wanted, rel=1e-4)


def _plain_support(p: list[float], token: int, *, beta: float, loss_top_k: int = 1, **_: Any) -> list[int]:
    likeliest = sorted(range(len(p)), key=lambda v: -p[v])
    if beta == 0:
        return likeliest[:loss_top_k]
    if beta == 1 and loss_top_k == 1:
        return [token]
    return likeliest[: loss_top_k + 1] if token in likeliest[:loss_top_k] else [*likeliest[:loss_top_k], token]


def _plain_divergence(p: list[float], s: list[float], support: list[int], setting: dict[str, Any]) -> float:
    beta = setting["beta"]
    sides = []
    for side in (p, s):
        kept = [math.exp(side[v]) for v in support]
        tail = [max(1 - sum(kept), 1e-12)] if setting.get("loss_add_tail", True) else []
        total = 1.0 if tail else sum(kept)
        sides.append([x / total for x in kept] + tail)
    teacher, student = sides

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixed = [beta * x + (1 - beta) * y for x, y in zip(teacher, student, strict=True)]
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_value_and_gradient_are_those_of_a_local_teacher_at_the_same_k(beta: float):
    batch = own_tokens(ragged_batch(LENGTHS))
    local = OwnTokenizerTeacher(LocalTeacher(MODEL), tiny.char_tokenizer(), top_k=5).score(batch)
    remote = OwnTokenizerTeacher(teacher_of(FakeServer(MODEL), top_k=5), tiny.char_tokenizer()).score(batch)
    objective = DivergenceObjective(beta=beta)
    for ours, theirs in zip(loss_of(objective, remote, batch), loss_of(objective, local, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def own_tokens(batch: AlignedBatch) -> AlignedBatch:
    """The same predictions, as of a teacher that has its own tokenizer."""
    side = TeacherSide(
        model_inputs=batch.teacher.model_inputs,
        pair_index=batch.teacher.pair_index,
        target_ids=batch.target_ids,
        row=batch.row,
    )
    return replace(batch, teacher=side, teachers=(side,))


@pytest.mark.parametrize("forced_mode", ["union", "evict"])
def test_csd_with_a_server_is_csd_with_a_local_teacher_at_the_same_k(forced_mode: Any):
    student, teacher = tiny_bpe.student_tokenizer(), tiny_bpe.teacher_tokenizer()
    texts = ["12+34=46 ab", "23a=5 abc 120"]
    ids = [[tokenizer.encode(text) for text in texts] for tokenizer in (student, teacher)]
    tables, model = SubtokenTables.build(student, teacher), tiny.llama(3, vocab_size=len(teacher))
    batch = own_tokens(ragged_batch([(1, 4)]))
    for own, theirs in zip(*ids, strict=True):
        side = _side([(theirs, 1)], left_padded=True)
        targets = torch.tensor(theirs[1:])
        batch = replace(
            batch,
            teacher=TeacherSide(
                model_inputs=side.model_inputs,
                pair_index=side.pair_index,
                target_ids=targets,
                row=torch.zeros_like(targets),
            ),
        )
        remote = teacher_of(FakeServer(model, num_ids=len(teacher), max_logprobs=29), vocab_size=len(teacher), top_k=6)
        scores = [
            OwnTokenizerTeacher(LocalTeacher(model), teacher, top_k=6).score(batch),
            OwnTokenizerTeacher(remote, teacher).score(batch),
        ]
        chunks = align_tokens(student, own, teacher, theirs)
        results = []
        for found in scores:
            assert isinstance(found, TopKScores)
            logits = torch.randn(len(own), len(student), generator=torch.Generator().manual_seed(2)).requires_grad_()
            padded = {f.name: _one_more(getattr(found, f.name)) for f in fields(found)}  # a text's last row
            output = common_support_divergence(
                logits,
                torch.tensor(own),
                TopKScores(**padded),
                torch.tensor(theirs),
                chunks,
                tables,
                forced_mode=forced_mode,
            )
            output.divergence.sum().backward()
            results.append((output.divergence.detach(), logits.grad))
        assert results[0][0].sum() > 0
        for ours, wanted in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def _one_more(value: Any) -> Any:
    return torch.cat([value, value[-1:]]) if isinstance(value, Tensor) else value


def test_the_policy_gradient_takes_the_token_alone():
    batch = ragged_batch(LENGTHS)
    remote = loss_of(PolicyGradientObjective(), teacher_of(FakeServer(MODEL), top_k=0).score(batch), batch)
    local = loss_of(PolicyGradientObjective(), LocalTeacher(MODEL).score(batch), batch)
    for ours, theirs in zip(remote, local, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"beta": 0.0, "loss_top_k": 0}, "loss_top_k must be at least 1"),
        ({"beta": 0.0, "loss_add_tail": False}, "identically zero"),
        ({"beta": 1.0, "loss_add_tail": False}, "identically zero"),
        ({"beta": 0.5, "reverse_kl_top_1_mode": "argmax"}, "student's likeliest token, but .*silently ignores"),
        ({"beta": 0.5, "reverse_kl_top_1_mode": "first"}, "'sampled' or 'argmax'"),
        ({"beta": 1.5}, "beta"),
    ],
)
def test_settings_without_a_loss_are_refused(setting: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        server_support(**setting)


# ------------------------------------------------------------------ 63 faults, three objectives, two ways of asking

FAULTS = PASSING + RESTARTS + fatal(OTHER)
LOSSES = {"forward": (0.0, 3), "jsd": (0.5, 1), "reverse": (1.0, 3)}
BATCH = ragged_batch([(1 + r % 3, 1 + r % 4) for r in range(24)], seed=1)
CLEAN: dict[str, list[Tensor]] = {}


def scored(server: FakeServer, loss: str, *, prefetched: bool = False) -> list[Tensor]:
    beta, loss_top_k = LOSSES[loss]
    support = server_support(beta=beta, loss_top_k=loss_top_k)
    teacher = teacher_of(
        server, top_k=support.top_k, keep_sampled=support.keep_sampled, rows_per_request=1, concurrency=4
    )
    try:
        if prefetched:
            teacher.prefetch(BATCH)
        return loss_of(DivergenceObjective(beta=beta, tail=support.tail), teacher.score(BATCH), BATCH)
    finally:
        teacher.close()


def test_there_are_63_faults_of_which_31_stop_a_run():
    assert (len(PASSING), len(RESTARTS), len(FAULTS)) == (12, 20, 63)
    assert len({case.name for case in FAULTS}) == 63


@pytest.mark.parametrize("prefetched", [False, True], ids=["sync", "prefetch"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_a_fault_leaves_no_trace_or_stops_the_run(case: Case, loss: str, prefetched: bool):
    if loss not in CLEAN:
        CLEAN[loss] = scored(FakeServer(MODEL), loss)
    server = FakeServer(MODEL)
    case.set_up(server)
    started = server.clock()
    if case.error is None:
        found = scored(server, loss, prefetched=prefetched)
        assert all(torch.equal(a, b) for a, b in zip(found, CLEAN[loss], strict=True))
    else:
        with pytest.raises(case.error, match=case.says) as caught:
            scored(server, loss, prefetched=prefetched)
        assert not isinstance(caught.value, ServerUnreachable)
        assert "localhost:8000" in str(caught.value) or "row" in str(caught.value)
    assert server.clock() - started < 300 + 60


def outcome_of(server: FakeServer, *, prefetched: bool) -> list[Tensor] | ConfigError | ServerUnreachable:
    try:
        return scored(server, "jsd", prefetched=prefetched)
    except (ConfigError, ServerUnreachable) as error:
        return error


@pytest.mark.parametrize("seed", range(50))
def test_a_random_schedule_ends_in_the_exact_scores_or_in_an_error(seed: int):
    if "jsd" not in CLEAN:
        CLEAN["jsd"] = scored(FakeServer(MODEL), "jsd")
    faults, stops = schedule(seed)
    server = FakeServer(MODEL, faults=faults)
    started = server.clock()
    ended = outcome_of(server, prefetched=bool(seed % 2))
    if isinstance(ended, list):
        assert not stops
        assert all(torch.equal(a, b) for a, b in zip(ended, CLEAN["jsd"], strict=True))
    else:
        assert stops or isinstance(ended, ServerUnreachable)
    assert server.clock() - started < 20 * 120 + 310


def test_a_server_that_stays_away_is_given_up_at_the_deadline():
    server = FakeServer(MODEL)
    dies(3, seconds=1e9)(server)
    teacher = teacher_of(server, top_k=2, rows_per_request=24)
    teacher.score(ragged_batch(LENGTHS))
    teacher.score(ragged_batch(LENGTHS, seed=1))
    started = server.clock()
    with pytest.raises(ServerUnreachable, match=r"unreachable since .* UTC: \d+ tries .*rerun the same command"):
        teacher.score(BATCH)
    assert 250 < server.clock() - started <= 300
    assert max(server.clock.slept) <= 30
    server.always = None  # it is back, and the same teacher goes on
    assert torch.equal(teacher.score(BATCH).logits, teacher_of(FakeServer(MODEL), top_k=2).score(BATCH).logits)


def test_of_two_teachers_the_dead_one_is_named_and_neither_scores_for_the_other():
    alive, dead = FakeServer(MODEL), FakeServer(OTHER)
    several = SeveralTeachers([teacher_of(alive, top_k=3), teacher_of(dead, top_k=3)])
    batch = ragged_batch(LENGTHS)
    side = own_tokens(batch).teacher
    batch = replace(batch, teachers=(side, side))
    both = several.score(batch)
    assert torch.equal(both.scores[0].logits, teacher_of(FakeServer(MODEL), top_k=3).score(batch).logits)
    assert torch.equal(both.scores[1].logits, teacher_of(FakeServer(OTHER), top_k=3).score(batch).logits)
    dead.always = status(503)
    several = SeveralTeachers([teacher_of(alive, top_k=3), teacher_of(dead, top_k=3)])
    with pytest.raises(ServerUnreachable, match="HTTP 503"):
        several.score(batch)


# ------------------------------------------------------------------ another teacher than before


def test_a_resumed_run_notices_another_teacher():
    first = teacher_of(FakeServer(MODEL), top_k=3)
    assert first.state_dict() == {}
    first.connect()
    state = first.state_dict()
    same = teacher_of(FakeServer(MODEL), top_k=2, keep_sampled=True)
    same.load_state_dict(state)
    same.score(BATCH)
    other = teacher_of(FakeServer(OTHER), top_k=3)
    other.load_state_dict(state)
    with pytest.raises(ServerResponseError, match="other log-probabilities than at the start of this run"):
        other.score(BATCH)
    connected = teacher_of(FakeServer(OTHER), top_k=3)
    connected.connect()
    with pytest.raises(ServerResponseError, match="another model"):
        connected.load_state_dict(state)
    with pytest.raises(ConfigError, match="another canary"):
        teacher_of(FakeServer(MODEL), vocab_size=22, head_size=23).load_state_dict(state)


def test_rounding_is_not_taken_for_another_teacher():
    server = FakeServer(MODEL)
    draw = random.Random(0)

    def noisy(answer: dict[str, Any], payload: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            for entry in choice["prompt_logprobs"][1:]:
                for said in entry.values():
                    said["logprob"] -= draw.random() * 0.1

    server.edit = noisy
    teacher_of(server, top_k=3).score(BATCH)


def test_settings_that_cannot_work_are_refused_when_the_teacher_is_made():
    for options, says in [
        ({"top_k": -1}, "top_k must be in"),
        ({"top_k": 24}, "top_k must be in"),
        ({"head_size": 22}, "head_size must be at least"),
        ({"rows_per_request": 0}, "rows_per_request"),
        ({"concurrency": 0}, "concurrency"),
        ({"top_k": VOCAB, "temperature": 0.0}, "temperature must be"),
    ]:
        with pytest.raises(ConfigError, match=says):
            teacher_of(FakeServer(MODEL), **options)


def test_the_model_is_found_by_its_name_or_because_it_is_the_only_one():
    server = FakeServer(MODEL)
    teacher = teacher_of(server)
    teacher.connect()
    assert teacher.model == "teacher"
    with pytest.raises(ConfigError, match="no model 'nope', only 'teacher'"):
        teacher_of(server, model="nope").connect()

    def two(server: FakeServer, request: httpx.Request, number: int) -> httpx.Response | None:
        return json_response({"data": [{"id": "a"}, {"id": "b"}]}) if request.url.path == "/v1/models" else None

    server.always = two
    with pytest.raises(ConfigError, match="has 2 models; name one of them: 'a', 'b'"):
        teacher_of(server).connect()
