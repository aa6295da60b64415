# SPDX-License-Identifier: Apache-2.0
"""Two models of one name are told apart; the same model in another folder is the same."""

import json
import shutil
from pathlib import Path

import pytest

import tiny
from cohobate.errors import ConfigError
from cohobate.teachers.model_fingerprint import config_fingerprint, weights_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.llama(1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_copy_is_the_same_model_whatever_wrote_its_settings(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    settings = json.loads((copy / "config.json").read_text())
    settings = dict(reversed(settings.items())) | {"transformers_version": "9", "_name_or_path": "elsewhere"}
    (copy / "config.json").write_text(json.dumps(settings))
    assert config_fingerprint(copy) == config_fingerprint(folder)
    assert weights_fingerprint(copy) == weights_fingerprint(folder)


def test_one_bit_of_the_weights_or_one_setting_is_another_model(folder: Path) -> None:
    config, weights = config_fingerprint(folder), weights_fingerprint(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weights_fingerprint(folder) != weights
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-5}))
    assert config_fingerprint(folder) != config
    (folder / "model-2.safetensors").write_bytes(b"")
    assert weights_fingerprint(folder) not in (weights, None)


def test_it_tells_how_far_it_is(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    weights_fingerprint(folder, lambda done, total: told.append((done, total)))
    size = (folder / "model.safetensors").stat().st_size
    assert told[-1] == (size, size)


def test_a_folder_without_weights_or_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no safetensors weights"):
        weights_fingerprint(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        config_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        config_fingerprint(tmp_path)
