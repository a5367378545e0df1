"""The search: anchors, cuts around them, proposals for each, and the graph with what was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from treadle.base.errors import TreadleError
from treadle.base.rewrites import Exactness
from treadle.domains.index_ranges import asks_the_same
from treadle.ir import composites as c
from treadle.ir.graph import Graph, GraphBuilder, Output, Value
from treadle.ir.op import Op
from treadle.ir.rewrite import copied, inline_into, remove_dead_code, walk
from treadle.kernel.target import Target
from treadle.recognition import affine, attention, convolutions, losses, pools
from treadle.recognition.attention_graph import AttentionGraph
from treadle.recognition.convolutions import Written
from treadle.recognition.judge import Verdict, judge, saturated, sums_nothing
from treadle.recognition.pools import Parts
from treadle.recognition.proposals import (
    FEW_ROOTS,
    PROPOSALS,
    Propose,
    Region,
    masked_softmaxes,
)
from treadle.recognition.regions import (
    MOST_ROOTS,
    Flow,
    IsSide,
    is_flag,
    is_index,
    no_sides,
    of_shape,
)
from treadle.verify.normal_form.decide import all_spent, products_spent

# What comparisons may cost that come to nothing, of a graph, in products of atoms: about a second;
# and for each of its nodes; and what a look at a region costs, which takes as long as some.
MOST_IN_VAIN, FOR_A_NODE, LOOK = 40_000, 50, 5
MOST = 2**19  # of all that is compared, found or not: 15 s at about 28 µs each
MOST_NODES = 32  # of a region of one float: a group norm that is written out has 20


@dataclass(frozen=True, slots=True)
class Found:
    """A region that is a composite: the values that it reads, and the graph that stands for it."""

    name: str
    root: Value
    inputs: tuple[Value, ...]
    graph: Graph
    verdict: Verdict


class Search:
    """What was compared already: layers repeat the same regions."""

    def __init__(self, nodes: int, is_differentiated: bool) -> None:
        self._is_differentiated = is_differentiated
        self._attentions: dict[tuple[Graph, Graph], Verdict | None] = {}
        self._known: dict[tuple[Propose, Graph], tuple[Graph, Verdict] | None] = {}
        self._left, self._most = MOST_IN_VAIN + FOR_A_NODE * nodes, MOST

    def compared(self, propose: Propose, region: Graph) -> tuple[Graph, Verdict] | None:
        """The first proposal that a region is; none of a region with an empty value."""
        if any(0 in t.shape for node in region.nodes for t in node.types):
            return None  # sizes of proposals are quotients of its sizes
        key = propose, region
        if key not in self._known:
            self._known[key] = self._first(propose, region)
        return self._known[key]

    def _judged(self, region: Graph, proposal: Graph) -> Verdict | None:
        """A verdict, as long as those that came to nothing have not cost too much."""
        if self._left <= 0 or self._most <= 0:
            return None
        before = all_spent()
        verdict = judge(region, proposal)
        self._most -= len(region.nodes) + all_spent() - before
        if verdict is None:
            self._left -= len(region.nodes) + products_spent()
        return verdict

    def _first(self, propose: Propose, region: Graph) -> tuple[Graph, Verdict] | None:
        there = _composites(region)
        try:
            for proposal in propose(Region(region)):
                verdict = None
                if not _composites(proposal) <= there:
                    verdict = self._judged(region, proposal)
                if verdict is None or proposal.output_types != region.output_types:
                    continue
                if not sums_nothing(proposal):
                    return proposal, verdict
        except TreadleError:  # what a proposal was guessed from does not fit together
            return None
        return None

    def unary(self, graph: Graph) -> list[Found]:
        """Regions of one float, found from anchors in order; none lies inside another."""
        flow, found, taken = Flow(graph), list[Found](), set[int]()
        for position, node in enumerate(graph.nodes):
            if node.op in PROPOSALS and position not in taken and not flow.closed[position]:
                match = self._around(flow, position, PROPOSALS[node.op])
                if match is not None:
                    found.append(match[0])
                    taken |= match[1]
        return found

    def _around(
        self, flow: Flow, anchor: int, proposals: Sequence[Propose]
    ) -> tuple[Found, frozenset[int]] | None:
        op = flow.graph.nodes[anchor].op
        for root in reversed(flow.below(anchor, FEW_ROOTS.get(op, MOST_ROOTS))):
            for propose in proposals:
                is_side = is_flag if propose is masked_softmaxes else no_sides
                match = self._at(flow, anchor, Value(root), propose, is_side)
                if match is not None:
                    return match
        return None

    def losses(self, graph: Graph) -> list[Found]:
        """Cross-entropies of logits and indices."""
        flow, found, taken = Flow(graph), list[Found](), set[int]()
        for anchor, node in enumerate(graph.nodes):
            if node.op in losses.ANCHORS and anchor not in taken:
                for root in reversed(flow.below(anchor)):
                    match = self._loss_at(flow, anchor, Value(root))
                    # The program around a region may take labels that its composite refuses.
                    if match is not None and asks_the_same(graph, replaced(graph, [match[0]])):
                        found.append(match[0])
                        taken |= match[1]
                        break
        return found

    def _loss_at(self, flow: Flow, anchor: int, root: Value) -> tuple[Found, frozenset[int]] | None:
        for cut in reversed(flow.cuts(root, is_index)):
            logits = flow.graph.type_of(cut.x)
            if anchor not in cut.inside or not logits.is_float or len(cut.sides) != 1:
                continue
            for targets in of_shape(flow, cut.sides[0], logits.shape[:-1]):
                found = self._found(flow, losses.cross_entropies, root, (cut.x, targets))
                if found is not None:
                    return found, cut.inside
        return None

    def weights(self, graph: Graph) -> list[Found]:
        """Norms with their weights."""
        flow, found = Flow(graph), list[Found]()
        for position, node in enumerate(graph.nodes):
            if node.op in affine.ANCHORS and len(node.operands) == 1:
                roots = (Value(i) for i in reversed(flow.below(position)))
                matches = (self._weighted(flow, position, root) for root in roots)
                match = next((m for m in matches if m is not None), None)
                found += [] if match is None else [match]
        return found

    def _weighted(self, flow: Flow, norm: int, root: Value) -> Found | None:
        node = flow.graph.nodes[norm]
        sides = flow.beside(root, norm)
        if not sides or len(sides) > affine.MOST_WEIGHTS:
            return None
        shape = affine.shape_of_weights(flow.graph, node)
        weights = [w for v in sides for w in of_shape(flow, v, shape)[:1]]
        if len(weights) < len(sides):
            return None
        inputs = (node.operands[0], *weights)
        return self._found(flow, affine.weighted_norms, root, inputs)

    def attentions(self, graph: Graph, target: Target) -> list[Found]:
        """Attention that is written out, where the target has kernels for it."""
        flow, found = Flow(graph), list[Found]()
        for match in attention.attentions(flow, target):
            try:
                entry = self._attended(flow, match)
            except TreadleError:
                continue
            found += [] if entry is None else [entry]
        return found

    def _attended(self, flow: Flow, match: attention.Attending) -> Found | None:
        parts = AttentionGraph(flow, match)
        if parts.saturates and parts.blinds:
            return None
        verdict = self._attention(parts)
        if verdict is None:
            return None
        kind = Exactness.SATURATING if parts.saturates else verdict.kind
        final = parts.graph(with_nan=parts.may_hide)
        entry = Verdict(kind, verdict.status)
        return Found("attention", match.root, parts.inputs, final, entry)

    def _attention(self, parts: AttentionGraph) -> Verdict | None:
        region, proposal = parts.region(), parts.graph(with_nan=False)
        if parts.saturates:
            region, proposal = saturated(region), saturated(proposal)
        key = region, proposal
        if key not in self._attentions:
            self._attentions[key] = self._judged(region, proposal)
        return self._attentions[key]

    def convolutions(self, graph: Graph) -> list[Found]:
        """Convolutions by windows or by shifts."""
        flow, found, taken = Flow(graph), list[Found](), set[int]()
        for match in convolutions.written(flow):
            if match.root.node not in taken:
                entry = self._convolution(flow, match)
                if entry is not None:
                    found.append(entry)
                    taken |= set(flow.between(match.root, set(entry.inputs)))
        return found

    def _convolution(self, flow: Flow, match: Written) -> Found | None:
        type_of, rank = flow.graph.type_of, flow.graph.type_of(match.root).rank
        images = [v for v in match.images if type_of(v).rank == rank]
        weights = [v for v in match.weights if type_of(v).rank in (rank, rank - 1)]
        most = convolutions.MOST_SOURCES
        for x, w in product(images[::-1][:most], weights[::-1][:most]):
            if x != w and type_of(x).is_float and type_of(w).is_float:
                found = self._found(flow, _convolutions, match.root, (x, w))
                if found is not None:
                    return found
        return None

    def pools(self, graph: Graph) -> list[Found]:
        """Maxima and means of windows."""
        flow, found, taken = Flow(graph), list[Found](), set[int]()
        for match in pools.written(flow):
            if match.root.node not in taken:
                entry = self._pool(flow, match)
                if entry is not None:
                    found.append(entry)
                    taken |= set(flow.between(match.root, set(entry.inputs)))
        return found

    def _pool(self, flow: Flow, match: Parts) -> Found | None:
        """Maxima in graphs without gradients alone: of equal elements of a window the first has
        the gradient of `max_pool`, where `td.max` shares it.
        """
        result = flow.graph.type_of(match.root)
        for x in match.images[::-1][: convolutions.MOST_SOURCES]:
            type_ = flow.graph.type_of(x)
            if type_.is_float and pools.may_be(type_.shape, result.shape):
                found = self._found(flow, pools.proposals, match.root, (x,))
                if found is not None:
                    is_max = found.name == c.MAX_POOL.name
                    return None if is_max and self._is_differentiated else found
        return None

    def _found(
        self, flow: Flow, propose: Propose, root: Value, inputs: tuple[Value, ...]
    ) -> Found | None:
        if self._left <= 0:
            return None
        self._left -= LOOK
        match = self.compared(propose, flow.extract(root, inputs))
        if match is None:
            return None
        proposal, verdict = match
        return Found(name_of(proposal), root, inputs, proposal, verdict)

    def _at(
        self, flow: Flow, anchor: int, root: Value, propose: Propose, is_side: IsSide
    ) -> tuple[Found, frozenset[int]] | None:
        for cut in reversed(flow.cuts(root, is_side)):
            is_float = flow.graph.type_of(cut.x).is_float
            if anchor not in cut.inside or not is_float or len(cut.sides) > 1:
                continue
            if len(cut.inside) > MOST_NODES or len(cut.inside & flow.of_op(anchor)) > 1:
                continue  # no composite has two of what leads to it
            inputs = (cut.x, *cut.sides)
            found = self._found(flow, propose, root, inputs)
            if found is not None:
                return found, cut.inside
        return None


def _convolutions(region: Region) -> Iterator[Graph]:
    x, w = region.inputs
    return convolutions.proposals(region.graph, (x, w))


def _composites(graph: Graph) -> set[tuple[Op, int]]:
    """Those of a graph, with the number of their operands."""
    return {(n.op, len(n.operands)) for n in graph.nodes if n.op.is_composite}


def name_of(graph: Graph) -> str:
    """The composite that a graph has."""
    return next(n.op.name for n in graph.nodes if n.op.is_composite)


def replaced(graph: Graph, found: Sequence[Found]) -> Graph:
    """The graph with what was found in place of what was written."""
    by_root = {f.root: f for f in found}
    builder = GraphBuilder()
    moved: dict[Value, Value] = {}

    def visit(position: int, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        node = graph.nodes[position]
        match = by_root.get(Value(position))
        values = copied(builder, node, operands)
        if match is not None:
            leaves = {str(i): moved[v] for i, v in enumerate(match.inputs)}
            values = tuple(inline_into(builder, match.graph, leaves, node.origin))
        moved.update((Value(position, i), v) for i, v in enumerate(values))
        return values

    values = walk(graph, visit)
    outputs = [Output(o.kind, o.name, v) for o, v in zip(graph.outputs, values, strict=True)]
    return remove_dead_code(builder.build(outputs, graph.name))
