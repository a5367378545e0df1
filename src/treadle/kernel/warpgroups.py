"""What a kernel of the template `Warpgroups` multiplies, and what it does with each element."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.kernel.access import loads_of
from treadle.kernel.geometry import Warpgroups
from treadle.kernel.index import Var
from treadle.kernel.launch import TensorMap
from treadle.kernel.mapped import geometry_of, grid_of, sums_of
from treadle.kernel.nodes import Accumulate, For, Kernel, Let, Load, Statement
from treadle.kernel.traverse import walk


@dataclass(frozen=True, slots=True)
class Side:
    """An operand: lines lie along the depth, or across it."""

    load: Load
    is_along: bool
    pitch: int  # elements from one line to the next


@dataclass(frozen=True, slots=True)
class Finished:
    """What a kernel multiplies, and what it does with a rounded element."""

    left: Side
    right: Side
    before: tuple[Statement, ...]  # names the sums of columns
    element: tuple[Statement, ...]
    after: tuple[Statement, ...]  # of a part's sums
    sums: tuple[Accumulate, ...]  # of columns


def template_of(kernel: Kernel) -> Warpgroups | None:
    found = None if kernel.geometry is None else kernel.geometry.template
    return found if isinstance(found, Warpgroups) else None


def finished_of(kernel: Kernel) -> Finished:
    """The parts of a kernel that has the template."""
    template = geometry_of(kernel).template
    assert isinstance(template, Warpgroups)
    body = grid_of(kernel).body
    before, after, sums = tuple[Statement, ...](), tuple[Statement, ...](), tuple[Accumulate, ...]()
    if template.inner is not None:
        at = next(i for i, s in enumerate(body) if isinstance(s, For))
        loop = body[at]
        assert isinstance(loop, For)
        before, after = tuple(body[:at]), tuple(body[at + 1 :])
        body, sums = loop.body, tuple(sums_of(loop).values())
    last = next(i for i, s in enumerate(body) if isinstance(s, Let) and s.local == template.rounded)
    product = next(s for s in walk(body[:last]) if isinstance(s, Accumulate))
    row = template.outer if template.inner is None else template.inner
    left, right = loads_of(product)
    return Finished(
        _side(left, row, template),
        _side(right, template.column, template),
        before,
        tuple(body[last + 1 :]),
        after,
        sums,
    )


def _side(load: Load, across: Var, template: Warpgroups) -> Side:
    depth, other = (load.index.factor_of(v) for v in (template.depth, across))
    assert depth is not None
    assert other is not None
    return Side(load, depth == 1, other if depth == 1 else depth)


def maps_of(kernel: Kernel) -> tuple[TensorMap, ...]:
    """How both operands are copied; none for other kernels."""
    template = template_of(kernel)
    if template is None:
        return ()
    found, (m, n, k) = finished_of(kernel), template.sizes
    names = [b.name for b in kernel.buffers]

    def facts(side: Side, across: int, tile: int) -> TensorMap:
        inner, outer = (k, across) if side.is_along else (across, k)
        depth = template.DEPTH
        box = (depth, tile) if side.is_along else (template.ACROSS, depth)
        load = side.load
        at, start = names.index(load.buffer), load.index.offset
        return TensorMap(at, load.dtype.name, start, inner, outer, side.pitch, box)

    rows, columns = template.ROWS, template.COLUMNS // template.cluster
    return facts(found.left, m, rows), facts(found.right, n, columns)
