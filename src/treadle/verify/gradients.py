"""The gradient of a loss, exactly: reverse mode against forward mode over the finite field.

Along a random direction u the derivative of the loss is Σ gradient · u. Forward mode computes it
with dual numbers, by rules that share nothing with those of reverse mode. It goes through the body
of a function that has a gradient of its own. Such a gradient may be written otherwise (1 / cosh² is
1 − tanh²), which the field does not see: it is then compared in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from treadle.base.errors import GradientError, GraphError
from treadle.domains.domain import evaluate
from treadle.domains.dual import Dual, DualNumber
from treadle.domains.field import FiniteField, Residues
from treadle.domains.float64 import Array, Float64
from treadle.ir.composites import definition_graph
from treadle.ir.control import CALL, SCAN, Call, Scan, own_backwards
from treadle.ir.graph import Graph, Node, OutputKind
from treadle.ir.ops.indexing import Gather, ScatterAdd
from treadle.ir.ops.linear import Contraction
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.kernel.claims import Claim

MOST_ELEMENTS = 2**23  # of all leaves
MOST_WORK = 2**29  # multiplications of the loss, and elements that are computed
DRAWS = 4  # in float64, every second one of positive numbers alone: logarithms want those
TOLERANCE = 1e-5  # of the terms that are added up: a user's constants are often float32
NAMED = 32  # parameters that are looked at one by one, to name those whose gradient is wrong


def check_gradient(loss: Graph, both: Graph, trial: int = 0, owner: str = "") -> Claim:
    """The gradients in `both` of the first result of `loss`; an error if one is wrong.

    `owner` is the function that a user wrote gradients for. Without one those of Treadle are
    checked, and of functions in the loss that bring their own.
    """
    loss = remove_dead_code(Graph(loss.nodes, loss.outputs[:1], loss.name))
    reason = _too_large(both if owner else loss)
    if reason:
        return Claim("gradient", loss.name, reason=reason)
    names = tuple(o.name for o in both.outputs if o.kind is OutputKind.GRADIENT)
    if _is_exact(loss, both, trial):
        return Claim("gradient", loss.name, buffers=names)
    own = [owner] if owner else [f"the backward of {name}" for name in own_backwards(loss)]
    if not own:
        told = ", ".join(names)
        raise GraphError("verify", f"the gradients of {loss.name} are wrong, of one of {told}")
    count = sum(_compared(loss, both, draw, " or ".join(own)) for draw in range(DRAWS))
    told = f"{' and '.join(own)} compared in float64 alone, on {count} of {DRAWS} draws"
    return Claim("gradient", loss.name, buffers=names, reason=told)


def is_right(loss: Graph, both: Graph, frozen: Collection[str]) -> bool:
    """Whether `both` has the outputs of `loss` and its gradients, as far as numbers show.

    A refusal stops a user's program, so another program decides too: the graphs are computed in
    float64, and forward mode is compared with the gradients. Graphs too large for that are taken
    for right.
    """
    reached = remove_dead_code(Graph(loss.nodes, loss.outputs[:1], loss.name)).parameters
    given = {o.name for o in both.outputs if o.kind is OutputKind.GRADIENT}
    if not given >= set(reached) - set(frozen):
        return False
    if _too_large(both):
        return True
    rng, most = np.random.default_rng(0), _index_size(both)
    leaves = _leaves(both) | _leaves(loss)
    inputs = {name: _drawn(t, most, rng, False) for name, t in leaves.items()}
    with np.errstate(all="ignore"):
        outputs = dict(zip(both.outputs, evaluate(both, inputs, Float64()), strict=True))
        found = {(o.kind, o.name): value for o, value in outputs.items()}
        for output, wanted in zip(loss.outputs, evaluate(loss, inputs, Float64()), strict=True):
            value = found.get((output.kind, output.name))
            if value is None or not np.allclose(value, wanted, 1e-6, 1e-9, equal_nan=True):
                return False
    try:
        check_gradient(loss, both)
    except (GraphError, GradientError):
        return False
    return True


def _is_exact(loss: Graph, both: Graph, trial: int) -> bool:
    """Whether reverse and forward mode are equal over the field."""
    field, rng = FiniteField(trial), np.random.default_rng(trial)
    leaves = _leaves(both) | _leaves(loss)
    most = _index_size(both)
    inputs = {name: _leaf(field, t, most, rng) for name, t in leaves.items()}
    gradients = {
        o.name: v
        for o, v in zip(both.outputs, evaluate(both, inputs, field), strict=True)
        if o.kind is OutputKind.GRADIENT
    }
    along = {name: field.random(leaves[name], rng) for name in gradients}
    duals = {n: DualNumber(inputs[n], along.get(n)) for n in _leaves(loss)}
    tangent = evaluate(loss, duals, Dual(field))[0].tangent
    found = [_inner(field, gradients.values(), along.values(), lane) for lane in (0, 1)]
    wanted = [0, 0] if tangent is None else [int(tangent.q), int(tangent.p)]
    return found[0] == wanted[0] or found[1] == wanted[1]


def _leaves(graph: Graph) -> dict[str, TensorType]:
    return {name: graph.nodes[i].types[0] for name, i in graph.leaves.items()}


# In float64


class _Slope(NamedTuple):
    """A derivative along a direction by gradients, by forward mode, and the size of its terms."""

    found: float
    wanted: float
    size: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.found) and math.isfinite(self.wanted)

    @property
    def is_wrong(self) -> bool:
        allowed = TOLERANCE * (self.size + abs(self.wanted))
        return self.is_finite and abs(self.found - self.wanted) > allowed


def _compared(loss: Graph, both: Graph, draw: int, own: str) -> bool:
    """Whether numbers of a draw could be compared; a GradientError if a gradient is wrong."""
    rng = np.random.default_rng(draw)
    leaves, most = _leaves(both) | _leaves(loss), _index_size(both)
    inputs = {name: _drawn(t, most, rng, draw % 2 == 1) for name, t in leaves.items()}
    found = evaluate(both, inputs, Float64())
    gradients = {
        o.name: v for o, v in zip(both.outputs, found, strict=True) if o.kind is OutputKind.GRADIENT
    }
    along = {name: rng.normal(size=leaves[name].shape) for name in gradients}
    whole = _slope(loss, inputs, gradients, along)
    if whole.is_wrong:
        single = {n: {n: u} for n, u in list(along.items())[:NAMED]}
        slopes = {n: _slope(loss, inputs, gradients, u) for n, u in single.items()}
        wrong = {n: s for n, s in slopes.items() if s.is_wrong} or {"all parameters": whole}
        told = "; ".join(f"by {n} is {s.wanted:.4g}, not {s.found:.4g}" for n, s in wrong.items())
        raise GradientError(
            "verify",
            f"{own} is wrong: along a random direction the derivative {told}",
            'Correct the backward. If another gradient is meant, compile with verify="fast".',
        )
    return whole.is_finite


def _slope(
    loss: Graph, inputs: Mapping[str, Array], gradients: Mapping[str, Array], u: Mapping[str, Array]
) -> _Slope:
    duals = {n: DualNumber(inputs[n], u.get(n)) for n in _leaves(loss)}
    with np.errstate(all="ignore"):
        tangent = evaluate(loss, duals, Dual(Float64()))[0].tangent
        products = [gradients[n] * x for n, x in u.items()]
        found = math.fsum(float(p.sum()) for p in products)
        size = math.fsum(float(np.abs(p).sum()) for p in products)
    return _Slope(found, 0.0 if tangent is None else float(tangent), size)


def _drawn(type_: TensorType, most: int, rng: np.random.Generator, is_positive: bool) -> Array:
    if type_.is_float:
        drawn = rng.normal(size=type_.shape)
        return np.abs(drawn) + 0.1 if is_positive else np.asarray(drawn)
    least = 2 if type_.dtype.kind == "bool" else most
    return np.asarray(rng.integers(0, min(least, 2**7), type_.shape)).astype(type_.dtype.numpy)


# Over the field


def _inner(
    field: FiniteField, first: Iterable[Residues], second: Iterable[Residues], lane: int
) -> int:
    """Σ x · y in a lane."""
    modulus, total = field.lanes[lane].modulus, 0
    for x, y in zip(first, second, strict=True):
        a, b = (x.q, y.q) if lane == 0 else (x.p, y.p)
        total = (total + int((a * b % modulus).sum())) % modulus
    return total


def _leaf(field: FiniteField, type_: TensorType, most: int, rng: np.random.Generator) -> Residues:
    if type_.is_float:
        return field.random(type_, rng)
    return field.lift(rng.integers(0, most, type_.shape), type_)


def _index_size(graph: Graph) -> int:
    """Integers are below the shortest axis that anything indexes."""
    found = [2**15]
    for node, inner in _nodes(graph):
        if isinstance(node.attributes, Gather):
            found.append(inner.type_of(node.operands[0]).shape[node.attributes.axis])
        elif isinstance(node.attributes, ScatterAdd):
            found.append(node.attributes.size)
    return max(1, min(found))


def _nodes(graph: Graph) -> list[tuple[Node, Graph]]:
    """Nodes of a graph and of the definitions and bodies in it."""
    found: list[tuple[Node, Graph]] = []
    for node in graph.nodes:
        body = _body(graph, node)
        found += [(node, graph), *([] if body is None else _nodes(body))]
    return found


def _body(graph: Graph, node: Node) -> Graph | None:
    if isinstance(node.attributes, (Call, Scan)) and node.op in (CALL, SCAN):
        return node.attributes.body
    if node.op.is_composite:
        types = tuple(graph.type_of(v) for v in node.operands)
        return definition_graph(node.op, node.attributes, types)
    return None


def _too_large(graph: Graph) -> str:
    elements = sum(graph.nodes[i].types[0].size for i in graph.leaves.values())
    if elements > MOST_ELEMENTS:
        return f"its leaves have {elements:,} elements, more than {MOST_ELEMENTS:,}"
    work = _work(graph)
    return f"it takes {work:,} multiplications, more than {MOST_WORK:,}" if work > MOST_WORK else ""


def _work(graph: Graph) -> int:
    total = 0
    for node in graph.nodes:
        body = _body(graph, node)
        if body is not None:
            times = node.attributes.length if isinstance(node.attributes, Scan) else 1
            total += times * _work(body)
        elif isinstance(node.attributes, Contraction):
            sizes: dict[str, int] = {}
            for labels, v in zip(node.attributes.labels[:2], node.operands, strict=True):
                sizes |= dict(zip(labels, graph.type_of(v).shape, strict=True))
            total += math.prod(sizes.values())
        else:
            total += sum(t.size for t in node.types)
    return total
