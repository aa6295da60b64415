# SPDX-License-Identifier: Apache-2.0
"""Model folders are untrusted: what opens, what is refused and how, and that nothing hostile runs."""

import json
import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cohobate.errors import ConfigError
from cohobate.teachers.load import load_model, load_tokenizer, model_folder, resolve_model
from cohobate.teachers.model_files import WEIGHTS, WEIGHTS_INDEX, check_config_files, is_plain_name
from tiny import char_tokenizer, llama


class Evil:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    llama(3).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    llama(3, tie=False).save_pretrained(path, max_shard_size="4KB")
    assert (path / WEIGHTS_INDEX).is_file()
    return path


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def same_weights(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ------------------------------------------------------------------ what opens


def test_a_saved_model_comes_back_with_equal_weights_in_eval_mode(folder: Path):
    model = load_model(folder)
    assert same_weights(model, llama(3))
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())


def test_shards_are_put_together(sharded: Path):
    assert same_weights(load_model(str(sharded)), llama(3, tie=False))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: str | torch.dtype):
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype="auto").dtype == torch.float32
    assert load_model(folder, dtype=dtype).dtype == torch.bfloat16


def test_the_attention_asked_for_is_the_one_that_runs(folder: Path):
    assert load_model(folder, attn_implementation="eager").config._attn_implementation == "eager"


def test_the_tokenizer_of_a_folder_reads_and_writes_the_same_ids(folder: Path):
    tokenizer: Any = load_tokenizer(folder)
    assert tokenizer("12+3=")["input_ids"] == char_tokenizer()("12+3=")["input_ids"]
    assert tokenizer.decode(tokenizer("12+3=")["input_ids"]) == "12+3="


def test_loading_a_folder_opens_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(folder)
    load_tokenizer(folder)


def test_a_tokenizer_with_more_ids_than_the_model_never_resizes_the_embeddings(folder: Path):
    tokenizer = char_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(100)])
    tokenizer.save_pretrained(folder)
    assert len(load_tokenizer(folder)) == 123  # pyright: ignore[reportArgumentType]
    model: Any = load_model(folder)
    assert model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == 23


def test_links_into_the_blobs_of_a_hub_cache_are_followed(folder: Path, tmp_path: Path):
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, path in enumerate(folder.iterdir()):
        shutil.copy(path, repository / "blobs" / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert same_weights(load_model(snapshot), llama(3))


# ------------------------------------------------------------------ pickles


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "model.pkl", "consolidated.00.pth", "model.ckpt"]
)
def test_a_folder_with_pickled_weights_only_is_refused_unopened(folder: Path, tmp_path: Path, name: str):
    marker = tmp_path / "marker"
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ConfigError, match=rf"only as {name}.*pickles.*save_pretrained"):
        load_model(folder)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists()  # the trap was armed


def test_a_pickle_beside_safetensors_stays_closed(folder: Path, tmp_path: Path):
    marker = tmp_path / "marker"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(marker)))
    assert same_weights(load_model(folder), llama(3))
    assert not marker.exists()


def test_a_pickle_named_safetensors_is_refused_unopened(folder: Path, tmp_path: Path):
    marker = tmp_path / "marker"
    (folder / WEIGHTS).write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load_model(folder)
    assert not marker.exists()


# ------------------------------------------------------------------ code, kernels and other files


def test_a_model_with_code_of_its_own_is_refused_and_the_code_does_not_run(folder: Path, tmp_path: Path):
    marker = tmp_path / "marker"
    (folder / "modeling.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"}, model_type="own")
    with pytest.raises(ConfigError, match=r"config\.json: auto_map = .*nothing is executed unless you ask"):
        load_model(folder)
    with pytest.raises(ConfigError, match="auto_map"):
        load_tokenizer(folder)
    assert not marker.exists()


def test_trust_must_be_given_and_reaches_code_in_the_folder_only(folder: Path):
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    check_config_files(folder, trust_remote_code=True)
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "other/repository--modeling.Model"})
    with pytest.raises(ConfigError, match="code from another repository"):
        check_config_files(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    ("file", "entry", "message"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}}, "own Python code"),
        ("config.json", {"text_config": {"auto_map": {"AutoConfig": "c.C"}}}, r"text_config\.auto_map"),
        ("config.json", {"sub": [{"trust_remote_code": True}]}, r"sub\.0\.trust_remote_code"),
        ("config.json", {"_attn_implementation_internal": "evil/kernel"}, "private key"),
        ("config.json", {"_attn_implementation": "evil/kernel"}, "kernel to fetch"),
        ("config.json", {"attn_implementation": {"": "evil/kernel@main:f"}}, "kernel to fetch"),
        ("config.json", {"configuration_files": ["config.4.0.0.json"]}, "private key"),
        ("config.json", {"transformers_weights": "../other.safetensors"}, "transformers_weights"),
        ("generation_config.json", {"trust_remote_code": "yes"}, "trust_remote_code"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json", "../x.json"]}, r"'\.\./x\.json'"),
        ("tokenizer_config.json", {"chat_template": [{"name": "../../x", "template": ""}]}, "plain name"),
        ("tokenizer_config.json", {"chat_template": [{"template": ""}]}, "plain name"),
    ],
)
def test_settings_that_name_code_or_files_are_refused_with_file_and_key(
    folder: Path, file: str, entry: dict[str, Any], message: str
):
    load_model(folder)
    edit_json(folder / file, **entry)
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match=message) as error:
            load(folder)
        assert file in str(error.value)


def test_harmless_settings_of_published_models_are_no_reason_to_refuse(folder: Path):
    edit_json(folder / "config.json", _attn_implementation_autoset=True, auto_map={}, trust_remote_code=False)
    edit_json(
        folder / "tokenizer_config.json",
        name_or_path="/elsewhere/model",
        chat_template=[{"name": "a", "template": "b"}],
    )
    load_model(folder)
    load_tokenizer(folder)


def test_a_tokenizer_file_named_in_the_settings_is_not_opened(folder: Path, tmp_path: Path):
    other = tmp_path / "other.json"
    other.write_text("{")
    edit_json(folder / "tokenizer_config.json", tokenizer_file=str(other))
    tokenizer: Any = load_tokenizer(folder)
    assert tokenizer("1")["input_ids"] == char_tokenizer()("1")["input_ids"]


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\ufeff{}", ""])
def test_settings_that_are_no_json_are_one_sentence(folder: Path, content: str):
    (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is not readable JSON"):
        load_model(folder)


def test_a_settings_file_too_large_to_be_one_is_not_read(folder: Path):
    with (folder / "config.json").open("wb") as file:
        file.truncate(65 * 1024 * 1024)
    with pytest.raises(ConfigError, match=r"config\.json has 68157440 bytes"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path, name: str):
    shutil.move(folder / name, tmp_path / "moved")
    (folder / name).symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match=rf"{name} is a link to .*moved, outside"):
        load_model(folder)


# ------------------------------------------------------------------ names and damage of weights


def hostile_names() -> list[Any]:
    """Two hundred ways to mean a file outside the folder, or a device, or nothing."""
    targets = ["outside.safetensors", "passwd", "x/model.safetensors", "CON"]
    ways = [
        "../{}",
        "/{}",
        "\\{}",
        "..\\{}",
        "a/../../{}",
        "./{}",
        "~/{}",
        "C:{}",
        "C:\\{}",
        "//host/{}",
        "file:///{}",
    ]
    ways += [
        "https://host/{}",
        "{}\0",
        "\0{}",
        "{}\n",
        " {}",
        "{} ",
        "{}.",
        "-{}",
        "$(x){}",
        "%2e%2e%2f{}",
        "{}/",
        "{}\\",
    ]
    ways += [
        "..{}",
        ".{}",
        "…/{}",
        "∕{}",
        "／{}",
        "\u202e{}",
        "{}:stream",
        "{}|x",
        "{}*",
        "{}?",
        "`{}`",
        "{}\r",
        "{}\t",
    ]
    devices = ["con", "NUL", "prn.safetensors", "Aux", "COM1", "lpt9.txt"]
    others = [
        "",
        ".",
        "..",
        "...",
        "/",
        "\\",
        "~",
        " ",
        "a" * 256,
        "é.safetensors",
        None,
        1,
        True,
        1.5,
        [],
        {},
        ["a"],
        {"a": "b"},
    ]
    repeated = [("../" * n) + "x" for n in range(1, 25)] + ["x/" * n + "y" for n in range(1, 10)]
    return [way.format(target) for way in ways for target in targets] + devices + others + repeated


def test_no_hostile_name_is_taken_for_a_plain_one():
    names = hostile_names()
    assert len(names) >= 200
    assert [name for name in names if is_plain_name(name)] == []


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "a", "model (1)"[:5], "tokenizer.4.0.0.json", "_x=1+2@3"]
)
def test_usual_names_are_plain(name: str):
    assert is_plain_name(name)


@given(st.text(max_size=30))
def test_a_plain_name_stays_in_its_folder(name: str):
    if is_plain_name(name):
        assert os.path.dirname(os.path.normpath(os.path.join("folder", name))) == "folder"


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/outside.safetensors", "sub/x.safetensors", "x.bin", None, 7]
)
def test_a_hostile_shard_name_is_refused_before_any_shard_is_opened(sharded: Path, tmp_path: Path, name: Any):
    shutil.copy(next(sharded.glob("model-*.safetensors")), tmp_path / "outside.safetensors")
    content = json.loads((sharded / WEIGHTS_INDEX).read_text())
    first = next(iter(content["weight_map"]))
    content["weight_map"][first] = name
    (sharded / WEIGHTS_INDEX).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"not the plain name of a \.safetensors file"):
        load_model(sharded)


@pytest.mark.parametrize("content", [{}, [], {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(sharded: Path, content: Any):
    (sharded / WEIGHTS_INDEX).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no weight_map"):
        load_model(sharded)


def test_a_missing_shard_is_named(sharded: Path):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"{shard.name} is missing"):
        load_model(sharded)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_cut_weight_file_is_named(folder: Path, keep: int):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    with pytest.raises(ConfigError, match=rf"{WEIGHTS} is not a whole safetensors file"):
        load_model(folder)


def test_a_tensor_that_is_not_in_the_file_is_an_error_not_random_numbers(folder: Path):
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lacks 1 tensors of LlamaForCausalLM, first 'model\.layers\.0\.mlp\.up_proj"
    ):
        load_model(folder)


def test_a_body_without_a_head_is_an_error(tmp_path: Path):
    model = llama(3, tie=False)
    model.model.save_pretrained(tmp_path / "body")
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        load_model(tmp_path / "body")


# ------------------------------------------------------------------ names of models


def test_a_folder_that_is_not_there_says_where_was_looked_and_what_is_near(folder: Path):
    with pytest.raises(ConfigError, match=r"no model folder .*modle \(looked in .*\)\. Did you mean 'model'\?"):
        load_model(folder.with_name("modle"))
    with pytest.raises(ConfigError, match=r"Did you mean 'smollm2-135m-instruct'\?"):
        load_model("smollm2-135m")


def test_a_hub_name_that_is_not_cached_gives_the_command_that_fetches_it():
    with pytest.raises(
        ConfigError, match=r"nobody/no-such-model is neither a folder .* hf download nobody/no-such-model$"
    ):
        load_model("nobody/no-such-model")
    with pytest.raises(ConfigError, match="hf download nobody/no-such-model --revision v1"):
        load_tokenizer("nobody/no-such-model", revision="v1")


def test_code_from_a_hub_needs_a_whole_commit():
    trust = {"trust_remote_code": bool(1)}
    for revision in (None, "main", "a" * 39):
        with pytest.raises(ConfigError, match="40-digit commit"):
            load_model("nobody/no-such-model", revision=revision, **trust)


def test_what_would_have_no_effect_or_is_no_folder_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="revision='main' has no effect"):
        model_folder(folder, revision="main")
    with pytest.raises(ConfigError, match="is a file"):
        model_folder(folder / WEIGHTS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json.*It holds: nothing"):
        load_model(tmp_path / "empty")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=rf"neither {WEIGHTS} nor"):
        load_model(folder)


def test_an_adapter_does_not_choose_its_own_base_model(folder: Path):
    edit_json(folder / "adapter_config.json", base_model_name_or_path="evil/base", peft_type="LORA")
    with pytest.raises(ConfigError, match="LoRA adapter"):
        load_model(folder)


def test_a_folder_without_a_tokenizer_says_so(sharded: Path):
    with pytest.raises(ConfigError, match="no tokenizer file"):
        load_tokenizer(sharded)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bflaot16"}, r"unknown dtype 'bflaot16'\. Did you mean 'bfloat16'\?"),
        ({"attn_implementation": "some/kernel"}, "kernel to fetch"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_ones(folder: Path, arguments: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_model(folder, **arguments)


# ------------------------------------------------------------------ a module or a path


def test_load_arguments_beside_an_instantiated_teacher_are_refused():
    model = llama()
    assert resolve_model(model) is model
    assert resolve_model(model, {"dtype": None}) is model
    with pytest.raises(ConfigError, match=r"the teacher is already a LlamaForCausalLM.*\['dtype', 'revision'\]"):
        resolve_model(model, {"revision": "main", "dtype": "bfloat16"})


def test_a_path_is_loaded_with_the_load_arguments(folder: Path):
    model: Any = resolve_model(str(folder), {"dtype": "bfloat16", "revision": None})
    assert model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"unknown load argument 'dtpye' for the student\. Did you mean 'dtype'\?"):
        resolve_model(str(folder), {"dtpye": "bfloat16"}, role="student")
