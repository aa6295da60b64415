# SPDX-License-Identifier: Apache-2.0
"""An entry of `teachers` that is asked on a server, as a person runs it: the run is that of the same model here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import tiny
from cli_runs import RUN, refused
from fake_server import FakeServer, serve
from tiny_bpe import student_tokenizer, teacher_tokenizer

WHOLE = [*RUN, "data.eval=text.jsonl", "training.learning_rate=0.01", "training.warmup_steps=0"]
HEAD = 31  # rows of a padded head; the tokenizer has 29 ids


@pytest.fixture
def server(place: Path) -> FakeServer:
    """What answers as the model in `bpe_teacher`; its name there is `second`."""
    model = AutoModelForCausalLM.from_pretrained(place / "bpe_teacher").eval()
    return FakeServer(model, num_ids=29, max_logprobs=29, tokenizer=teacher_tokenizer(), name="second")


@pytest.fixture
def url(server: FakeServer) -> Iterator[str]:
    with serve(server.handle) as address:
        yield address


def logged(place: Path, run: str) -> list[dict[str, Any]]:
    """The numbers of every log of a run, without those that are times."""
    lines = (place / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [
        {k: v for k, v in entry.items() if "speed/" not in k and "per_second" not in k}
        for entry in found
        if "train_runtime" not in entry
    ]


def check_same_run(place: Path, first: str, second: str) -> None:
    ours, theirs = logged(place, first), logged(place, second)
    assert len(ours) == len(theirs) == 4  # evaluated before and after two steps
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    losses = [entry["eval/loss"] for entry in ours if "eval/loss" in entry]
    assert losses[1] < losses[0] - 0.01


def test_a_csd_run_with_the_teacher_on_a_server_is_that_with_the_teacher_here(
    cohobate: Any, place: Path, server: FakeServer, url: str
) -> None:
    assert cohobate("train", "csd", *WHOLE, "output_dir=runs/here").code == 0
    there = [f"teachers.0.teacher_model_server_url={url}", "output_dir=runs/there"]
    done = cohobate("train", "csd", *WHOLE, *there)
    assert done.code == 0, done.err
    assert f"teacher   {url} (own tokenizer)" in done.out
    assert "server    ids: 26 ids have the same bytes there" in done.out
    check_same_run(place, "here", "there")
    assert {payload["prompt_logprobs"] for payload in server.asked} == {9}


def test_every_key_of_a_server_reaches_it(
    cohobate: Any, place: Path, server: FakeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COHOBATE_TEST_TOKEN", "a-secret")
    keys = [f"teachers.0.teacher_model_server_url={url}", "teachers.0.token_env=COHOBATE_TEST_TOKEN"]
    keys += ["teachers.0.served_model_name=second", "teachers.0.concurrency=2"]
    done = cohobate("train", "csd", *RUN, *keys)
    assert done.code == 0, done.err
    assert {request.headers["authorization"] for request in server.seen} == {"Bearer a-secret"}
    assert "a-secret" not in done.out + done.err
    assert not [p for p in (place / "runs").rglob("*") if p.is_file() and b"a-secret" in p.read_bytes()]
    refused(cohobate("doctor", "csd", *RUN, *keys, "teachers.0.served_model_name=first"), 2, "only 'second'")
    refused(cohobate("doctor", "csd", *RUN, *keys, "teachers.0.concurrency=0"), 2, "teachers.0.concurrency")
    far = [*keys, "teachers.0.teacher_model_server_url=http://192.0.2.1:8000"]
    refused(cohobate("doctor", "csd", *RUN, *far), 2, "teachers.0 (bpe_teacher)", "allow_insecure")
    near = [*keys, "teachers.0.teacher_model_server_url=https://localhost:1", "teachers.0.ca_file=nothere.pem"]
    refused(cohobate("doctor", "csd", *RUN, *near), 2, "teachers.0 (bpe_teacher)", "ca_file='nothere.pem'")


def test_a_padded_head_on_the_server_is_cut_as_it_is_here(cohobate: Any, place: Path) -> None:
    tiny.llama(5, vocab_size=HEAD).save_pretrained(place / "padded")
    teacher_tokenizer().save_pretrained(place / "padded")
    model = AutoModelForCausalLM.from_pretrained(place / "padded").eval()
    run = [*WHOLE, "teachers.0.model=padded", "teachers.0.top_k=29"]
    assert cohobate("train", "csd", *run, "output_dir=runs/here").code == 0
    padded = FakeServer(model, num_ids=HEAD, max_logprobs=HEAD, tokenizer=teacher_tokenizer())
    with serve(padded.handle) as address:
        there = [*run, f"teachers.0.teacher_model_server_url={address}", "output_dir=runs/there"]
        refused(cohobate("train", "csd", *there), 1, "head_size")
        done = cohobate("train", "csd", *there, f"teachers.0.head_size={HEAD}")
    assert done.code == 0, done.err
    check_same_run(place, "here", "there")


@pytest.mark.parametrize("key", ["served_model_name=x", "token_env=X", "head_size=40", "allow_insecure=true"])
def test_a_key_of_a_server_without_a_server_is_refused(cohobate: Any, key: str) -> None:
    words = [f"teachers[0].{key.partition('=')[0]} is of a teacher on a server", "teachers.0.teacher_model_server_url"]
    refused(cohobate("train", "csd", *RUN, f"teachers.0.{key}"), 2, *words)


def test_a_server_that_means_other_tokens_is_refused_before_a_step(
    cohobate: Any, place: Path, server: FakeServer, url: str
) -> None:
    """The entry's tokenizer is the teacher's, and it is with that one that the server's ids are compared."""
    server.tokenizer = student_tokenizer()
    run = [*RUN, f"teachers.0.teacher_model_server_url={url}"]
    refused(cohobate("train", "csd", *run), 2, "means other tokens by the same ids")
    assert not list((place / "runs").rglob("checkpoint-*"))


def test_every_server_among_several_teachers_is_tried(cohobate: Any, place: Path, server: FakeServer) -> None:
    other = FakeServer(server.model, num_ids=29, max_logprobs=29, tokenizer=teacher_tokenizer())
    with serve(server.handle) as first, serve(other.handle) as second:
        run = [*RUN, f"teachers.0.teacher_model_server_url={first}", "teachers.1.model=bpe_teacher"]
        run += [f"teachers.1.teacher_model_server_url={second}", "teachers.1.top_k=5"]
        run += ["teachers.1.aligner.subtokens=auto"]
        done = cohobate("doctor", "csd", *run)
        assert done.code == 0, done.err
        for address, name, k in ((first, "second", 9), (second, "teacher", 5)):
            said = f"{address} serves {name!r}, rows up to 128 tokens; it gives the {k} likeliest"
            assert f"server    connection: {said}" in done.out
        other.shift = 1
        refused(cohobate("doctor", "csd", *run), 1, second, "position beside")
