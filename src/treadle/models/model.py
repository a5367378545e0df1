"""`Model`: a module with a configuration and values of its own, which runs outside of a trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, LoadError
from treadle.compile_report import CompileOptions
from treadle.frontend.binding import tensor_of
from treadle.frontend.coerce import as_tensor
from treadle.frontend.functions.activations import gelu, hardswish, relu, relu6, sigmoid, silu
from treadle.frontend.functions.arithmetic import tanh
from treadle.frontend.scopes import current_trace
from treadle.frontend.tensor import Operand, Tensor
from treadle.models.config import Config
from treadle.nn.module import Declaration, Module, held
from treadle.nn.quantization import Quantized
from treadle.pipeline import choose_device, open_session
from treadle.runtime.foreign import readable
from treadle.runtime.session import Session
from treadle.step.forward import Forward, compile_forward

FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
MOST_PROGRAMS = 4  # sets of programs and caches for generation that a model holds: chosen
_LENDING = threading.RLock()  # held while a set of programs is chosen, of any model


def quick_gelu(x: Operand) -> Tensor:
    """x · sigmoid(1.702 x), the GELU of CLIP."""
    value = as_tensor(x)
    return value * sigmoid(value * 1.702)


def gelu_new(x: Operand) -> Tensor:
    """GELU by tanh, as GPT-2 has it."""
    return gelu(x, "tanh")


ACTIVATIONS: dict[str, Callable[[Operand], Tensor]] = {
    "gelu": gelu,
    "gelu_fast": gelu_new,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "hardswish": hardswish,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu6": relu6,
    "silu": silu,
    "swish": silu,
    "tanh": tanh,
}


def check_activation(config: Config, name: str) -> None:
    known = ", ".join(sorted(ACTIVATIONS))
    config.need(getattr(config, name) in ACTIVATIONS, name, f"Known are: {known}.")


def float_named(given: object) -> dtypes.DType:
    """A float that values may lie in memory as, or that products are computed in."""
    for dtype in FLOATS:
        if given in (dtype, dtype.name):
            return dtype
    known = ", ".join(d.name for d in FLOATS)
    raise ArgumentError("models", f"{given!r} is not a dtype for values", f"Known are: {known}.")


@dataclass(frozen=True)
class Holder:
    """Where a model's values are, for programs to share."""

    session: Session


class Model(Module):
    """A module that has a `config`, and may have been given values.

    Inside of a trace it is a module as any. Outside, `model(tokens)` compiles its forward, once for
    each shape, and gives arrays.
    """

    config: Config
    source: Mapping[str, Any] = {}  # config.json as it was read
    companions: Mapping[str, bytes] = {}  # files of its folder that `save` writes again, by name
    architecture = ""  # what `transformers` or `diffusers` calls it
    library = "transformers"  # whose names the files of its folder have
    prefix = ""  # begins the names of what is below the head
    ignored: tuple[str, ...] = ()  # patterns of names in files that are no values of the model
    renamed: tuple[tuple[str, str], ...] = ()  # patterns of names in older files, and what they are
    _holder: Holder | None = None  # of the values, once a program needs them
    _programs: Sequence[Any] = ()  # of the last generations, and of those that are running
    _running: Forward | None = None
    _keywords: tuple[str, ...] = ()
    _device: str = "auto"
    _precision: str = "float32"

    @property
    def device(self) -> str:
        """Where it runs outside of a trace; it may be changed at any time."""
        return self._device

    @device.setter
    def device(self, name: str) -> None:
        self._device, before = name, self._device
        if name != before:
            self._restructured()

    @property
    def precision(self) -> str:
        """What products are computed in outside of a trace; it may be changed at any time."""
        return self._precision

    @precision.setter
    def precision(self, name: str) -> None:
        self._precision, before = name, self._precision
        if name != before:
            self._restructured()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        first = next(self.parameters(), None)
        if current_trace() is not None or first is None or tensor_of(first) is not None:
            return self.forward(*arguments, **keywords)
        given = {k: _array(v) for k, v in keywords.items() if v is not None}
        batch = {"arguments": tuple(map(_array, arguments)), "keywords": given}
        return self.running(batch)(batch)

    def running(self, batch: Any) -> Forward:
        """The compiled forward for arguments such as these."""
        names = (str(len(batch["arguments"])), *batch["keywords"])
        if self._running is None or self._keywords != names:
            self._running, self._keywords = self._compiled(batch), names
        return self._running

    def _compiled(self, batch: Any) -> Forward:
        def forward(model: Model, given: Any) -> Any:
            return model.forward(*given["arguments"], **given["keywords"])

        return compile_forward(
            self,
            forward,
            batch,
            device=self.device,
            precision=self.precision,
            share=self._held(None),
            options=CompileOptions(on_new_shape="specialise"),
        )

    def kept(
        self, fits: Callable[[Any], bool], opened: Callable[[Any], Any], share: Any = None
    ) -> Any:
        """Programs of an earlier generation that fit, or others, in the session of `share`.

        Without `share` they are in the model's own. They are lent to one run at a time, which
        gives them back; the last few are held.
        """
        holder = self._held(share)
        with _LENDING:
            free = [p for p in self._programs if not p.is_lent]
            fit = [p for p in free if p.session is holder.session and fits(p)]
            found = fit[-1] if fit else opened(holder)
            found.is_lent = True
            others = [p for p in self._programs if p is not found]
            too_many = len(others) + 1 - MOST_PROGRAMS
            old = [p for p in others if p in free][: max(0, too_many)]
            for before in old:
                before.close()
            self._programs = [*(p for p in others if p not in old), found]
        return found

    def _held(self, share: Any) -> Holder:
        """What holds the values: what was told, or the model's own."""
        device = choose_device(self.device)
        if share is not None:
            return Holder(open_session(device, share))
        with _LENDING:
            self._holder = self._holder or Holder(open_session(device, None))
            return self._holder

    def start_from(self, values: Mapping[str, object]) -> None:
        """Take values by name, as `step.params` gives them: what programs start from, and save.

        All or nothing. What is shared may be given by any of its names.
        """
        declared = self.declarations()
        found: dict[str, np.ndarray] = {}
        unexpected = []
        for name, value in values.items():
            first = name if name in declared else self.first_name(name)
            if first is None:
                unexpected.append(name)
            else:
                found[first] = _as_pairs(np.asarray(readable(value)))
        missing = [n for n in declared if n not in found]
        if missing or unexpected:
            cause = f"missing: {listed(missing)}; unexpected: {listed(unexpected)}"
            raise LoadError("start_from", cause, "Check that it is the same model.")
        wrong = [n for n, a in found.items() if a.shape != declared[n].shape]
        if wrong:
            name = wrong[0]
            cause = f"{name} is {declared[name].type}, given the shape {found[name].shape}"
            raise LoadError("start_from", cause, "Check that it is the same model.")
        for name, array in found.items():
            declared[name].init = held(array)
        self._restructured()

    def _restructured(self) -> None:
        """Programs that were compiled with other values or parts are not used again."""
        with _LENDING:
            for before in self._programs:
                if not before.is_lent:  # a run that is open goes on with what it began with
                    before.close()
            self._running = self._holder = None
            self._programs = ()

    def hold(self, dtype: object) -> Self:
        """Lie in memory in another float, bfloat16 or float16: half of the bytes of float32.

        Values are rounded once. What is computed is as before, in the model's precision. Quantized
        weights stay as they are, their scales too.
        """
        held = float_named(dtype)
        packed = [part for part in self.modules() if isinstance(part, Quantized)]
        stay = {id(p) for part in packed for p in part.parameters()}
        for parameter in self.parameters():
            if parameter.dtype.is_float and id(parameter) not in stay:
                parameter.hold(held)
        self._restructured()
        return self

    def values(self) -> dict[str, np.ndarray]:
        """Parameters and states by name, in their own dtypes."""
        return {n: value_of(d, n) for n, d in self.declarations().items()}


def value_of(declaration: Declaration, name: str) -> np.ndarray:
    return declaration.first_value(0, name)


def _as_pairs(array: np.ndarray) -> np.ndarray:
    """Complex numbers as real and imaginary parts, in a last axis of two."""
    is_complex = array.dtype.kind == "c"
    return np.stack([array.real, array.imag], -1) if is_complex else array


def _array(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.numpy()
    return np.asarray(value) if isinstance(value, (list, tuple)) else value


def listed(names: list[str], most: int = 8) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
