"""Every op in every dtype on a device, beside the oracle: its error against its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import DTypeError, TreadleError
from treadle.domains.float64 import evaluate_float64
from treadle.ir.contract import Exact
from treadle.ir.graph import Graph
from treadle.ir.op import Op
from treadle.ir.types import TensorType
from treadle.verify.bounds import allowed, careful_spread, complaint, over, ulp
from treadle.verify.retyped import COMPUTED, agreement, retyped, samples_in, spread, together
from treadle.verify.samples import samples_of
from treadle.verify.sampling import Sample
from treadle.verify.wide import WIDE, Shape, wide_samples

# A graph and its inputs on a device: all outputs in order.
Run = Callable[[Graph, Mapping[str, np.ndarray]], Sequence[np.ndarray]]
DTYPES = (*dtypes.FLOATS, dtypes.int64, dtypes.int32, dtypes.uint8, dtypes.bool_)
SMALL = 8  # samples of few elements
SHAPES: tuple[Shape, ...] = ((3, 17), (2, 3, 33))  # around the widths of vectors


@dataclass(frozen=True, slots=True)
class Row:
    """An op in a dtype: how many elements were compared, and how near they are.

    `share` is the greatest part of what the contract allows that an element is off by; `ulps` is
    the greatest error in units of the last place. `refused` is what a device says that does not
    have the dtype; `wrong` says what is not as promised.
    """

    op: str
    dtype: str
    contract: str
    elements: int = 0
    share: float = 0.0
    ulps: float = 0.0
    wrong: str = ""
    refused: str = ""

    @property
    def record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def cell(self) -> str:
        """As a table has it."""
        if self.wrong or self.refused:
            return "wrong" if self.wrong else "refused"
        if self.share == 0:
            return "="
        return f"{self.share:.2f}" if self.share >= 0.01 else "< 0.01"


def taken(op: Op) -> list[DType]:
    """The dtypes that an op has samples in; of one that takes none of them, its own."""
    found = [d for d in DTYPES if _samples(op, d)]
    own = [d.type.dtype for s in samples_of(op) for d in s.operands]
    return found or own[:1]


def _samples(op: Op, dtype: DType) -> list[Sample]:
    if dtype is dtypes.bool_:  # samples of booleans alone: they change with no other dtype
        only = [s for s in samples_in(op, dtypes.int32) if s.operands]
        return [s for s in only if all(d.type.dtype is dtypes.bool_ for d in s.operands)]
    if dtype not in DTYPES:
        return spread(list(samples_of(op)), SMALL)
    own = [s for s in samples_in(op, dtype) if _is_of(op, s, dtype)]
    wide = [retyped(op, s, dtype) for s in wide_samples(op, SHAPES)] if op in WIDE else []
    found = [s for s in wide if s is not None and _is_of(op, s, dtype)]
    return spread(own, SMALL) + (spread(found, SMALL // 2) if own else [])


def _is_of(op: Op, sample: Sample, dtype: DType) -> bool:
    """Whether a dtype is among those of the operands; what has none is of its result's."""
    if not sample.operands:
        return dtype in {t.dtype for t in op.infer(sample.attributes)}
    return any(d.type.dtype is dtype for d in sample.operands)


def measured(run: Run, ops: Sequence[Op] = COMPUTED, seed: int = 0) -> Iterator[Row]:
    """A row for each op and each dtype that it takes."""
    for op in ops:
        for dtype in taken(op):
            yield _measured(run, op, dtype, seed)


def _measured(run: Run, op: Op, dtype: DType, seed: int) -> Row:
    row = Row(op.name, dtype.name, str(op.contract.error))
    graph, arrays = together(op, _samples(op, dtype), seed)
    try:
        with np.errstate(all="ignore"):
            found = run(graph, arrays)
            exact = evaluate_float64(graph, arrays)
    except DTypeError as error:
        return _with(row, refused=error.cause)
    except TreadleError as error:
        return _with(row, wrong=f"refused: {error.cause}")
    bounds = allowed(graph, arrays, agreement(op))
    wrong = _complaint(graph, found, exact, bounds)
    if wrong and agreement(op) > 1:  # of several ops: many turns show what they come to
        bounds = careful_spread(over(graph, arrays), graph.output_types)
        wrong = _complaint(graph, found, exact, bounds)
    parts = zip(found, exact, graph.output_types, bounds, strict=True)
    errors = [_error(*part) for part in parts]
    return _with(
        row,
        elements=sum(x.size for x in exact),
        # A constant is exact as its dtype holds it.
        share=0.0 if is_exact(op) else max((share for share, _ in errors), default=0.0),
        ulps=max((ulps for _, ulps in errors), default=0.0),
        wrong=wrong,
    )


def _with(row: Row, **changes: Any) -> Row:
    return Row(**(asdict(row) | changes))


def _complaint(
    graph: Graph,
    found: Sequence[np.ndarray],
    exact: Sequence[np.ndarray],
    bounds: Sequence[np.ndarray],
) -> str:
    parts = zip(found, exact, graph.output_types, bounds, strict=True)
    return next((told for part in parts if (told := complaint(*part)) is not None), "")


def _error(
    ours: np.ndarray, exact: np.ndarray, type_: TensorType, bound: np.ndarray
) -> tuple[float, float]:
    """The part of what is allowed, and units in the last place, at the worst elements."""
    if not type_.is_float or not exact.size:
        return 0.0, 0.0
    finite = np.isfinite(exact)
    with np.errstate(all="ignore"):
        apart = np.where(finite, np.abs(ours.astype(np.float64) - exact), 0.0)
        # The oracle's own rounding is no error: float64 has it too.
        slack = 1e-15 * np.abs(np.where(finite, exact, 0.0)) * 4
        apart = np.where(apart <= slack, 0.0, apart) if type_.dtype is dtypes.float64 else apart
        share = np.where(apart == 0, 0.0, apart / np.where(bound > 0, bound, np.inf))
        units = apart / ulp(np.where(finite, exact, 0.0), type_.dtype)
    return float(np.nanmax(share)), float(np.nanmax(units))


def is_exact(op: Op) -> bool:
    return isinstance(op.contract.error, Exact)


def table(rows: Sequence[Row]) -> str:
    """Ops by dtypes, in Markdown: the part of what the contract allows."""
    names = [n for n in dtypes.BY_NAME if any(r.dtype == n for r in rows)]
    heads = ["op", "contract", *names]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for op in dict.fromkeys(r.op for r in rows):
        own = {r.dtype: r for r in rows if r.op == op}
        contract = next(iter(own.values())).contract.replace("|", r"\|")
        cells = [own[n].cell if n in own else "–" for n in names]
        lines.append(f"| `{op}` | {contract} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row], device: str) -> str:
    wrong, compared = [r for r in rows if r.wrong], [r for r in rows if not r.refused]
    ops, elements = len({r.op for r in rows}), sum(r.elements for r in rows)
    told = f"{device}: {ops} ops in {len(rows)} combinations with dtypes, {elements:,} elements: "
    if len(compared) < len(rows):
        told += f"{len(rows) - len(compared)} refused, as the device does not have their dtypes; "
    if wrong:
        return told + f"{len(wrong)} not as promised"
    worst = max(compared, key=lambda r: r.share, default=None)
    if worst is None:
        return told + "nothing to compare"
    nearest = f"{worst.op} in {worst.dtype}, at {worst.share:.2f} of it"
    return told + f"all within their contracts; the nearest to its bound is {nearest}"
