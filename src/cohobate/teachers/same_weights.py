# SPDX-License-Identifier: Apache-2.0
"""Teachers made of the student's own weights: as they were, as they were on average, without the adapter, as they are.

All four run the student's one module; none is a mode that it is left in. `frozen` and `ema` keep a copy of the
trainable tensors only, and lend it to the module for the length of a call (`torch.func.functional_call`), so under
LoRA they cost the size of the adapter. Each is described by a frozen dataclass, as a recipe names it, and made by its
`build`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError
from cohobate.functional.scores import DenseScores, HiddenScores
from cohobate.parallel.modules import is_sharded
from cohobate.teachers.local import ModelScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTeacher:
    """The student's weights at the moment of `build`."""

    def build(self, student_model: nn.Module, vocab_size: int | None = None) -> "Frozen":
        return Frozen(student_model, vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EMATeacher:
    """A moving average of the student's weights: after each step `shadow = decay * shadow + (1 - decay) * student`.

    It starts from the weights at the moment of `build`, in float32 whatever the student's dtype.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(
                f"decay must be in [0, 1], got {self.decay}. It is the share of the old average that stays: an update "
                "rate of 0.05 is a decay of 0.95."
            )

    def build(self, student_model: nn.Module, vocab_size: int | None = None) -> "EMA":
        return EMA(student_model, vocab_size, decay=self.decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOffTeacher:
    """The base model below the student's PEFT adapter."""

    def build(self, student_model: nn.Module, vocab_size: int | None = None) -> "AdapterOff":
        return AdapterOff(student_model, vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTeacher:
    """The student as it is when it scores: the teacher differs only in what it sees."""

    def build(self, student_model: nn.Module, vocab_size: int | None = None) -> "Live":
        return Live(student_model, vocab_size)


class Live:
    """Scores with the student's current weights."""

    def __init__(self, student_model: nn.Module, vocab_size: int | None = None):
        self._scorer = ModelScorer(student_model, vocab_size)

    @property
    def provides(self) -> type:
        return self._scorer.provides

    def pack_rows(self, name: str = "teacher") -> None:
        self._scorer.pack_rows(name)

    def score(self, batch: AlignedBatch, /) -> HiddenScores | DenseScores:
        return self._scorer(batch.teacher)


class AdapterOff:
    """Scores with the student's adapter switched off for the length of the call."""

    def __init__(self, student_model: nn.Module, vocab_size: int | None = None):
        self._scorer = ModelScorer(student_model, vocab_size)
        model = self._scorer.model
        if not hasattr(model, "disable_adapter"):
            raise ConfigError(
                f"adapter_off needs a PEFT student, got {type(model).__name__} without adapters. Give the run a "
                "peft_config, or use the frozen teacher."
            )
        moving = _trainable_outside_adapters(model)
        if moving:
            raise ConfigError(
                f"adapter_off would not stand still: {len(moving)} trainable weights lie outside the adapter, first "
                f"{moving[0]!r}. Freeze them (LoRA with bias='none'), or use the frozen teacher."
            )

    @property
    def provides(self) -> type:
        return self._scorer.provides

    def pack_rows(self, name: str = "teacher") -> None:
        self._scorer.pack_rows(name)

    def score(self, batch: AlignedBatch, /) -> HiddenScores | DenseScores:
        with _adapter_off(self._scorer.model):
            return self._scorer(batch.teacher)


class Frozen:
    """Scores with the weights the student had when this was made."""

    def __init__(self, student_model: nn.Module, vocab_size: int | None = None):
        self._scorer = ModelScorer(student_model, vocab_size)
        self._shadow = _Shadow(self._scorer.model, keep_dtype=True)

    @property
    def provides(self) -> type:
        return self._scorer.provides

    def pack_rows(self, name: str = "teacher") -> None:
        self._scorer.pack_rows(name)

    def score(self, batch: AlignedBatch, /) -> HiddenScores | DenseScores:
        return self._scorer(batch.teacher, self._shadow.call)


class EMA:
    """Scores with a moving average of the student's weights, which `after_optimizer_step` moves."""

    def __init__(self, student_model: nn.Module, vocab_size: int | None = None, *, decay: float):
        self._scorer = ModelScorer(student_model, vocab_size)
        self._shadow = _Shadow(self._scorer.model, keep_dtype=False)
        self.decay = decay
        self.num_updates = 0

    @property
    def provides(self) -> type:
        return self._scorer.provides

    def pack_rows(self, name: str = "teacher") -> None:
        self._scorer.pack_rows(name)

    def score(self, batch: AlignedBatch, /) -> HiddenScores | DenseScores:
        return self._scorer(batch.teacher, self._shadow.call)

    def after_optimizer_step(self) -> None:
        """`shadow = decay * shadow + (1 - decay) * student`, in the shadow's float32."""
        self._shadow.move(1 - self.decay)
        self.num_updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The averages (as they are, not copies) under `shadow.<parameter>`, and the number of updates."""
        state = {f"shadow.{name}": value for name, value in self._shadow.tensors.items()}
        state["num_updates"] = torch.tensor(self.num_updates, dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        """Continue exactly from `state_dict()`; other names, shapes or dtypes are refused and nothing is changed."""
        own = self.state_dict()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise ValueError(
                f"this EMA state belongs to another student: missing {missing[:3]}, unknown {unknown[:3]} "
                f"({len(missing)} and {len(unknown)} in all)."
            )
        for name, value in own.items():
            if state[name].shape != value.shape or state[name].dtype != value.dtype:
                raise ValueError(
                    f"this EMA state belongs to another student: {name} is {state[name].dtype} "
                    f"{tuple(state[name].shape)}, expected {value.dtype} {tuple(value.shape)}."
                )
        self._shadow.load({name: state[f"shadow.{name}"] for name in self._shadow.tensors})
        self.num_updates = int(state["num_updates"])


class _Shadow:
    """A copy of a model's trainable tensors, and the model run under them."""

    def __init__(self, model: nn.Module, *, keep_dtype: bool):
        self._model = model
        self.tensors: dict[str, Tensor] = {}
        self._lent: dict[str, Tensor] | None = None
        _check_whole(model)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            dtype = parameter.dtype if keep_dtype else torch.promote_types(parameter.dtype, torch.float32)
            self.tensors[name] = parameter.detach().to(dtype, copy=True)
        if not self.tensors:
            raise ConfigError("the student has no trainable weight, so a frozen or averaged copy of it says nothing.")

    def call(self, **inputs: Any) -> Any:
        """The model's forward under the shadow; the module itself is untouched before and after."""
        return functional_call(self._model, self._as_parameters(), kwargs=inputs)

    def move(self, rate: float) -> None:
        """`shadow += rate * (student - shadow)`."""
        with torch.no_grad():
            for name, parameter in self._current().items():
                shadow = self.tensors[name]
                shadow.lerp_(parameter.detach().to(shadow.dtype), rate)
        self._lent = None

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            self.tensors[name] = value.detach().to(self.tensors[name].device, copy=True)
        self._lent = None

    def _as_parameters(self) -> dict[str, Tensor]:
        """The shadow in the student's dtypes, cast once after each move."""
        current = self._current()
        if self._lent is None or any(self._lent[n].dtype != p.dtype for n, p in current.items()):
            self._lent = {name: self.tensors[name].to(parameter.dtype) for name, parameter in current.items()}
        return self._lent

    def _current(self) -> dict[str, nn.Parameter]:
        """The student's trainable parameters of now, by the names of then; the shadow follows them to their device."""
        current = dict(self._model.named_parameters())
        new = [name for name, p in current.items() if p.requires_grad and name not in self.tensors]
        gone = [name for name in self.tensors if name not in current]
        if new or gone:
            raise ConfigError(
                f"the student changed after its teacher was made: newly trainable {new[:3]}, gone {gone[:3]}. Make "
                "the teacher after adapters are added and weights are frozen or unfrozen."
            )
        _check_whole(self._model)
        for name, shadow in self.tensors.items():
            if shadow.device != current[name].device:
                self.tensors[name] = shadow.to(current[name].device)
                self._lent = None
        return {name: current[name] for name in self.tensors}


def _check_whole(model: nn.Module) -> None:
    if is_sharded(model):
        raise ConfigError(
            "the student's weights are sharded over ranks (FSDP, ZeRO-3); frozen and ema teachers need whole ones. "
            "Use adapter_off with PEFT, or give the initial model as a separate teacher."
        )


def _trainable_outside_adapters(model: Any) -> list[str]:
    """Trainable weights that still act when the adapter is off."""
    prefix = getattr(model.base_model, "prefix", None)
    markers = ("modules_to_save", "trainable_tokens", *((prefix,) if prefix else ()))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name in names if prefix and not any(marker in name for marker in markers)]


@contextmanager
def _adapter_off(model: Any) -> Iterator[None]:
    """PEFT's own switch, with what it does not give back exactly: it makes every active adapter trainable."""
    merged = [name for name, module in model.named_modules() if getattr(module, "merged", False)]
    if merged:
        raise ValueError(
            f"the student's adapter is merged into its weights (first in {merged[0]!r}), so switching it off would "
            "change the student. Call unmerge_adapter() first."
        )
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    switches = [(m, m._disable_adapters) for m in model.modules() if "_disable_adapters" in vars(m)]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
        for module, off in switches:
            module._disable_adapters = off
