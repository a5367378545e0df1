"""The gradient of a loss, exactly: reverse mode against forward mode over the finite field.

Along a random direction u the derivative of the loss is Σ gradient · u. Forward mode computes it
with dual numbers, by rules that share nothing with those of reverse mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from treadle.base.errors import GraphError
from treadle.domains.domain import evaluate
from treadle.domains.dual import Dual, DualNumber
from treadle.domains.field import FiniteField, Residues
from treadle.ir.composites import definition_graph
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.graph import Graph, Node, OutputKind
from treadle.ir.ops.indexing import Gather, ScatterAdd
from treadle.ir.ops.linear import Contraction
from treadle.ir.types import TensorType
from treadle.kernel.claims import Claim

MOST_ELEMENTS = 2**23  # of all leaves
MOST_WORK = 2**29  # multiplications of the loss, and elements that are computed


def check_gradient(loss: Graph, both: Graph, trial: int = 0) -> Claim:
    """The gradients in `both` of the first result of `loss`; a GraphError if one is wrong."""
    reason = _too_large(loss) or _own_backward(loss)
    if reason:
        return Claim("gradient", loss.name, reason=reason)
    field, rng = FiniteField(trial), np.random.default_rng(trial)
    leaves = {name: loss.nodes[i].types[0] for name, i in loss.leaves.items()}
    most = _index_size(loss)
    inputs = {name: _leaf(field, t, most, rng) for name, t in leaves.items()}
    gradients = {
        o.name: v
        for o, v in zip(both.outputs, evaluate(both, inputs, field), strict=True)
        if o.kind is OutputKind.GRADIENT
    }
    along = {name: field.random(leaves[name], rng) for name in gradients}
    duals = {name: DualNumber(x, along.get(name)) for name, x in inputs.items()}
    tangent = evaluate(loss, duals, Dual(field))[0].tangent
    found = [_inner(field, gradients.values(), along.values(), lane) for lane in (0, 1)]
    wanted = [0, 0] if tangent is None else [int(tangent.q), int(tangent.p)]
    if found[0] != wanted[0] and found[1] != wanted[1]:
        names = ", ".join(gradients)
        raise GraphError("verify", f"the gradients of {loss.name} are wrong, of one of {names}")
    return Claim("gradient", loss.name, buffers=tuple(gradients))


def _own_backward(loss: Graph) -> str:
    """Forward mode goes through a function's body: a gradient of its own is the user's word."""
    own = any(isinstance(n.attributes, Call) and n.attributes.backward for n, _ in _nodes(loss))
    return "a function in it has a gradient of its own (custom_vjp, td.linalg)" if own else ""


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
        found += [(node, graph)] if body is None else _nodes(body)
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
