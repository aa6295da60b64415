# SPDX-License-Identifier: Apache-2.0
import pytest

from cohobate.trainer.card import PAPERS, RunDescription, model_card, versions


@pytest.mark.parametrize(
    ("method", "arxiv"),
    [
        ("gkd", "2306.13649"),
        ("iw_opd", "2606.22600"),
        ("opsd", "2601.18734"),
        ("sdft", "2601.19897"),
        ("sdpo", "2601.20802"),
    ],
)
def test_a_card_names_the_paper_of_its_method(method: str, arxiv: str) -> None:
    text = model_card(RunDescription(method=method), step=3, metrics={})
    assert f"https://arxiv.org/abs/{arxiv}" in text
    assert PAPERS[method][1] == arxiv


def test_a_card_says_who_was_trained_on_what_and_how() -> None:
    run = RunDescription(
        method="my|own",
        student="small",
        teacher="large",
        objective="DivergenceObjective(beta=1.0)",
        data_fingerprint="abc123",
        num_rows=17,
        settings={"beta": 1.0},
        recipe={"method": "my|own"},
    )
    text = model_card(run, step=42, metrics={"loss": 0.25})
    for fact in ("small", "large", "abc123", "| training rows | 17 |", "| optimizer steps | 42 |", "| `beta` | 1.0 |"):
        assert fact in text
    assert "| `loss` | 0.25 |" in text
    assert "arxiv" not in text.lower()
    assert '"method": "my|own"' in text
    assert f"- torch {versions()['torch']}" in text
