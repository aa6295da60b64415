# SPDX-License-Identifier: Apache-2.0
"""The student as a checkpoint that a server can load while the student goes on training.

Nothing of the live model is touched: an adapter is merged into a copy of one weight at a time, in float32; weights
that FSDP2 or a tensor-parallel mesh splits are gathered one by one, on every rank; a tied head is written as a tensor
of its own, since an engine that packed its head when it started does not see the embedding change. Names and layouts
are those that `save_pretrained` writes.

What cannot be read without guessing is refused by name: weights that are whole only inside a forward pass (ZeRO-3,
FSDP1), quantised weights, and adapters other than plain LoRA.
"""

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cohobate.errors import ConfigError
from cohobate.files import written_whole
from cohobate.parallel.modules import gathered, is_whole_only_inside, release_gathered, unwrapped

_FOLDER = re.compile(r"policy-\d+")


def check_exportable(model: nn.Module) -> None:
    """Raise `ConfigError` for a model whose weights cannot be handed on."""
    if is_whole_only_inside(model):
        raise ConfigError(
            "rollouts from a server need the student's whole weights between steps, and DeepSpeed ZeRO-3 and FSDP1 "
            "gather them only inside its forward pass. Use DDP, ZeRO-1 or 2, or FSDP2, or sample here (rollouts.kind "
            "local)."
        )
    for _ in _tensors(_base(unwrapped(model)), "", read=False):
        pass


@torch.no_grad()
def whole_state(model: nn.Module, *, keep: bool = True, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Every weight by its name in a checkpoint, whole, on the CPU; empty where `keep` is false.

    Every rank must call it: sharded weights are gathered. A weight that is on the CPU, whole and unmerged is the
    live tensor itself, so it must be written before the next optimizer step. `dtype`: None keeps each one's own.
    """
    check_exportable(model)
    model = unwrapped(model)
    release_gathered(model)
    state: dict[str, Tensor] = {}
    for name, tensor in _tensors(_base(model), "", read=True):
        if keep:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            state[name] = tensor.detach().to("cpu", wanted)
    return _as_saved(_base(model), state) if keep else {}


def write_weights(state: dict[str, Tensor], config: Any, folder: Path) -> None:
    """`state` as `folder/model.safetensors`, each tensor with storage of its own, and a config that ties nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    alone = {}
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        alone[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    with written_whole(folder / "model.safetensors") as temporary:
        save_file(alone, temporary, metadata={"format": "pt"})
    if config is not None:
        config = copy.deepcopy(config)
        config.tie_word_embeddings = False
        with written_whole(folder / "config.json") as temporary:
            config.to_json_file(temporary)


def version_folder(root: Path, version: int) -> Path:
    return root / f"policy-{version:08d}"


def delete_versions(root: Path, *, but: Path | None = None) -> None:
    """Delete what `version_folder` has named in `root`, except `but`."""
    for path in root.glob("policy-*") if root.is_dir() else ():
        if path != but and _FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _base(model: nn.Module) -> nn.Module:
    """The transformers model below PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]


def _as_saved(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the names and layouts of a checkpoint, where transformers holds them otherwise (fused experts)."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state) if isinstance(model, PreTrainedModel) else state


def _tensors(module: nn.Module, prefix: str, *, read: bool) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers below `module`; tied ones under each of their names."""
    if hasattr(module, "base_layer") and hasattr(module, "merged_adapters"):
        yield from _adapted(module, prefix, read=read)
        return
    if hasattr(module, "original_module") and hasattr(module, "_active_adapter"):
        yield from _tensors(_trained_copy(module, prefix), prefix, read=read)
        return
    own = [*module.named_parameters(recurse=False)]
    unsaved = module._non_persistent_buffers_set
    own += [(name, b) for name, b in module.named_buffers(recurse=False) if name not in unsaved]
    for name, tensor in own:
        if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
            raise ConfigError(
                f"{prefix}{name} is quantised ({tensor.dtype}): what a server would make of it is not what is "
                "trained. Load the student unquantised, or sample here (rollouts.kind local)."
            )
        yield prefix + name, gathered(tensor) if read else tensor
    for name, child in module.named_children():
        yield from _tensors(child, f"{prefix}{name}.", read=read)


def _trained_copy(module: Any, prefix: str) -> nn.Module:
    """The one of PEFT's `modules_to_save` that is in use."""
    copies = getattr(module, "modules_to_save", None)
    if copies is None:
        raise _unknown(module, prefix)
    if module.disable_adapters:
        return module.original_module
    active = [name for name in module.active_adapters if name in copies]
    return copies[active[0]] if active else module.original_module


def _adapted(module: Any, prefix: str, *, read: bool) -> Iterator[tuple[str, Tensor]]:
    """The layer below an adapter, with `weight + scaling * B A` in place of its weight."""
    if not hasattr(module.base_layer, "weight"):  # an adapter on parameters that are no layer's weight
        raise _unknown(module, prefix)
    for name, tensor in _tensors(module.base_layer, prefix, read=read):
        if name != f"{prefix}weight":
            yield name, tensor
            continue
        merged = tensor
        for adapter in module.active_adapters:
            if module.disable_adapters or adapter in module.merged_adapters:
                continue
            factors = _factors(module, adapter, prefix)
            if factors is not None and read:
                a, b, transposed = factors
                delta = (gathered(b).float() @ gathered(a).float()) * module.scaling[adapter]
                merged = merged.float() + (delta.T if transposed else delta)
        yield name, merged.to(tensor.dtype)


def _factors(module: Any, adapter: str, prefix: str) -> tuple[Tensor, Tensor, bool] | None:
    """A `[r, in]`, B `[out, r]`, and whether the weight is `[in, out]`; None: the adapter is not on this layer."""
    linear, embedding = getattr(module, "lora_A", {}), getattr(module, "lora_embedding_A", {})
    if adapter not in linear and adapter not in embedding:
        if hasattr(module, "lora_A"):
            return None
        raise _unknown(module, prefix)
    if adapter in getattr(module, "lora_variant", {}) or getattr(module, "lora_bias", {}).get(adapter, False):
        raise _unknown(module, prefix)
    if adapter in embedding:
        return module.lora_embedding_A[adapter], module.lora_embedding_B[adapter], True
    a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    if a.dim() != 2 or module.base_layer.weight.dim() != 2:
        raise _unknown(module, prefix)
    return a, b, bool(getattr(module, "fan_in_fan_out", False))


def _unknown(module: nn.Module, prefix: str) -> ConfigError:
    kind = type(module)
    return ConfigError(
        f"the adapter on {prefix.rstrip('.')} ({kind.__module__}.{kind.__name__}) is none that can be merged for a "
        "server: plain LoRA on linear layers and embeddings, and modules_to_save, can. Use these, or sample here "
        "(rollouts.kind local)."
    )
