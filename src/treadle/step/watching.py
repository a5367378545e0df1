"""Watching a step: histograms of what is asked for, and where a NaN came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.backends.registry import REFERENCE
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError
from treadle.domains.anomaly import Anomaly, AnomalyError, find_anomaly
from treadle.domains.float64 import Float64
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.runtime.executable import Executable
from treadle.runtime.session import Session
from treadle.step.batches import Arrays

BINS = 64
# What a device rounds to after every op, and so where it overflows.
_NARROW: frozenset[DType] = frozenset([dtypes.bfloat16, dtypes.float16, *dtypes.FLOAT8])
_FLOATS = _NARROW | {dtypes.float32}


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How the finite values of an array are distributed: `counts` between `edges`."""

    counts: np.ndarray  # (bins,)
    edges: np.ndarray  # (bins + 1,)
    mean: float
    std: float
    zeros: int
    not_finite: int

    @staticmethod
    def of(array: object, bins: int = BINS) -> Histogram:
        """The histogram of any array of numbers, with bins of equal width."""
        if bins < 1:
            raise ArgumentError("Histogram", f"bins = {bins}", "At least 1.")
        values = np.asarray(array).astype(np.float64).reshape(-1)
        finite = values[np.isfinite(values)]
        counts, edges = np.histogram(finite, bins)
        return Histogram(
            counts,
            edges,
            float(finite.mean()) if finite.size else float("nan"),
            float(finite.std()) if finite.size else float("nan"),
            int((finite == 0).sum()),
            values.size - finite.size,
        )

    def __repr__(self) -> str:
        return (
            f"Histogram({int(self.counts.sum())} values from {self.edges[0]:.4g} to "
            f"{self.edges[-1]:.4g}, mean {self.mean:.4g}, std {self.std:.4g}, "
            f"{self.zeros} zeros, {self.not_finite} not finite)"
        )


def run_watched(
    session: Session,
    program: Executable,
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    skips_overflow: bool,
) -> Arrays:
    """Run a step's program; if it makes a NaN or an infinity, undo it and name the node.

    `graph` is the whole step. What is written is copied before, which is what this costs.
    """
    roots = _roots(graph, skips_overflow)
    written = [o.name for o in program.graph.outputs if o.kind is OutputKind.UPDATE]
    before = session.read(written)
    outputs = session.run(program, inputs)
    wrong = [p for o in roots if (p := _problem(o, outputs, before, session.values)) is not None]
    if not wrong:
        return outputs
    session.write(before)
    anomaly = anomaly_of(session, graph, inputs, skips_overflow)
    if anomaly is None:
        raise AnomalyError(
            f"{wrong[0]}, but evaluated node by node everything is finite",
            f'Nothing was updated. Compare with device="{REFERENCE}".',
        )
    raise AnomalyError(f"{wrong[0]}: {anomaly}", "Nothing was updated.", anomaly)


def _problem(
    output: Output, outputs: Arrays, before: Arrays, after: Mapping[str, np.ndarray]
) -> str | None:
    """What is not finite and should be; what was infinite, a best loss say, may stay so."""
    name = output.name
    if output.kind is OutputKind.RESULT:
        value = float(outputs[f"result:{name}"])
        return None if np.isfinite(value) else f"{name} is {value}"
    has_turned = not np.isfinite(after[name]).all() and np.isfinite(before[name]).all()
    return f"{name} is no longer finite" if has_turned else None


def anomaly_of(
    session: Session, graph: Graph, inputs: Mapping[str, np.ndarray], skips_overflow: bool = False
) -> Anomaly | None:
    """What the whole step would make first that is not finite; nothing is written."""
    values = {**session.values, **inputs}
    domain = Float64(_NARROW if session.memory.is_wide else _FLOATS)
    roots = [
        o
        for o in _roots(graph, skips_overflow)
        if o.kind is OutputKind.RESULT or np.isfinite(values[o.name]).all()
    ]
    found = find_anomaly(graph, values, domain, roots)
    return found and replace(found, part=_part(graph, found.node))


def _roots(graph: Graph, skips_overflow: bool) -> list[Output]:
    """The outputs that must be finite: loss, gradient norm and what is written, metrics apart.

    A call that only accumulates has a loss of 0 / 0 where nothing has a weight yet: its total
    counts instead. With float16 gradients may overflow, which skips the step.
    """
    results = [o for o in graph.outputs if o.kind is OutputKind.RESULT]
    updates = [o for o in graph.outputs if o.kind is OutputKind.UPDATE]
    if not any(o.name == "grad_norm" for o in results):
        totals = [o for o in updates if o.name.endswith(":accumulator:total")]
        kept = [o for o in updates if ":accumulator:metric" not in o.name]
        return totals if skips_overflow else kept
    if skips_overflow:
        return [o for o in results if o.name == "loss"]
    return [o for o in results if o.name in ("loss", "grad_norm")] + updates


def _part(graph: Graph, node: int) -> str:
    results = [o for o in graph.outputs if o.kind is OutputKind.RESULT and o.name == "loss"]
    if node in _needed(graph, results):
        return "forward pass"
    gradients = [o for o in graph.outputs if _is_gradient(o)]
    return "backward pass" if node in _needed(graph, gradients) else "update"


def _is_gradient(output: Output) -> bool:
    is_sum = output.kind is OutputKind.UPDATE and ":gradient:" in output.name
    return is_sum or output.kind is OutputKind.GRADIENT


def _needed(graph: Graph, roots: Sequence[Output]) -> set[int]:
    """The nodes that some outputs depend on."""
    found: set[int] = set()
    stack = [o.value.node for o in roots]
    while stack:
        position = stack.pop()
        if position not in found:
            found.add(position)
            stack += [v.node for v in graph.nodes[position].operands]
    return found
