# SPDX-License-Identifier: Apache-2.0
"""An answer that could not be true is refused, whatever is wrong with it."""

import copy
import json
import math
import random
import time
from typing import Any

import pytest

from cohobate.errors import ServerResponseError
from cohobate.teachers.server_answers import Asked, Expected, read_rows

V = 6
ASKED = (
    Asked(name="'a'", ids=(3, 1, 4), positions=(1, 2)),
    Asked(name="'b'", ids=(5, 5), positions=(1,)),
)
# Entry t is what is said of token t: here the log-probabilities of all six ids, equal to 1 in sum.
LOGPROBS = {
    ("a", 1): [0.05, 0.1, 0.5, 0.2, 0.1, 0.05],
    ("a", 2): [0.02, 0.08, 0.3, 0.2, 0.35, 0.05],
    ("b", 1): [0.3, 0.25, 0.25, 0.1, 0.07, 0.03],
}


def entry(probabilities: list[float], token: int, k: int) -> dict[str, Any]:
    best = sorted(range(V), key=lambda v: -probabilities[v])[:k]
    return {str(v): {"logprob": math.log(probabilities[v]), "rank": 1} for v in [token, *best]}


def good(k: int = 2) -> dict[str, Any]:
    choices = [
        {"index": 0, "prompt_logprobs": [None, entry(LOGPROBS["a", 1], 1, k), entry(LOGPROBS["a", 2], 4, k)]},
        {"index": 1, "prompt_logprobs": [None, entry(LOGPROBS["b", 1], 5, k)]},
    ]
    return {"model": "m", "choices": choices, "usage": {"prompt_tokens": 5}}


def read(answer: Any, k: int = 2, num_ids: int = V) -> Any:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return read_rows(body, ASKED, Expected(model="m", k=k, num_ids=num_ids), about="rows 'a', 'b'")


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 6])
def test_a_right_answer_is_read_with_the_realized_token_by_its_id(k: int):
    rows = read(good(k), k)
    for row, cases in zip(rows, ([("a", 1, 1), ("a", 2, 4)], [("b", 1, 5)]), strict=True):
        for i, (name, position, token) in enumerate(cases):
            p = LOGPROBS[name, position]
            assert math.exp(row.realized[i]) == pytest.approx(p[token])
            best = sorted(range(V), key=lambda v: (-p[v], v))[:k]
            assert row.ids[i].tolist() == best
            assert [math.exp(x) for x in row.logprobs[i]] == pytest.approx([p[v] for v in best])


def test_choices_are_put_in_order_by_their_index():
    answer = good()
    answer["choices"].reverse()
    assert [row.realized.tolist() for row in read(answer)] == [row.realized.tolist() for row in read(good())]


def test_neither_the_order_of_the_ids_nor_their_ranks_mean_anything():
    answer = good()
    for choice in answer["choices"]:
        for position in range(1, len(choice["prompt_logprobs"])):
            found = choice["prompt_logprobs"][position]
            choice["prompt_logprobs"][position] = {i: found[i] | {"rank": 7} for i in reversed(list(found))}
    for changed, plain in zip(read(answer), read(good()), strict=True):
        assert changed.realized.tolist() == plain.realized.tolist()
        assert changed.ids.tolist() == plain.ids.tolist()
        assert changed.logprobs.tolist() == plain.logprobs.tolist()


def first(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]


def broken(edit: Any) -> dict[str, Any]:
    answer = copy.deepcopy(good())
    edit(answer)
    return answer


# The eleven classes on which peers train without a word, and some more.
MALFORMED: dict[str, tuple[Any, str]] = {
    "list too short": (lambda a: first(a)["prompt_logprobs"].pop(), "2 entries for 3 tokens"),
    "list too long": (lambda a: first(a)["prompt_logprobs"].append(None), "4 entries for 3 tokens"),
    "list empty": (lambda a: first(a).update(prompt_logprobs=[]), "0 entries"),
    "list null": (lambda a: first(a).update(prompt_logprobs=None), "no list"),
    "entry null": (lambda a: first(a)["prompt_logprobs"].__setitem__(1, None), "position 1 of 'a' is null"),
    "entry a list": (lambda a: first(a)["prompt_logprobs"].__setitem__(1, [1]), "is list"),
    "first not null": (lambda a: first(a)["prompt_logprobs"].__setitem__(0, {}), "must begin with null"),
    "shifted": (lambda a: first(a)["prompt_logprobs"].insert(1, first(a)["prompt_logprobs"].pop()), "may be shifted"),
    "token missing": (lambda a: first(a)["prompt_logprobs"][1].pop("1"), "has 2 ids|without the token 1"),
    "nan": (lambda a: first(a)["prompt_logprobs"][1]["1"].update(logprob=float("nan")), "the number NaN"),
    "infinite": (lambda a: first(a)["prompt_logprobs"][1]["1"].update(logprob=float("-inf")), "number -Infinity"),
    "null": (lambda a: first(a)["prompt_logprobs"][1]["1"].update(logprob=None), "has no number"),
    "true": (lambda a: first(a)["prompt_logprobs"][1]["1"].update(logprob=True), "has no number"),
    "text": (lambda a: first(a)["prompt_logprobs"][1]["1"].update(logprob="-1"), "has no number"),
    "bare number": (lambda a: first(a)["prompt_logprobs"][1].update({"1": -1.0}), "has no number"),
    "huge integer": (
        lambda a: first(a)["prompt_logprobs"][1]["1"].update(logprob=-(10**39)),
        "an integer of 41 digits",
    ),
    "positive": (lambda a: first(a)["prompt_logprobs"][1]["1"].update(logprob=0.1), "above 0"),
    "mass": (lambda a: [e.update(logprob=-0.2) for e in first(a)["prompt_logprobs"][2].values()], "the mass"),
    "logits": (lambda a: [e.update(logprob=-9.0) for e in first(a)["prompt_logprobs"][2].values()], "raw_logprobs"),
    "id too large": (lambda a: _rename(a, "6"), "has the id 6, but"),
    "id negative": (lambda a: _rename(a, "-1"), "has the id '-1'"),
    "id with zero": (lambda a: _rename(a, "02"), "has the id '02'"),
    "id a word": (lambda a: _rename(a, "the"), "has the id 'the'"),
    "id in other digits": (lambda a: _rename(a, "٣"), "has the id '٣'"),
    "id endless": (lambda a: _rename(a, "1" * 30), "has the id '1111"),
    "too many ids": (
        lambda a: first(a)["prompt_logprobs"][1].update({"0": {"logprob": -9}, "4": {"logprob": -9}}),
        "ids",
    ),
    "other model": (lambda a: a.update(model="n"), "by the model 'n'"),
    "no model": (lambda a: a.pop("model"), "by the model 'None'"),
    "other tokens": (lambda a: first(a).update(prompt_token_ids=[3, 1, 5]), "echoes other tokens"),
    "tokens added": (lambda a: a["usage"].update(prompt_tokens=6), "read 6 prompt tokens, sent were 5"),
    "no index": (lambda a: first(a).pop("index"), "the index None"),
    "index twice": (lambda a: first(a).update(index=1), "the index 1"),
    "index true": (lambda a: a["choices"][1].update(index=True), "the index True"),
    "index out of range": (lambda a: first(a).update(index=2), "the index 2"),
    "a choice too few": (lambda a: a["choices"].pop(), "1 choices for 2 prompts"),
    "a choice too many": (lambda a: a["choices"].append({}), "3 choices"),
    "choice a number": (lambda a: a["choices"].__setitem__(0, 7), "the index None"),
    "no choices": (lambda a: a.pop("choices"), "no list `choices`"),
    "choices an object": (lambda a: a.update(choices={}), "no list `choices`"),
}


def _rename(answer: dict[str, Any], name: str) -> None:
    found = first(answer)["prompt_logprobs"][1]
    found[name] = found.pop(list(found)[-1])


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_is_refused_and_named(name: str):
    edit, says = MALFORMED[name]
    with pytest.raises(ServerResponseError, match=says) as caught:
        read(broken(edit))
    assert "rows 'a', 'b'" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"null", "no list `choices`"),
        (b"[]", "no list `choices`"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "nested without end"),
        (b'{"a":' * 100_000, "nested without end"),
        (b"1" * 100_000, "an integer of 100000 digits"),
        (b'{"model": "m", "model": "m"}', "a key twice"),
        (json.dumps(good()).encode()[:-30], "no JSON"),
        (json.dumps(good()).encode() + b"{}", "no JSON"),
        (json.dumps(good()).replace('"logprob": -', '"logprob": -1e', 1).encode(), "infinite|no JSON|mass|likeliest"),
    ],
)
def test_a_body_that_is_no_sound_json_is_refused_quickly(body: bytes, says: str):
    started = time.perf_counter()
    with pytest.raises(ServerResponseError, match=says):
        read(body)
    assert time.perf_counter() - started < 1


def test_all_ids_must_have_the_mass_of_one():
    answer = good(6)
    assert len(read(answer, 6)) == 2
    for said in first(answer)["prompt_logprobs"][1].values():
        said["logprob"] -= 0.05
    with pytest.raises(ServerResponseError, match=r"which even equal ones exceed|on all ids, which must be 1"):
        read(answer, 6)


def test_mutated_answers_are_refused_or_read_and_nothing_else_happens():
    draw = random.Random(1)
    text = json.dumps(good()).encode()
    junk = [b"", b"{", b"]", b"null", b"-", b"1e999", b"NaN", b'"', b",", b"\x00", b"\xc3", b"0", b'"1": {},']
    read_as_before = refused = 0
    for _ in range(3000):
        body = bytearray(text)
        for _ in range(draw.choice([1, 1, 2, 5])):
            at = draw.randrange(len(body))
            body[at : at + draw.choice([0, 1, 1, 3, 20])] = draw.choice([*junk, bytes([draw.randrange(256)])])
        try:
            read(bytes(body))
            read_as_before += 1
        except ServerResponseError:
            refused += 1
    assert refused > 2000
    assert read_as_before > 20  # a changed digit of a log-probability, or of a field that is not read
