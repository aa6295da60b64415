# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from cohobate.demo import run
from cohobate.demo.methods import METHODS, Setting
from cohobate.errors import CohobateError


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, list[str]]:
    """A quick demo: every method for four steps."""
    folder, news = tmp_path_factory.mktemp("demo"), []
    found = run.run_demo(output_dir=folder, quick=True, progress=lambda done, total, text: news.append(text))
    return found, folder, [text for text in news if text]


def test_every_method_starts_from_the_same_student_and_is_measured_at_the_same_steps(report: tuple) -> None:
    found, _, news = report
    curves = {method: found["methods"][method][0]["curve"] for method in METHODS}
    assert len({curve[0]["accuracy"] for curve in curves.values()}) == 1
    assert {tuple(point["step"] for point in curve) for curve in curves.values()} == {(0, 2, 4)}
    assert all(curve[0]["seconds"] < curve[1]["seconds"] < curve[2]["seconds"] for curve in curves.values())
    assert len(news) == len(METHODS)


def test_results_and_picture_are_written(report: tuple) -> None:
    found, folder, _ = report
    assert json.loads((folder / "results.json").read_text())["methods"] == found["methods"]
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert run.steps_of(found) == [0, 2, 4]
    rows = list(run.table(found))
    assert len(rows) == len(METHODS)
    assert all(len(row) == 5 for row in rows)


def test_recorded_methods_never_sample_while_training(report: tuple) -> None:
    _, folder, _ = report
    for method, recorded in (("sft", True), ("offline_kd", True), ("opd_reverse", False), ("opsd", False)):
        lines = [json.loads(line) for line in (folder / f"{method}-seed0" / "metrics.jsonl").read_text().splitlines()]
        logs = [line for line in lines if "loss" in line]
        assert all(("completion/recorded_mean_length" in line) == recorded for line in logs), method
        assert all(("completion/mean_length" in line) != recorded for line in logs), method


def test_a_failing_job_shows_the_end_of_its_output(tmp_path: Path) -> None:
    job = run.Job(method="nonsense", seed=0, folder=tmp_path / "job")  # type: ignore[arg-type]
    with pytest.raises(CohobateError, match=r"(?s)a demo job failed.*nonsense"):
        run.run_jobs([job], "quick", num_steps=1, progress=lambda *_: None)


def test_a_table_cell_shows_mean_and_range_in_per_cent() -> None:
    assert run._spread([0.64, 0.66, 0.69]) == "66 (64–69)"
    assert run._spread([0.5]) == "50"


def test_the_setting_gives_everybody_whole_steps() -> None:
    for setting in (run.FULL, run.QUICK, Setting()):
        assert setting.num_prompts % setting.batch_size == 0
        assert setting.num_steps % setting.eval_every == 0
