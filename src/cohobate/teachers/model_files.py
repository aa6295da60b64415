# SPDX-License-Identifier: Apache-2.0
"""What must hold before a model folder is opened: no pickle, no code, no name that leads out of the folder.

A model folder is untrusted input. Its JSON files can name code to import, another file to read or an attention kernel
to fetch, and the loaders of the ecosystem follow some of these names. So every file they would read is looked at
first, here and nowhere else, and a folder that asks for more than weights and settings is refused with the key that
asked. This is not a virus scanner: weights that are safe to open can still be bad weights.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from cohobate.errors import ConfigError

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_JSON_BYTES = 64 * 1024 * 1024

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@ -]{0,254}", re.ASCII)
_DEVICE_NAME = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.ASCII | re.IGNORECASE)
_KERNEL_NAME = re.compile(r"[a-z0-9_]+", re.ASCII)


def is_plain_name(name: object) -> bool:
    """Whether a name that was read from a file can only mean a file of that very folder, on any system."""
    if not isinstance(name, str) or _PLAIN_NAME.fullmatch(name) is None:
        return False
    return _DEVICE_NAME.fullmatch(name) is None and name[-1] not in ". "


def check_config_files(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a folder whose settings name code, kernels or files outside it.

    Raises:
        ConfigError: naming the file, the key and what to do.
    """
    _check_links(folder)
    for name in CONFIG_FILES:
        path = folder / name
        if path.is_file():
            for place, key, value in _entries(read_json(path)):
                _check_entry(path, place, key, value, trust_remote_code)


def check_weight_files(folder: Path) -> None:
    """Refuse a folder without safetensors weights, with hostile shard names, or with a damaged or missing shard.

    Raises:
        ConfigError: naming the file and what to do.
    """
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} holds a LoRA adapter, not a whole model. Its own file must not choose the base model: load the "
            f"base model by name and put the adapter on it with peft.PeftModel.from_pretrained(base, {str(folder)!r})."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder. It holds: {_listing(folder)}.")
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file():
        shards = [WEIGHTS]
    elif index.is_file():
        shards = _indexed_shards(index)
    else:
        raise ConfigError(_no_safetensors(folder))
    for shard in shards:
        _check_shard(folder / shard)


def read_json(path: Path) -> Any:
    """The content of a JSON file of bounded size; anything else is a `ConfigError` that names the file."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ConfigError(f"{path} has {size} bytes; a settings file of a model has at most {MAX_JSON_BYTES}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not readable JSON ({problem}). Copy the model again.") from None


def _entries(content: Any) -> Iterator[tuple[str, str, Any]]:
    """Every key of nested objects and lists, as (dotted place, key, value)."""
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, dict):
            for key, value in node.items():
                yield f"{place}{key}", key, value
                waiting.append((f"{place}{key}.", value))
        elif isinstance(node, list):
            waiting.extend((f"{place}{i}.", value) for i, value in enumerate(node))


def _check_entry(path: Path, place: str, key: str, value: Any, trust_remote_code: bool) -> None:
    refused = f"{path}: {place} = {str(value)[:200]!r} is refused"
    if key == "auto_map" and value:
        if "--" in json.dumps(value):
            raise ConfigError(
                f"{refused}: it fetches code from another repository. Copy that code into the folder first."
            )
        if not trust_remote_code:
            raise ConfigError(
                f"{refused}: the model asks to run its own Python code, and nothing is executed unless you ask for "
                "it. Read that code, then pass trust_remote_code; or use a model of an architecture transformers "
                "knows."
            )
    elif key == "trust_remote_code" and value:
        raise ConfigError(f"{refused}: a file does not decide whether its own code runs. Remove the key.")
    elif key in ("_attn_implementation_internal", "_experts_implementation_internal", "configuration_files"):
        raise ConfigError(f"{refused}: this private key redirects the loader. Remove it from the file.")
    elif key in ("_attn_implementation", "attn_implementation"):
        for name in value.values() if isinstance(value, dict) else (value,):
            if name is not None and not (isinstance(name, str) and _KERNEL_NAME.fullmatch(name)):
                raise ConfigError(f"{refused}: it names a kernel to fetch. Remove it and pass attn_implementation.")
    elif key == "transformers_weights":
        raise ConfigError(f"{refused}: weights are read from {WEIGHTS} or {WEIGHTS_INDEX} only. Remove the key.")
    elif key == "fast_tokenizer_files" or (key == "chat_template" and isinstance(value, list)):
        for item in value if isinstance(value, list) else [value]:
            name = item.get("name") if isinstance(item, dict) else item
            if not is_plain_name(name):
                raise ConfigError(f"{refused}: {name!r} is not a plain name, and it would be used as part of a path.")


def _check_links(folder: Path) -> None:
    """No file may be a link out of the folder; the model cache of huggingface_hub links into its own `blobs`."""
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_file() and not path.resolve().is_relative_to(root):
            raise ConfigError(
                f"{path} is a link to {path.resolve()}, outside the model folder. Copy the file instead."
            )


def _indexed_shards(index: Path) -> list[str]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map of tensor names to shard files. Copy the model again.")
    for tensor, shard in weight_map.items():
        if not is_plain_name(shard) or not shard.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: tensor {tensor!r} is said to be in {shard!r}, which is not the plain name of a "
                ".safetensors file in this folder. The index may be an attempt to read another file; do not use this "
                "model."
            )
    return sorted(set(weight_map.values()))


def _check_shard(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{path} is missing. Copy the model again.")
    try:
        with safe_open(path, framework="pt"):
            pass
    except Exception as problem:
        raise ConfigError(f"{path} is not a whole safetensors file ({problem}). Copy the model again.") from None


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if not pickles:
        return f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}. It holds: {_listing(folder)}."
    return (
        f"{folder} has weights only as {', '.join(pickles[:4])}. Such files are pickles, which can run code when "
        "they are opened, so they are never read here. If you trust the source, convert them in a place where that "
        "does no harm: load with transformers, then save_pretrained writes safetensors."
    )


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
