"""Initialisers: functions from a shape and a random stream to values. PyTorch's distributions."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FINITE, NOT_NEGATIVE, check_choice, check_number
from treadle.base.shapes import Shape, size_of

Init = Callable[[Shape, np.random.Generator], np.ndarray]
PART = 1 << 18  # elements of a large array that are drawn from a stream of their own


def stream(seed: int, name: str) -> np.random.Generator:
    """A random stream of its own for each parameter: adding one changes no other."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


Fill = Callable[[np.random.Generator, np.ndarray], object]


def _drawn(
    fill: Fill, shape: Shape, rng: np.random.Generator, factor: float, offset: float
) -> np.ndarray:
    """Numbers of a shape, scaled and moved. Parts of a large one are drawn side by side.

    The parts are the same on every machine, and so are the numbers. Threads write into one array:
    what they would allocate themselves the C library would keep.
    """
    found = np.empty(size_of(shape))
    starts = range(0, found.size, PART)
    jumped = getattr(rng.bit_generator, "jumped", None)  # not every generator of a user's has it
    if len(starts) < 2 or jumped is None:
        streams, parts = [rng], [found]
    else:
        streams = [rng, *(np.random.Generator(jumped(i)) for i in range(1, len(starts)))]
        parts = [found[start : start + PART] for start in starts]

    def draw(stream: np.random.Generator, part: np.ndarray) -> None:
        fill(stream, part)
        part *= factor
        part += offset

    if len(parts) == 1:
        draw(rng, found)
    else:
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
            list(pool.map(draw, streams, parts))
    return found.reshape(shape)


def _normal(shape: Shape, rng: np.random.Generator, mean: float, std: float) -> np.ndarray:
    return _drawn(lambda stream, part: stream.standard_normal(out=part), shape, rng, std, mean)


def _uniform(shape: Shape, rng: np.random.Generator, low: float, high: float) -> np.ndarray:
    return _drawn(lambda stream, part: stream.random(out=part), shape, rng, high - low, low)


def zeros(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Zeros."""
    return np.zeros(shape)


def ones(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Ones."""
    return np.ones(shape)


def constant(value: float) -> Init:
    """One value everywhere; a state may begin with an infinity."""
    is_infinite = isinstance(value, float) and math.isinf(value)
    number = value if is_infinite else check_number("constant", "value", value, FINITE)
    return lambda shape, rng: np.full(shape, number)


def literal(array: object) -> Init:
    """These values; the shape must be the parameter's."""
    values = np.array(array)

    def make(shape: Shape, rng: np.random.Generator) -> np.ndarray:
        if values.shape != shape:
            raise ArgumentError(
                "literal",
                f"an array of shape {values.shape} for a parameter of shape {shape}",
                "They must be equal.",
            )
        return values.copy()

    return make


def normal(mean: float = 0.0, std: float = 1.0) -> Init:
    """Normal with a mean and a standard deviation."""
    check_number("normal", "mean", mean, FINITE)
    check_number("normal", "std", std, NOT_NEGATIVE)
    return lambda shape, rng: _normal(shape, rng, mean, std)


def uniform(low: float = 0.0, high: float = 1.0) -> Init:
    """Uniform in [low, high)."""
    for name, bound in (("low", low), ("high", high)):
        check_number("uniform", name, bound, FINITE)
    if not low <= high:
        raise ArgumentError("uniform", f"low = {low}, high = {high}", "Give low ≤ high.")
    return lambda shape, rng: _uniform(shape, rng, low, high)


def truncated_normal(
    mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0
) -> Init:
    """Normal, drawn again until it lies in [low, high]."""
    named = (("mean", mean), ("std", std), ("low", low), ("high", high))
    for name, value in named:
        check_number("truncated_normal", name, value, FINITE)
    if not low < high or not std > 0:
        raise ArgumentError(
            "truncated_normal",
            f"std = {std}, bounds {low} and {high}",
            "The standard deviation is positive and low < high.",
        )
    inside = _normal_below((high - mean) / std) - _normal_below((low - mean) / std)
    if not inside > 1e-4:
        raise ArgumentError(
            "truncated_normal",
            f"almost nothing of mean {mean} and std {std} lies between {low} and {high}",
            "Move the bounds, which are values and not multiples of std.",
        )

    def make(shape: Shape, rng: np.random.Generator) -> np.ndarray:
        values = _normal((size_of(shape),), rng, mean, std)
        while (outside := (values < low) | (values > high)).any():
            values[outside] = rng.normal(mean, std, int(outside.sum()))
        return values.reshape(shape)

    return make


def _normal_below(x: float) -> float:
    """How much of a standard normal lies below x."""
    return (1 + math.erf(x / math.sqrt(2))) / 2


def fans(shape: Shape) -> tuple[int, int]:
    """How many inputs and outputs a weight of (out, in, kernel …) connects."""
    if len(shape) < 2:
        raise ArgumentError(
            "init", f"a parameter of shape {shape} has no fan", "It needs two axes: (out, in, …)."
        )
    field = size_of(shape[2:])
    return shape[1] * field, shape[0] * field


def xavier_uniform(gain: float = 1.0) -> Init:
    """Uniform with variance 2 · gain² / (fan_in + fan_out)."""
    check_number("xavier_uniform", "gain", gain, FINITE)

    def make(shape: Shape, rng: np.random.Generator) -> np.ndarray:
        bound = gain * math.sqrt(6 / sum(fans(shape)))
        return _uniform(shape, rng, -bound, bound)

    return make


def xavier_normal(gain: float = 1.0) -> Init:
    """Normal with variance 2 · gain² / (fan_in + fan_out)."""
    check_number("xavier_normal", "gain", gain, FINITE)
    return lambda shape, rng: _normal(shape, rng, 0, gain * math.sqrt(2 / sum(fans(shape))))


def kaiming_uniform(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Init:
    """Uniform with variance gain² / fan, the gain being the nonlinearity's."""
    _check_kaiming(a, mode, nonlinearity)

    def make(shape: Shape, rng: np.random.Generator) -> np.ndarray:
        bound = math.sqrt(3) * _kaiming_std(shape, a, mode, nonlinearity)
        return _uniform(shape, rng, -bound, bound)

    return make


def kaiming_normal(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Init:
    """Normal with variance gain² / fan, the gain being the nonlinearity's."""
    _check_kaiming(a, mode, nonlinearity)
    return lambda shape, rng: _normal(shape, rng, 0, _kaiming_std(shape, a, mode, nonlinearity))


def _check_kaiming(a: float, mode: str, nonlinearity: str) -> None:
    check_choice("kaiming", "mode", mode, ("fan_in", "fan_out"))
    gain(nonlinearity, a)


def _kaiming_std(shape: Shape, a: float, mode: str, nonlinearity: str) -> float:
    return gain(nonlinearity, a) / math.sqrt(fans(shape)[mode == "fan_out"])


def gain(nonlinearity: str, a: float = 0.01) -> float:
    """The factor that keeps variances through a nonlinearity, as torch.nn.init.calculate_gain."""
    check_number("gain", "a", a, FINITE)
    gains = {
        "linear": 1.0,
        "sigmoid": 1.0,
        "tanh": 5 / 3,
        "relu": math.sqrt(2),
        "leaky_relu": math.sqrt(2 / (1 + a * a)),
        "selu": 0.75,
    }
    if nonlinearity not in gains:
        raise ArgumentError(
            "gain", f"no gain for {nonlinearity!r}", f"There are: {', '.join(gains)}."
        )
    return gains[nonlinearity]


def orthogonal(scale: float = 1.0) -> Init:
    """Rows (or columns, whichever are fewer) orthonormal, uniform among all such, scaled."""
    check_number("orthogonal", "scale", scale, FINITE)

    def make(shape: Shape, rng: np.random.Generator) -> np.ndarray:
        fans(shape)
        rows, columns = shape[0], size_of(shape[1:])
        flat = rng.normal(size=(max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(flat)
        q = q * np.sign(np.diag(r))  # makes the distribution uniform
        return scale * (q.T if rows < columns else q).reshape(shape)

    return make
