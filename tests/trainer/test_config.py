# SPDX-License-Identifier: Apache-2.0
import warnings
from pathlib import Path

import pytest

from cohobate.errors import ConfigError
from cohobate.trainer.config import DistillationConfig


def config(folder: Path, **settings: object) -> DistillationConfig:
    return DistillationConfig(output_dir=str(folder), use_cpu=True, report_to="none", **settings)  # type: ignore[arg-type]


def test_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert (found.beta, found.distill_temperature, found.sampling_temperature) == (0.5, 1.0, 1.0)
    assert (found.on_policy_fraction, found.num_generations, found.token_budget) == (1.0, 1, None)
    assert found.logging_nan_inf_filter is False


def test_a_bare_temperature_is_refused_with_both_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampling_temperature .* distill_temperature"):
        config(tmp_path, temperature=0.7)


def test_lmbda_is_the_old_name_of_on_policy_fraction_and_warns_once(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="on_policy_fraction") as caught:
        found = config(tmp_path, lmbda=0.5)
    assert len(caught) == 1
    assert found.on_policy_fraction == 0.5
    assert found.lmbda is None


def test_lmbda_of_one_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config(tmp_path, lmbda=1.0).on_policy_fraction == 1.0


def test_both_names_of_one_setting_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two names"):
        config(tmp_path, lmbda=0.5, on_policy_fraction=0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta", 1.1),
        ("beta", -0.1),
        ("distill_temperature", 0.0),
        ("sampling_temperature", -1.0),
        ("eval_temperature", -1.0),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 2.0),
        ("on_policy_fraction", 1.5),
        ("num_generations", 0),
        ("num_iterations", 0),
        ("max_completion_length", 0),
        ("max_prompt_length", 0),
        ("token_budget", 0),
    ],
)
def test_a_value_out_of_range_names_the_field_and_the_value(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*{value}"):
        config(tmp_path, **{name: value})


def test_sampling_takes_the_sampling_settings_and_evaluation_its_own(tmp_path: Path) -> None:
    found = config(tmp_path, sampling_temperature=0.7, top_p=0.9, num_generations=3, max_completion_length=5)
    train, evaluation = found.sampling(), found.sampling(evaluation=True)
    assert (train.temperature, train.top_p, train.n_samples_per_prompt, train.max_new_tokens) == (0.7, 0.9, 3, 5)
    assert (evaluation.temperature, evaluation.top_p, evaluation.n_samples_per_prompt) == (0.0, 1.0, 1)


def test_the_card_lists_the_settings_that_this_class_adds(tmp_path: Path) -> None:
    settings = config(tmp_path, beta=0.3).distillation_settings()
    assert settings["beta"] == 0.3
    assert "learning_rate" not in settings
    assert "temperature" not in settings
