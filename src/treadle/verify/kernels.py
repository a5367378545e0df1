"""Compares the kernels of a program with its graph, over the finite field.

Each call is a claim: between what its inputs hold and what its outputs hold, the kernel computes
what the graph does. Inputs are generic elements, the same on both sides; the kernel runs some of
its iterations at full size, and the graph is evaluated at some elements that it has written. Calls
of one kernel between equal parts of the graph are one claim.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.base.dtypes import DType
from treadle.base.errors import GraphError
from treadle.domains.field import Residues, same
from treadle.domains.float64 import Array
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import NONE
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.indexing import Gather, ScatterAdd
from treadle.ir.ops.leaves import Constant, Leaf
from treadle.ir.ops.linear import Contraction
from treadle.ir.ops.reductions import ArgReduce
from treadle.kernel.bindings import Binding, Partial, Starts, Whole, Work
from treadle.kernel.claims import Claim
from treadle.kernel.coverage import element_count, stored_elements
from treadle.kernel.nodes import Buffer
from treadle.kernel.program import Call, Program
from treadle.verify import moved_elements as moved_elements
from treadle.verify import scanned as scanned
from treadle.verify.claims import Site, sites
from treadle.verify.extended import Extended, ExtendedField, chosen
from treadle.verify.indices import evaluate_index, ravel, unravel
from treadle.verify.keyed import Memory, Source, keyed
from treadle.verify.layouts import (
    Parts,
    filled_with,
    last_address,
    layout_of,
    source_of,
    variables_at,
)
from treadle.verify.machine import Machine, NotEstablishedError, WrongKernelError
from treadle.verify.moments import SPREAD, around, from_moments, spread
from treadle.verify.on_demand import Grid, OnDemand, along
from treadle.verify.picks import Picks
from treadle.verify.views import made_of_others, viewed

COMPARED = 14  # elements of each buffer, beside the first and the last that were written
TOGETHER = 8  # elements that the graph is evaluated at in one go
WHOLE = 2**20  # elements that a kernel may fill before another adds to them
CHEAP, TRIALS = 2**15, 3  # elements that a kernel computes, up to which there are several trials
INTEGERS = 50  # integers are below it where no axis says more


def check_kernels(program: Program, trial: int = 0) -> list[Claim]:
    """Every distinct claim of a program; a GraphError for one that does not hold."""
    return [check(program, site, trial) for site in sites(program)]


def check(program: Program, site: Site, trial: int = 0) -> Claim:
    """One claim, established or not; a GraphError if it does not hold."""
    call = site.call
    lines, names = tuple(map(str, call.origins)), tuple(a.buffer for a in call.arguments)
    try:
        if site.graph is None:
            raise NotEstablishedError("it stands between a scan and what is around it")
        with np.errstate(all="ignore"):
            found = _compared(program, site, site.graph, trial)
        return Claim("kernel", call.kernel.name, lines, names, *found)
    except NotEstablishedError as reason:
        return Claim("kernel", call.kernel.name, lines, names, reason=str(reason))
    except WrongKernelError as wrong:
        where = f" [{lines[0]}]" if lines else ""
        cause = f"kernel {call.kernel.name} does not compute its part of the graph: {wrong}"
        raise GraphError("verify", cause + where) from wrong


def _compared(
    program: Program, site: Site, graph: Graph, trial: int
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """On generic elements; what is computed fast, on some others too.

    Few elements may hide a defect: indices that are all outside, a maximum that is never another.
    """
    first, found = _once(program, site, graph, trial)
    if first.count <= CHEAP:
        for more in range(1, TRIALS):
            _once(program, site, graph, trial + more)
    return found


def _once(
    program: Program, site: Site, graph: Graph, trial: int
) -> tuple[Comparison, tuple[dict[str, list[int]], dict[str, list[int]]]]:
    """Without the laws of logarithms, with them where there are some and it needs them, and with
    what is given as the graph makes it of what else is: a kernel may read it, and compute it."""
    told: WrongKernelError | None = None
    for has_logs, is_made in ((False, False), (True, False), (site.has_logs, True)):
        if site.has_logs or not has_logs:
            one = Comparison(program, site, graph, trial, has_logs, is_made)
            try:
                return one, one.compare()
            except WrongKernelError as error:
                told = told or error
    assert told is not None
    raise told


class Comparison:
    """One call on one side, the graph on the other."""

    def __init__(
        self,
        program: Program,
        site: Site,
        graph: Graph,
        trial: int,
        has_logs: bool = False,
        is_made: bool = False,
    ):
        self.program, self.site, self.graph, self.trial = program, site, graph, trial
        self.is_made = is_made  # whether what others of the given values make is generic no more
        self.field = ExtendedField(trial, site.ordered, has_logs)
        self.constants = dict(program.constants)
        self.count = 0  # elements that the kernel computed
        self.most = _index_sizes(graph)
        inputs = (c.arguments[: len(c.kernel.inputs)] for c in program.calls())
        self.read_later = {a.buffer for some in inputs for a in some}
        self.made: set[Value] = set()
        self.on = self._graph()

    def compare(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The iterations that ran, and the addresses that were compared."""
        call, picks, on = self.site.call, Picks(self.trial), self.on
        self._check_counts(call)
        memory = self._memory(call)
        for other in self.site.earlier:
            if other not in self.site.chain:
                self._run_before(other, call, memory)
        machine = Machine(call.kernel, memory, self.field, picks)
        machine.run()
        self.count = machine.count
        compared: dict[str, list[int]] = {}
        for buffer, argument in self._pairs(call)[len(call.kernel.inputs) :]:
            written, binding = memory[buffer.name].written_at(), self.site.after[argument]
            if isinstance(binding.content, Work) and argument in self.read_later:
                continue  # looked at where it is read
            if not len(written):
                raise WrongKernelError(f"{argument} is not written")
            at = self._compared_at(binding, written, buffer.size)
            for part in np.array_split(at, -(-len(at) // TOGETHER)):
                self._same(on, binding, memory[buffer.name], part)
            compared[argument] = at.tolist()
        return picks.record, compared

    def _check_counts(self, call: Call) -> None:
        """A buffer that a kernel fills alone is stored to at least once for each element."""
        if self.site.earlier:
            return
        stored = stored_elements(call.kernel)
        for buffer, name in self._pairs(call)[len(call.kernel.inputs) :]:
            binding = self.site.after[name]
            if binding is not self.site.before[name] or isinstance(binding.content, Work):
                continue
            wanted = element_count(binding.content, self.graph.type_of(binding.value))
            if stored[buffer.name] < wanted:
                told = f"{stored[buffer.name]} of {wanted} elements of {name} are stored"
                raise WrongKernelError(told)

    def _compared_at(self, binding: Binding, written: Array, size: int) -> Array:
        """Some addresses that were written, some at the ends of every axis, and the very last.

        The last iterations have run: what they should have written is compared in any case.
        """
        content, type_ = binding.content, self.graph.type_of(binding.value)
        if isinstance(content, Work):
            raise NotEstablishedError(f"{binding}")
        rng = np.random.default_rng([self.trial, len(written)])
        last = {last_address(content, type_, is_full) for is_full in (False, True)}
        found = [*_some(written, rng), *(min(at, size - 1) for at in last)]
        if not isinstance(content, Partial):
            few = rng.choice(written, min(len(written), 4096), replace=False)
            for index in layout_of(content, type_)(few).indices:
                for end in (index.min(), index.max()):
                    found.append(rng.choice(few[index == end]))
        return np.unique(np.array(found))

    def _pairs(self, call: Call) -> list[tuple[Buffer, str]]:
        return [(b, a.buffer) for b, a in zip(call.kernel.buffers, call.arguments, strict=True)]

    # What goes in

    def _memory(self, call: Call) -> dict[str, Memory]:
        """The kernel's buffers: what they hold before it, or nothing that anything equals."""
        inputs, before = {b.name for b in call.kernel.inputs}, self.site.before
        made = self._begun()
        found: dict[str, Memory] = {}
        for buffer, name in self._pairs(call):
            undefined = keyed(self.field, f"undefined {name}", buffer.dtype)
            is_replaced = before[name] is not self.site.after.get(name)
            source = undefined
            if name in made:
                found[buffer.name] = made[name]
                continue
            if buffer.name in inputs or is_replaced:
                source = self._source(before[name], buffer, undefined)
            found[buffer.name] = Memory(buffer.dtype, buffer.size, source)
        return found

    def _given(self) -> list[str]:
        call = self.site.call
        return [a.buffer for a in call.arguments[: len(call.kernel.inputs)]]

    def _begun(self) -> dict[str, Memory]:
        """What an algorithm has made so far, by all iterations of the calls that began it."""
        made: dict[str, Memory] = {}
        chain = self.site.chain
        if any(isinstance(self.site.before[n].content, Starts) for n in self._given()):
            raise NotEstablishedError("a search needs indices that are in order")
        if sum(b.size for c in chain for b in c.kernel.buffers) > WHOLE * len(chain):
            raise NotEstablishedError("an algorithm of too many numbers comes before it")
        for call in chain:
            inputs, memory = {b.name for b in call.kernel.inputs}, dict[str, Memory]()
            for buffer, name in self._pairs(call):
                undefined = keyed(self.field, f"undefined {name}", buffer.dtype)
                source = undefined
                if buffer.name in inputs and name not in made:
                    source = self._source(self.site.before[name], buffer, undefined)
                memory[buffer.name] = made.get(name) or Memory(buffer.dtype, buffer.size, source)
                if buffer.name not in inputs:
                    made[name] = memory[buffer.name]
            picks = Picks(self.trial)
            picks.fewest = WHOLE
            Machine(call.kernel, memory, self.field, picks).run()
        for memory_ in made.values():
            memory_.written[:] = False
        return made

    def _run_before(self, other: Call, call: Call, memory: dict[str, Memory]) -> None:
        """A kernel that fills what this one adds to: all of it."""
        own = {name: memory[buffer.name] for buffer, name in self._pairs(call)}
        shared = [buffer for buffer, name in self._pairs(other) if name in own]
        fill = filled_with(other.kernel)
        if fill is not None:
            zero = self.field.literal(fill.value, fill.dtype)
            own[other.arguments[0].buffer].forget(
                lambda at: zero.map(lambda a: np.broadcast_to(a, at.shape))
            )
            return
        if other.kernel.inputs or sum(b.size for b in shared) > WHOLE:
            raise NotEstablishedError(f"{other.kernel.name} writes the same buffer before it")
        found = {buffer.name: own[name] for buffer, name in self._pairs(other) if name in own}
        if len(found) < len(other.kernel.buffers):
            raise NotEstablishedError(f"{other.kernel.name} writes other buffers too")
        picks = Picks(self.trial)
        picks.fewest = WHOLE
        Machine(other.kernel, found, self.field, picks).run()
        for filled in found.values():
            filled.written[:] = False

    def _source(self, binding: Binding, buffer: Buffer, undefined: Source) -> Source:
        if isinstance(binding.content, Work):
            raise NotEstablishedError(f"{binding}")
        if isinstance(binding.content, Partial):
            return keyed(self.field, f"parts {binding.buffer}", buffer.dtype)
        type_ = self.graph.type_of(binding.value)
        value = self.value(binding.value)
        if isinstance(binding.content, Whole) and buffer.size < type_.size:
            raise NotEstablishedError(f"it sees a part of {binding.buffer}")
        return source_of(binding.content, type_, value, undefined, self.field)

    def value(self, value: Value) -> Source:
        """Elements of a value by their flat index: those of what it is a view of."""
        base, moves = viewed(self.graph, value)
        source = self._base(base)
        if not moves:
            return source

        def moved(at: Array) -> Extended:
            for move in moves:
                at = move(at)
            return source(at)

        return moved

    def _base(self, value: Value) -> Source:
        """A constant's own elements, or generic ones."""
        value = self.site.equal.get(value, value)
        node = self.graph.nodes[value.node]
        if value in self.made:
            shape = self.graph.type_of(value).shape
            return lambda at: self.on.points(value, unravel(at, shape))
        if isinstance(node.attributes, Constant):
            return self._number(node.attributes)
        array = self.constants.get(f"{self.site.scope}b{value.node}.{value.output}")
        if array is not None:
            return self._constant(array, self.graph.type_of(value).dtype)
        name = f"%{value.node}.{value.output}"
        most = self.most.get(value, INTEGERS)
        return keyed(self.field, name, self.graph.type_of(value).dtype, most)

    def _number(self, attributes: Constant) -> Source:
        value, dtype = attributes.value, attributes.type.dtype
        if isinstance(value, ArrayLiteral):
            return self._constant(value.array, dtype)
        found = self.field.literal(value, dtype)
        return lambda at: found.map(lambda a: np.broadcast_to(a, at.shape))

    def _constant(self, array: np.ndarray, dtype: DType) -> Source:
        flat = array.reshape(-1)

        def source(at: Array) -> Extended:
            taken = flat[at]
            if not dtype.is_float:
                return self.field.integers(taken, dtype)
            finite = np.where(np.isfinite(taken), taken, 0)
            q, p = (lane.array(finite) for lane in self.field.field.lanes)
            infinite = np.where(np.isinf(taken), np.sign(taken), 0).astype(np.int64)
            return Extended(q, p, infinite=infinite if infinite.any() else None)

        return source

    def _graph(self) -> OnDemand:
        """The graph, cut at what the call is given, and those whose algorithm it goes on with."""
        calls, before = (*self.site.chain, self.site.call), self.site.before
        names = [a.buffer for c in calls for a in c.arguments[: len(c.kernel.inputs)]]
        inputs = [n for n in dict.fromkeys(names) if not isinstance(before[n].content, Work)]
        values = [before[n].value for n in inputs if not isinstance(before[n].content, Partial)]
        cuts = {viewed(self.graph, value)[0] for value in values}
        if self.is_made:
            self.made = made_of_others(self.graph, cuts)
            cuts -= self.made

        def given(value: Value) -> Source | None:
            is_leaf = isinstance(self.graph.nodes[value.node].attributes, Leaf)
            return self._base(value) if value in cuts or is_leaf else None

        on = OnDemand(self.graph, self.field, given)
        sums = [before[n] for n in inputs if isinstance(before[n].content, Partial)]
        for binding in sums:
            if _op_of(binding) == SPREAD:
                self._add_moments(on, binding, [b for b in sums if b.value == binding.value])
            else:
                on.special[binding.value] = self._from_parts(binding)
        return on

    def _add_moments(self, on: OnDemand, spreads: Binding, both: list[Binding]) -> None:
        """Sums of squares around centres, from the sums and spreads of parts."""
        found = [b for b in both if _op_of(b) == "add"]
        if len(found) != 1:
            raise NotEstablishedError(f"{spreads} without the sums of its parts")
        dtype = self.graph.type_of(spreads.value).dtype
        sources = [keyed(self.field, f"parts {b.buffer}", dtype) for b in (found[0], spreads)]
        for value, centre in around(self.graph, spreads.value).items():
            on.special[value] = from_moments(on, centre, found[0], *sources)

    def _from_parts(self, binding: Binding) -> Callable[[Grid], Extended]:
        """The elements of a sum whose parts are given."""
        node, content = self.graph.nodes[binding.value.node], binding.content
        assert isinstance(content, Partial)
        parts, dtype = Parts(node, content), node.types[0].dtype
        source = keyed(self.field, f"parts {binding.buffer}", dtype)

        def made(grid: Grid) -> Extended:
            mesh = np.ix_(*map(along, grid)) if grid else ()
            at = parts.of(np.asarray(ravel(mesh, node.types[0].shape)))
            return self.field.reduced(content.op, source(at), (at.ndim - 1,), dtype)

        return made

    # What comes out

    def _same(self, on: OnDemand, binding: Binding, memory: Memory, at: Array) -> None:
        """The elements at some addresses are the graph's."""
        if isinstance(binding.content, Partial):
            wanted = self._parts(on, binding, binding.content, at)
        else:
            at, wanted = self._elements(on, binding, memory.dtype, at)
        found = memory.load(at)
        wrong = _differing(found, wanted, at)
        if wrong is None:
            return
        raise WrongKernelError(f"{binding} is something else at {wrong}")

    def _elements(
        self, on: OnDemand, binding: Binding, dtype: DType, at: Array
    ) -> tuple[Array, Extended]:
        """A value's elements at those addresses that have some."""
        type_ = self.graph.type_of(binding.value)
        places = layout_of(binding.content, type_)(at)
        there = places.is_there
        pairs = zip(places.indices, type_.shape, strict=True)
        inside = [np.clip(i[there], 0, max(0, n - 1)) for i, n in pairs]
        found = on.points(binding.value, inside)
        return at[there], chosen(places.is_zero[there], self.field.zero(dtype), found)

    def _parts(self, on: OnDemand, binding: Binding, partial: Partial, at: Array) -> Extended:
        """Partial sums at some addresses, each from its terms."""
        node = self.graph.nodes[binding.value.node]
        variables, _ = variables_at(partial.elements)(at)
        shape = tuple(v.extent for v in partial.summed)
        inner = unravel(np.arange(int(np.prod(shape, dtype=np.int64))), shape)
        count = len(inner[0]) if inner else 1
        names: dict[str, Array] = {n: v[:, None] for n, v in variables.items()}
        names |= {v.name: i for v, i in zip(partial.summed, inner, strict=True)}
        full = (len(at), count)
        held = np.ones(full, bool)
        for guard in partial.elements.guards:
            index = np.asarray(evaluate_index(guard.index, dict(names)))
            held &= (index >= guard.low) & (index < guard.high)
        element = [
            np.broadcast_to(np.asarray(evaluate_index(i, dict(names))), full)
            for i in partial.elements.element
        ]
        found, dtype = self._terms(on, node, element), node.types[0].dtype
        if partial.op == SPREAD:
            if not held.all():
                raise NotEstablishedError("spreads of parts that end before others")
            return spread(self.field, found, dtype)
        if not held.all():
            nothing = self.field.literal({"add": 0, "mul": 1}.get(partial.op, 0), dtype)
            if partial.op in ("max", "min"):
                raise NotEstablishedError("parts of a maximum that end before others")
            found = chosen(held, found, nothing)
        return self.field.reduced(partial.op, found, (1,), dtype)

    def _terms(self, on: OnDemand, node: Node, element: list[Array]) -> Extended:
        if not isinstance(node.attributes, Contraction):
            shape = self.graph.type_of(node.operands[0]).shape
            inside = [np.clip(i, 0, n - 1) for i, n in zip(element, shape, strict=True)]
            return on.points(node.operands[0], inside)
        lx, ly, lr = node.attributes.labels
        depth = [c for c in lx if c not in lr]
        axes = dict(zip([*lr, *depth], element, strict=True))
        factors = [
            on.points(v, [axes[c] for c in labels])
            for v, labels in zip(node.operands, (lx, ly), strict=True)
        ]
        dtype = node.types[0].dtype
        return self.field.apply(e.MUL, NONE, factors, [dtype, dtype], dtype)


def _op_of(binding: Binding) -> str:
    return binding.content.op if isinstance(binding.content, Partial) else ""


def _index_sizes(graph: Graph) -> dict[Value, int]:
    """The axes that integers index, or are positions along, by their length."""
    found: dict[Value, int] = {}
    for position, node in enumerate(graph.nodes):
        if isinstance(node.attributes, ArgReduce):
            axis = node.attributes.axis
            found[Value(position)] = graph.type_of(node.operands[0]).shape[axis]
        elif isinstance(node.attributes, Gather):
            found[node.operands[1]] = graph.type_of(node.operands[0]).shape[node.attributes.axis]
        elif isinstance(node.attributes, ScatterAdd):
            found[node.operands[1]] = node.attributes.size
    return found


def _some(at: Array, rng: np.random.Generator) -> Array:
    """The first and the last address, and some between."""
    return at[[0, -1, *rng.integers(0, len(at), COMPARED)]]


def _differing(found: Extended, wanted: Extended, at: Array) -> int | None:
    """The first address at which two are no longer the same in any lane."""

    def part(x: Extended) -> Residues:
        q, p = (np.broadcast_to(a, at.shape) for a in (x.q, x.p))
        sign = None if x.sign is None else np.broadcast_to(x.sign, at.shape)
        return Residues(q, p, sign)

    one, other = part(found), part(wanted)
    flags = [
        np.zeros(at.shape, np.int64)
        if x.infinite is None
        else np.broadcast_to(x.infinite, at.shape)
        for x in (found, wanted)
    ]
    finite = (flags[0] == 0) & (flags[1] == 0)
    if not np.array_equal(flags[0], flags[1]):
        return int(at[flags[0] != flags[1]][0])

    def kept(r: Residues) -> Residues:
        return Residues(r.q[finite], r.p[finite], None if r.sign is None else r.sign[finite])

    if same(kept(one), kept(other)):
        return None
    differs = (one.p != other.p) & finite
    return int(at[differs][0]) if differs.any() else int(at[0])
