# SPDX-License-Identifier: Apache-2.0
"""The one door through which models and tokenizers come in.

`from_pretrained` follows what a folder says: it opens pickles, imports the folder's code, and gives a model with
random weights and a warning if tensors are missing. A distillation run would go on with all of that. So a folder is
checked first (`model_files.py`), only safetensors are read, no code runs unless the caller says so, and a tensor that
the file lacks is an error. Nothing is fetched: a hub name is looked up in the local cache.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cohobate.errors import ConfigError, did_you_mean
from cohobate.teachers.model_files import check_config_files, check_weight_files
from cohobate.teachers.smollm2 import SMOLLM2_NAME, smollm2_folder

LOAD_ARGUMENTS = ("dtype", "device_map", "attn_implementation", "revision", "trust_remote_code")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model from a folder, a name in the local hub cache, or `smollm2-135m-instruct`; in eval mode.

    Args:
        path_or_name: a folder with `config.json` and safetensors weights; or the name of a cached hub model.
        dtype: None or "auto" keeps the dtype of the file; else a torch dtype or its name.
        device_map: as transformers takes it.
        attn_implementation: `"sdpa"`, `"eager"`, …; a hub kernel (`"org/name"`) is code and needs `trust_remote_code`.
        revision: commit, branch or tag of a cached hub model.
        trust_remote_code: let the model's own Python code run, and let it be fetched. A hub name then needs a
            40-digit `revision`, so that the code that runs is the code that was read.

    Raises:
        ConfigError: if nothing is there, the folder is unsafe or damaged, or a tensor of the model is not in the file.
    """
    if attn_implementation is not None and not trust_remote_code and not re.fullmatch(r"\w+", attn_implementation):
        raise ConfigError(
            f"attn_implementation={attn_implementation!r} names a kernel to fetch from a hub, which is code. Use "
            "'sdpa', 'eager' or an installed kernel, or pass trust_remote_code."
        )
    folder = model_folder(path_or_name, revision=revision, trust_remote_code=trust_remote_code)
    check_config_files(folder, trust_remote_code=trust_remote_code)
    check_weight_files(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype="auto" if dtype in (None, "auto") else _torch_dtype(dtype),
        device_map=device_map,
        attn_implementation=attn_implementation,
        use_safetensors=True,
        local_files_only=not trust_remote_code,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} tensors of {type(model).__name__}, first {missing[0]!r}. They would be "
            "random numbers. Is this a base model without a language-model head, or an unfinished copy?"
        )
    return model.eval()


def load_tokenizer(
    path_or_name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, of a cached hub model, or of `smollm2-135m-instruct`; guarded as `load_model`.

    Raises:
        ConfigError: if nothing is there, the folder is unsafe, or it has no tokenizer.
    """
    folder = model_folder(path_or_name, revision=revision, trust_remote_code=trust_remote_code)
    check_config_files(folder, trust_remote_code=trust_remote_code)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise ConfigError(
            f"{folder} has no tokenizer file. Save it beside the weights (tokenizer.save_pretrained), or name the "
            "folder of the tokenizer separately."
        )
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=not trust_remote_code, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizers raises nothing narrower for a file that it cannot read
        raise ConfigError(f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {error}).") from error


def resolve_model(
    model: nn.Module | str | Path, load_arguments: Mapping[str, Any] | None = None, *, role: str = "teacher"
) -> nn.Module:
    """The module itself, or what `load_model` makes of a path.

    Load arguments beside a module that already exists would have no effect, so they are refused; so are unknown ones.

    Raises:
        ConfigError: for either; and as `load_model`.
    """
    given = {name: value for name, value in (load_arguments or {}).items() if value is not None}
    for name in given:
        if name not in LOAD_ARGUMENTS:
            valid = ", ".join(LOAD_ARGUMENTS)
            raise ConfigError(
                f"unknown load argument {name!r} for the {role}.{did_you_mean(name, LOAD_ARGUMENTS)} Valid: {valid}."
            )
    if not isinstance(model, nn.Module):
        return load_model(model, **given)
    if given:
        raise ConfigError(
            f"the {role} is already a {type(model).__name__}, so its load arguments {sorted(given)} would have no "
            f"effect. Leave them out, or pass the {role} as a path."
        )
    return model


def model_folder(path_or_name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The folder that a path or name means. Only `trust_remote_code` lets a hub be asked; otherwise its local cache.

    Raises:
        ConfigError: if there is none, saying where was looked and what to do.
    """
    if str(path_or_name).lower() == SMOLLM2_NAME:
        _refuse_revision(revision, SMOLLM2_NAME)
        return smollm2_folder()
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        _refuse_revision(revision, f"the folder {folder}")
        return folder
    if folder.is_file():
        raise ConfigError(f"{folder} is a file. Give the folder with config.json and the safetensors weights.")
    if not isinstance(path_or_name, str) or not _HUB_NAME.fullmatch(path_or_name) or ".." in path_or_name:
        raise ConfigError(f"no model folder {folder} (looked in {Path.cwd()}).{_neighbour(folder)}")
    return _hub_folder(path_or_name, revision, trust_remote_code)


def _hub_folder(name: str, revision: str | None, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    if trust_remote_code and (revision is None or not _COMMIT.fullmatch(revision)):
        raise ConfigError(
            f"trust_remote_code for {name} needs revision to be the 40-digit commit whose code you have read, "
            f"got {revision!r}: a branch or tag can be moved to other code."
        )
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=not trust_remote_code))
    except (OSError, ValueError) as problem:
        at = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"{name} is neither a folder (looked in {Path.cwd()}) nor a model in the local hub cache "
            f"({type(problem).__name__}).{_neighbour(Path(name))} Nothing is fetched on its own; to fetch it once: "
            f"hf download {name}{at}"
        ) from None


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision={revision!r} has no effect on {what}. Leave it out.")


def _neighbour(folder: Path) -> str:
    names = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    return did_you_mean(folder.name, [*names, SMOLLM2_NAME])


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}.{did_you_mean(dtype, DTYPES)} Valid: {', '.join(DTYPES)}.")
    return DTYPES[dtype]
