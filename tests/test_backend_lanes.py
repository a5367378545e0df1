"""Every op and composite at shapes that fill lanes, forward and backward, against the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from backend import AGREE, Built, assert_within, build, draw, merged, merged_arrays, same_bits
from op_samples import COMPUTED, agreement, retyped
from treadle.autodiff.backward import has_gradient, vjp_graph
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.ir.graph import Graph
from treadle.ir.op import Op
from treadle.runtime.cpu.native import host
from treadle.verify.sampling import Sample, sample_graph
from treadle.verify.wide import AROUND, BLOCKS, LANES, WIDE, Shape, wide_samples

FAMILIES = {"few": LANES[1:2], "lanes": LANES, "around": AROUND, "blocks": BLOCKS}
WIDTHS = [w for w in (4, 8, 16) if w <= host().width]
OTHERS = [d for d in dtypes.ALL if d not in (dtypes.float32, dtypes.int32)]
PER_PROGRAM = 60  # samples: what is compiled together


def built(graph: Graph, width: int) -> Built:
    """A graph compiled for vectors of some lanes. Kernels are whole: a short task fills none."""
    return build(graph, width=width)


def samples_in(op: Op, dtype: DType, shapes: Sequence[Shape]) -> list[Sample]:
    """The samples that a dtype changes, or all in those that they are written in."""
    is_own = dtype in (dtypes.float32, dtypes.int32)
    pairs = [(retyped(op, s, dtype), s) for s in wide_samples(op, shapes)]
    return [found for found, s in pairs if found is not None and (is_own or found != s)]


def is_differentiable(op: Op, sample: Sample) -> bool:
    return (
        has_gradient(op)
        and sample_graph(op, sample).output_types[0].is_float
        and any(d.type.is_float for d in sample.operands)
    )


def gradient_graph(op: Op, sample: Sample) -> Graph:
    graph = sample_graph(op, sample)
    floats = [str(i) for i, d in enumerate(sample.operands) if d.type.is_float]
    return vjp_graph(graph, [t.is_float for t in graph.output_types], floats)


def arrays_for(graph: Graph, sample: Sample, seed: int) -> dict[str, np.ndarray]:
    """The sample's operands where they are leaves, normal numbers for cotangents."""
    given, drawn = sample.arrays(seed), draw(graph, seed)
    return {
        n: given.get(n, d).astype(graph.nodes[graph.leaves[n]].types[0].dtype.numpy)
        for n, d in drawn.items()
    }


def check(graphs: Sequence[Graph], samples: Sequence[Sample], agree: float, width: int) -> None:
    for start in range(0, len(graphs), PER_PROGRAM):
        part = slice(start, start + PER_PROGRAM)
        graph = merged(graphs[part])
        pairs = zip(graphs[part], samples[part], strict=True)
        arrays = merged_arrays([arrays_for(g, s, 4) for g, s in pairs])
        program = built(graph, width)
        found = program.on(1).run(arrays)
        assert_within(graph, arrays, found, agree)
        assert same_bits(program.cut(2).on(2).run(arrays), found)


def forward(op: Op, samples: Sequence[Sample], width: int) -> None:
    check([sample_graph(op, s) for s in samples], samples, agreement(op), width)


def backward(op: Op, samples: Sequence[Sample], width: int) -> None:
    given = [s for s in samples if is_differentiable(op, s)]
    check([gradient_graph(op, s) for s in given], given, AGREE, width)


DIRECTIONS = {"forward": forward, "backward": backward}


def cases(
    family: str,
    chosen: Sequence[DType],
    widths: Sequence[int],
    directions: Iterable[str] = DIRECTIONS,
) -> Iterator[object]:
    for op, dtype in product(COMPUTED, chosen):
        samples = samples_in(op, dtype, LANES[1:2])
        for direction in directions:
            if direction == "backward":
                samples = [s for s in samples if is_differentiable(op, s)]
            for width in widths if samples else ():
                name = f"{family}-{op.name}-{dtype}-{width}-{direction}"
                yield pytest.param(op, dtype, family, width, direction, id=name)


ARGUMENTS = ("op", "dtype", "family", "width", "direction")
QUICK = [
    *cases("lanes", [dtypes.float32], WIDTHS[-1:]),
    *cases("few", [dtypes.float64], WIDTHS[:1]),
]
WHOLE = [
    *cases("few", [dtypes.bfloat16], WIDTHS[:2][-1:]),
    *cases("few", [dtypes.float16], WIDTHS[-1:], ["forward"]),
    *cases("around", [dtypes.float32], WIDTHS),
    *cases("blocks", [dtypes.float32], WIDTHS[-1:]),
    *cases("lanes", [dtypes.float32], WIDTHS[:-1]),
    *cases("lanes", OTHERS, WIDTHS),
]


@pytest.mark.parametrize(ARGUMENTS, QUICK)
def test_every_op_fills_lanes(
    op: Op, dtype: DType, family: str, width: int, direction: str
) -> None:
    DIRECTIONS[direction](op, samples_in(op, dtype, FAMILIES[family]), width)


@pytest.mark.slow
@pytest.mark.parametrize(ARGUMENTS, WHOLE)
def test_the_whole_table(op: Op, dtype: DType, family: str, width: int, direction: str) -> None:
    DIRECTIONS[direction](op, samples_in(op, dtype, FAMILIES[family]), width)


def test_every_op_has_wide_samples() -> None:
    for op in COMPUTED:
        assert op in WIDE, op
        assert samples_in(op, dtypes.float32, LANES) or samples_in(op, dtypes.int32, LANES), op
