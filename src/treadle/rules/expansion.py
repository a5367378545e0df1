"""Composites and calls replaced by what they are made of, so that only primitives remain."""

from __future__ import annotations

from dataclasses import replace

from treadle.ir.composites import MAX_POOL, definition_graph
from treadle.ir.control import CALL, Call
from treadle.ir.graph import Graph, GraphBuilder, Value
from treadle.ir.op import NoAttributes
from treadle.ir.ops.elementwise import STOP_GRADIENT, WHERE
from treadle.ir.ops.indexing import GATHER, SCATTER_ADD, Gather, ScatterAdd
from treadle.ir.ops.leaves import IOTA
from treadle.ir.ops.reductions import ARGMAX, REDUCE_MAX, SORT, ArgReduce, Reduce, Sort
from treadle.ir.rewrite import inline_into, remove_dead_code
from treadle.kernel.target import CPU, Target
from treadle.rules.arguments import ARGMAX_OF_MANY, ARGMIN_OF_MANY
from treadle.rules.blocked_sums import LONG_SCAN
from treadle.rules.driver import Keeps, rewrite
from treadle.rules.few_rows import SCATTER_TO_FEW
from treadle.rules.flat_scatter import SCATTER_TO_TABLE
from treadle.rules.float8 import WIDENED_FLOAT8
from treadle.rules.padded_heads import PADDED_HEADS
from treadle.rules.pattern import Anything, Composite, X, apply
from treadle.rules.rule import Body, Exactness, Match, Rule, RuleSet, take_x


def is_scatter_in_order(match: Match) -> bool:
    """row i goes to row i of as many, and a scatter costs the target more than a copy"""
    attributes, indices = match.root.attributes, match.type_of("indices")
    assert isinstance(attributes, ScatterAdd)
    is_first_axis = attributes.axis == 0 and attributes.batch == 0
    is_every_row = indices.rank == 1 and match.type_of("x") == match.type
    # A counter of few bits starts over where there are more rows than it counts.
    is_every_row = is_every_row and indices.size <= 2 ** (8 * indices.dtype.itemsize - 1)
    return is_first_axis and is_every_row and not match.target.rewriting.scatters_cheaply


SCATTER_IN_ORDER = Rule(
    "scatter_in_order",
    "Rows added to zeros, each at its own number, are the rows.",
    apply(SCATTER_ADD, X, apply(IOTA, name="indices")),
    take_x,
    is_scatter_in_order,
    Exactness.ROUNDING,
)


def is_scatter_of_many(match: Match) -> bool:
    """rows are added along the first axis in a fixed order, so many that sorting them costs less
    than looking"""
    attributes, indices = match.root.attributes, match.type_of("indices")
    assert isinstance(attributes, ScatterAdd)
    is_first_axis = attributes.axis == 0 and attributes.batch == 0 and indices.rank == 1
    is_sorted = match.node("indices").op is SORT
    least = match.target.rewriting.least_sorted
    if match.target.adds_together(match.type.dtype):
        return False
    return is_first_axis and not is_sorted and indices.size * attributes.size >= least > 0


def _scatter_in_runs(match: Match, builder: GraphBuilder) -> Value:
    origin = match.root.origin
    indices, order = builder.add(SORT, Sort(0), (match["indices"],), origin)
    (rows,) = builder.add(GATHER, Gather(0), (match["x"], order), origin)
    return builder.add(SCATTER_ADD, match.root.attributes, (rows, indices), origin)[0]


SCATTER_IN_RUNS = Rule(
    "scatter_in_runs",
    "Rows added at many indices are added run by run, the indices sorted.",
    apply(SCATTER_ADD, X, Anything("indices")),
    _scatter_in_runs,
    is_scatter_of_many,
    Exactness.ROUNDING,
)


def is_recomputed(match: Match) -> bool:
    """the call is the backward of one that materializes nothing: `td.checkpoint`"""
    call = match.root.attributes
    assert isinstance(call, Call)
    return call.recompute and call.name.endswith(".vjp")


def _body_of_call(match: Match, builder: GraphBuilder) -> Body:
    assert isinstance(match.root.attributes, Call)
    return Body(match.root.attributes.body, match.root.operands)


def _recomputed_body(match: Match, builder: GraphBuilder) -> Body:
    """Each operand under another name, so that what is recomputed is not what was computed."""
    assert isinstance(match.root.attributes, Call)
    names = (builder.add(STOP_GRADIENT, NoAttributes(), (v,))[0] for v in match.root.operands)
    return Body(match.root.attributes.body, tuple(names))


RECOMPUTED_CALL = Rule(
    "recomputed_call",
    "A call in the backward of a checkpoint is its body over values of their own.",
    apply(CALL),
    _recomputed_body,
    is_recomputed,
)

INLINE_CALL = Rule("inline_call", "A call is its body.", apply(CALL), _body_of_call)


def _definition(match: Match) -> Graph:
    types = tuple(map(match.graph.type_of, match.root.operands))
    return definition_graph(match.root.op, match.root.attributes, types)


def _maximum_of_windows(match: Match, builder: GraphBuilder) -> Body:
    """The definition takes the first of the greatest, for gradients; the value is the maximum."""
    definition = _definition(match)
    node = next(n for n in definition.nodes if n.op is ARGMAX)
    assert isinstance(node.attributes, ArgReduce)
    (output,) = definition.outputs
    inside = GraphBuilder()
    to_windows = Graph(definition.nodes, (replace(output, value=node.operands[0]),))
    windows = inline_into(inside, to_windows, {})
    (value,) = inside.add(REDUCE_MAX, Reduce((node.attributes.axis,)), windows)
    body = inside.build([replace(output, value=value)], definition.name)
    return Body(remove_dead_code(body), match.root.operands)


MAX_OF_WINDOWS = Rule(
    "max_of_windows",
    "Max pooling is the maximum of each window.",
    apply(MAX_POOL),
    _maximum_of_windows,
    exactness=Exactness.ROUNDING,
)


def _body_of_definition(match: Match, builder: GraphBuilder) -> Body:
    return Body(_definition(match), match.root.operands)


DEFINITION = Rule(
    "definition",
    "A composite is its definition.",
    Composite(),
    _body_of_definition,
)

# After differentiation, which is what such a choice is for: the guard of `td.cond`.
CHOSEN_GRADIENT = Rule(
    "chosen_gradient",
    "A choice between x and x without its gradient is x.",
    apply(WHERE, Anything("condition"), X, apply(STOP_GRADIENT, X)),
    take_x,
)

EXPANSION = RuleSet(
    "expansion",
    (
        SCATTER_IN_ORDER,
        SCATTER_TO_FEW,
        SCATTER_TO_TABLE,
        SCATTER_IN_RUNS,
        LONG_SCAN,
        ARGMAX_OF_MANY,
        ARGMIN_OF_MANY,
        RECOMPUTED_CALL,
        INLINE_CALL,
        MAX_OF_WINDOWS,
        CHOSEN_GRADIENT,
        PADDED_HEADS,
        WIDENED_FLOAT8,
        DEFINITION,
    ),
)


def expand(graph: Graph, target: Target = CPU, keeps: Keeps | None = None) -> Graph:
    """The same graph in primitives, but for composites that `keeps` says the target computes."""
    return rewrite(graph, EXPANSION, target, keeps=keeps)
