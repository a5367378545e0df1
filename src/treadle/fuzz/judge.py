"""Whether a program is right on a device: near the oracle, and the same bits every time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.base.errors import IndexRangeError, TreadleError
from treadle.domains.float64 import Float64
from treadle.fuzz.cases import Arrays, Case, prepared
from treadle.fuzz.program import Program
from treadle.ir.types import TensorType
from treadle.verify.bounds import careful_spread, complaint, spread, ulp

RIGHT, SKIPPED = "right", "skipped"
WRONG, UNSTEADY, REFUSED = "wrong", "unsteady", "refused"
CRASH, HANG = "crash", "hang"

GREATEST = 1e6  # of the oracle's values: larger ones overflow narrow dtypes on the way
# Where rounding is much of a result (a maximum of what a narrow dtype makes equal, say), how far
# what follows may be off is not known either. Parts of a tensor's largest element.
MOST_NOISE, MOST_NARROW_NOISE = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found; `allowed` is the largest distance from the oracle that would be right."""

    kind: str
    text: str = ""
    allowed: float | None = None

    @property
    def is_finding(self) -> bool:
        return self.kind not in (RIGHT, SKIPPED)


def judge(program: Program, device: str = "cpu") -> Verdict:
    """Run a program as often as it says and compare. Warnings of Treadle's are not looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judged(program, device)


def _judged(program: Program, device: str) -> Verdict:
    try:
        case = prepared(program)
        exact = case.exact(Float64())
    except IndexRangeError as error:  # an input that serves as indices of two axes, say
        return Verdict(SKIPPED, _told(error))
    except Exception as error:
        return Verdict(REFUSED, f"by the oracle: {_told(error)}")
    if not all(_is_finite(x) for x in exact):
        return Verdict(SKIPPED, "the oracle's values are too large")
    found: list[Arrays] = []
    for threads in program.threads:
        try:
            found += case.on(device, threads)
        except Exception as error:
            return Verdict(REFUSED, f"by {device} with {threads} threads: {_told(error)}")
    compared = _compared(case, exact, found)
    differing = _differing(program, found) if device == "cpu" else None
    if differing is not None and compared.kind != WRONG:
        return Verdict(UNSTEADY, differing, compared.allowed)
    return compared


def _told(error: Exception) -> str:
    """An error in one line; where Treadle names it, without the place."""
    text = error.cause if isinstance(error, TreadleError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype != np.float64:
        return True
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(array) <= GREATEST))


def _compared(case: Case, exact: Sequence[np.ndarray], found: Sequence[Arrays]) -> Verdict:
    """Every run beside the oracle; the bounds are worked out where the last digits differ."""
    quick = [
        2 * ulp(x, t.dtype) if t.is_float else np.zeros(x.shape) for x, t in _typed(case, exact)
    ]
    if _complaints(case, exact, found, quick) is None:
        return Verdict(RIGHT)
    bounds = spread(case.exact, case.types)
    wrong = _complaints(case, exact, found, bounds)
    if wrong is not None:
        bounds = careful_spread(case.exact, case.types)
        wrong = _complaints(case, exact, found, bounds)
    if not all(
        _says_something(x, b, t) for (x, t), b in zip(_typed(case, exact), bounds, strict=True)
    ):
        return Verdict(SKIPPED, "rounding is much of a result")
    allowed = max((float(np.max(b, initial=0)) for b in bounds), default=0.0)
    return Verdict(RIGHT, "", allowed) if wrong is None else Verdict(WRONG, wrong, allowed)


def _typed(case: Case, exact: Sequence[np.ndarray]) -> list[tuple[np.ndarray, TensorType]]:
    return list(zip(exact, case.types, strict=True))


def _complaints(
    case: Case,
    exact: Sequence[np.ndarray],
    found: Sequence[Arrays],
    bounds: Sequence[np.ndarray],
) -> str | None:
    """The first thing that is wrong."""
    for arrays in found:
        for name, ours, (theirs, type_), bound in zip(
            case.names, arrays, _typed(case, exact), bounds, strict=True
        ):
            wrong = complaint(ours, theirs, type_, bound)
            if wrong is not None:
                return f"{name}: {wrong}"
    return None


def _says_something(exact: np.ndarray, bound: np.ndarray, type_: TensorType) -> bool:
    if not type_.is_float or not exact.size:
        return True
    most = MOST_NARROW_NOISE if type_.dtype.is_narrow else MOST_NOISE
    return bool(np.max(bound) <= most * (np.max(np.abs(exact)) + 0.1))


def _differing(program: Program, found: Sequence[Arrays]) -> str | None:
    """Which run has other bits than the first: each number of threads has two."""
    runs = [b"".join(x.tobytes() for x in arrays) for arrays in found]
    labels = [f"{n} threads, call {call}" for n in program.threads for call in (1, 2)]
    for label, bits in zip(labels, runs, strict=True):
        if bits != runs[0]:
            return f"{label} differs from {labels[0]}"
    return None
