"""Gradient accumulation on the host, for loops that apply gradients themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.base.errors import (
    AccumulatorFullError,
    ArgumentError,
    DTypeError,
    GradientShapeError,
    NameTakenError,
    NothingAccumulatedError,
    UnknownParameterError,
)
from treadle.base.numbers import POSITIVE, check_number

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class AccumulationStats:
    """What an accumulator has done: in this window, and since it was made."""

    steps: int  # micro-batches of a full window
    accumulated: int  # micro-batches in this one
    weight: float  # of those
    micro_batches: int  # in all
    updates: int
    clipped: int  # updates that were
    grad_norm: float | None  # of the last update, before clipping
    parameters: int
    elements: int


class GradientAccumulator:
    """Adds up the gradients of `steps` micro-batches, then gives them for one update.

    `normalize` divides by the weight of all micro-batches, 1 each unless told; otherwise gradients
    are summed. `max_grad_norm` bounds the norm of the result, all parameters together. Steps that
    are compiled with `accumulate` do the same without leaving the program; this is for the rest.
    """

    def __init__(self, steps: int, normalize: bool = True, max_grad_norm: float | None = None):
        if not isinstance(steps, int) or steps < 1:
            raise ArgumentError("GradientAccumulator", f"steps = {steps}", "At least 1.")
        if max_grad_norm is not None:
            check_number("GradientAccumulator", "max_grad_norm", max_grad_norm, POSITIVE)
        self.steps, self.normalize, self.max_grad_norm = steps, normalize, max_grad_norm
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._micro_batches = self._updates = self._clipped = 0
        self._norm: float | None = None
        self.reset()

    def register(self, name: str, shape: Sequence[int]) -> None:
        """Expect gradients of a parameter; those of others are refused."""
        if name in self._shapes:
            raise NameTakenError("register", f"{name} is registered already")
        self._shapes[name] = tuple(int(n) for n in shape)

    def accumulate(self, gradients: Mapping[str, object], weight: float = 1.0) -> None:
        """Add the gradients of one micro-batch; of parameters left out they are zero.

        Gradients are means over the micro-batch, and `weight` is what they are means over (rows,
        tokens) where that differs between micro-batches. All or nothing.
        """
        if self.should_update:
            raise AccumulatorFullError(
                "accumulate",
                f"{self.steps} of {self.steps} micro-batches are there",
                "Call step() for the update first, or reset().",
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise ArgumentError("accumulate", f"weight = {weight}", "It is not negative.")
        checked = {name: self._checked(name, g) for name, g in gradients.items()}
        if not checked:
            raise ArgumentError("accumulate", "there are no gradients", "Pass them by name.")
        for name, gradient in checked.items():
            # A micro-batch that counts for nothing may have the gradient of 0 / 0.
            added = gradient * gradient.dtype.type(weight) if weight else np.zeros_like(gradient)
            known = self._totals.get(name)
            self._totals[name] = added if known is None else known + added
        self._accumulated += 1
        self._micro_batches += 1
        self._weight += weight

    def _checked(self, name: str, gradient: object) -> np.ndarray:
        """The gradient as float32 or wider, which sums do not wear away."""
        if name not in self._shapes:
            known = ", ".join(self._shapes) or "none"
            raise UnknownParameterError(
                "accumulate", f"there is no parameter {name!r}; registered: {known}", "Register it."
            )
        array = np.asarray(gradient)
        if array.shape != self._shapes[name]:
            raise GradientShapeError("accumulate", name, self._shapes[name], array.shape)
        if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
            raise DTypeError(
                "accumulate", f"the gradient of {name} is {array.dtype}", "Use floats."
            )
        return array.astype(np.float64 if array.dtype.itemsize == 8 else np.float32)

    @property
    def should_update(self) -> bool:
        """Whether all micro-batches of an update are there."""
        return self._accumulated >= self.steps

    def gradients(self) -> Arrays:
        """The gradients so far, averaged or summed, then clipped. Nothing changes."""
        return self._clip(*self._combined())

    def step(self) -> Arrays:
        """The gradients for the update; then the next window begins. A window may be cut short."""
        gradients, norm = self._combined()
        clipped = self._clip(gradients, norm)
        self._updates += 1
        self._clipped += self.max_grad_norm is not None and norm > self.max_grad_norm
        self._norm = norm
        self.reset()
        return clipped

    def _combined(self) -> tuple[Arrays, float]:
        """Averages or sums, and their norm."""
        if not self._accumulated:
            raise NothingAccumulatedError(
                "gradients", f"0 of {self.steps} micro-batches are there", "Call accumulate first."
            )
        if self.normalize and not self._weight:
            raise NothingAccumulatedError(
                "gradients", "all micro-batches have the weight 0", "There is nothing to average."
            )
        divisor = self._weight if self.normalize else 1.0
        found: Arrays = {}
        for name, shape in self._shapes.items():
            total = self._totals.get(name, np.zeros(shape, np.float32))
            found[name] = np.asarray(total / total.dtype.type(divisor))
        squares = (float(np.square(g, dtype=np.float64).sum()) for g in found.values())
        return found, math.sqrt(sum(squares))

    def _clip(self, gradients: Arrays, norm: float) -> Arrays:
        """As PyTorch's clip_grad_norm_ and the step's clip_norm."""
        if self.max_grad_norm is None:
            return gradients
        scale = min(self.max_grad_norm / (norm + 1e-6), 1.0)
        return {n: np.asarray(g * g.dtype.type(scale)) for n, g in gradients.items()}

    def reset(self) -> None:
        """Forget what was accumulated since the last update."""
        self._totals: Arrays = {}
        self._accumulated, self._weight = 0, 0.0

    @property
    def stats(self) -> AccumulationStats:
        """Counts, weights and the last norm."""
        return AccumulationStats(
            self.steps,
            self._accumulated,
            self._weight,
            self._micro_batches,
            self._updates,
            self._clipped,
            self._norm,
            len(self._shapes),
            sum(math.prod(shape) for shape in self._shapes.values()),
        )

    def effective_batch_size(self, micro_batch_size: int) -> int:
        """How many samples one update sees."""
        if micro_batch_size < 1:
            cause = f"micro_batch_size = {micro_batch_size}"
            raise ArgumentError("effective_batch_size", cause, "At least 1.")
        return self.steps * micro_batch_size

    def __repr__(self) -> str:
        kind = "mean" if self.normalize else "sum"
        return f"GradientAccumulator({self._accumulated} of {self.steps}, {kind})"
