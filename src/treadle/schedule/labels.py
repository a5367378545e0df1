"""The labels of a contraction by what they do, and where operands have their elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.linear import Contraction
from treadle.kernel.index import Index, Var, substitute, variable
from treadle.kernel.nodes import Load, Value, Walk, walk
from treadle.schedule.divisors import best_divisor, divisors
from treadle.schedule.inline import Reader
from treadle.schedule.lower import Lowering, attributes_of


@dataclass(frozen=True, slots=True)
class Labels:
    """A product with the operand that has the columns on the right."""

    left: TensorValue
    right: TensorValue
    of_left: str
    of_right: str
    result: str
    columns: str  # next to each other in the result, the right operand's alone
    sizes: dict[str, int]

    @property
    def depth(self) -> str:
        """What is summed, in the order of the left operand."""
        return "".join(c for c in self.of_left if c not in self.result)

    @property
    def rows(self) -> str:
        return "".join(c for c in self.result if c not in self.of_right)

    @property
    def outer(self) -> str:
        """What neither rows nor columns walk: batch labels, and the right operand's others."""
        return "".join(c for c in self.result if c in self.of_right and c not in self.columns)

    def of(self, side: str) -> str:
        return self.of_left if side == "left" else self.of_right

    def extent(self, labels: str) -> int:
        return math.prod(self.sizes[c] for c in labels)

    def shape(self, labels: str) -> list[int]:
        return [self.sizes[c] for c in labels]

    @property
    def swapped(self) -> Labels | None:
        """The product with columns along what were rows; the result is then transposed."""
        rows = _run(self.rows, self.result)
        if not rows:
            return None
        kept = "".join(c for c in self.result if c not in rows) + rows
        return Labels(self.right, self.left, self.of_right, self.of_left, kept, rows, self.sizes)


def labels_of(lowering: Lowering, node: Node) -> Labels:
    """Columns run along the last labels of the result that are one operand's alone, if any."""
    attributes: Contraction = attributes_of(node)
    lx, ly, lr = attributes.labels
    x, y = node.operands
    sizes: dict[str, int] = {}
    for operand, labels in ((x, lx), (y, ly)):
        sizes |= dict(zip(labels, lowering.graph.type_of(operand).shape, strict=True))
    if lr and lr[-1] not in ly:
        x, y, lx, ly = y, x, ly, lx
    columns = ""
    for label in reversed(lr):
        if label in lx:
            break
        columns = label + columns
    return Labels(x, y, lx, ly, lr, columns, sizes)


def _run(labels: str, result: str) -> str:
    """The last labels that stand together in the result."""
    found = ""
    for label in reversed(labels):
        if found and result.index(label) + 1 != result.index(found[0]):
            break
        found = label + found
    return found


@dataclass(frozen=True, slots=True)
class Digit:
    """A loop of a product's depth: how often, and how far it moves left and right."""

    count: int
    left: int
    right: int


def merged(digits: Sequence[Digit]) -> list[Digit]:
    """Neighbours that walk on together in both operands, as one."""
    found: list[Digit] = []
    for d in digits:
        last = found[-1] if found else None
        if last and last.left == d.left * d.count and last.right == d.right * d.count:
            found[-1] = Digit(last.count * d.count, d.left, d.right)
        elif d.count > 1:
            found.append(d)
    return found


def cut_depth(digits: Sequence[Digit], most: int) -> tuple[list[Digit], list[Digit]]:
    """Loops around a product, and what the product itself sums: about `most` at a time."""
    outer, inner, size = list(digits), list[Digit](), 1
    while outer:
        d = outer.pop()
        if size * d.count <= most:
            inner.insert(0, d)
            size *= d.count
            continue
        part = best_divisor(d.count, most // size, max(1, most // (4 * size)))
        if part > 1:
            inner.insert(0, Digit(part, d.left, d.right))
        if part < d.count:
            outer.append(Digit(d.count // part, d.left * part, d.right * part))
        break
    return outer, inner


def offsets(index: Index, variables: Sequence[Var]) -> Walk | None:
    """Where some variables take an index, the last the fastest; None if that is not affine."""
    factors = [index.factor_of(v) for v in variables]
    if any(f is None for f in factors):
        return None
    if len(variables) == 1:
        return Walk(variables[0].extent, factors[0] or 0)
    turns = product(*(range(v.extent) for v in variables))
    return walk([sum((f or 0) * i for f, i in zip(factors, t, strict=True)) for t in turns])


def plain_load(reader: Reader, value: Value) -> Load | None:
    """The load that a value is, with an index of loop variables alone."""
    if reader.lets or not isinstance(value, Load):
        return None
    is_plain = all(isinstance(atom, Var) for atom, _ in value.index.terms)
    return value if is_plain else None


def block_rows(rows: int) -> int:
    """Rows of a block: enough to use what is read of the right operand again, and many blocks.

    The next panel is fetched ahead, so that few rows do. A thread that is held up (a timer, another
    process) is waited for by a block's time at most.
    """
    return 64 if rows >= 512 else 16 if rows >= 256 else 8


MOST_BLOCK = 128  # of the depth that is copied at a time
COPY_TURNS = 32  # that threads share


def is_turned(load: Load, loops: list[Var]) -> bool:
    """Whether a copy reads along the depth: it is turned over in squares."""
    return load.index.factor_of(loops[-2]) == 1 and loops[-2].extent % 8 == 0


def in_blocks(loops: list[Var], load: Load) -> tuple[list[Var], Load]:
    """The depth of a copy in blocks of whole squares: enough of them for many threads."""
    depth, others = loops[-2], math.prod(v.extent for v in loops[:-2])
    square = 16 if depth.extent % 16 == 0 else 8
    squares = depth.extent // square
    enough = [
        n
        for n in divisors(squares)
        if n * square <= MOST_BLOCK and others * squares // n >= COPY_TURNS
    ]
    size = square * max(enough, default=1)
    block, inner = Var(f"{depth.name}_block", depth.extent // size), Var(depth.name, size)
    index = substitute(load.index, {depth: variable(block) * size + variable(inner)})
    return [*loops[:-2], block, inner, loops[-1]], replace(load, index=index)
