"""Checks a program: its memory, then each distinct kernel, for all iterations where that can be
shown, and against the graph over the field where it cannot.

A call claims that, between what its inputs hold and what its outputs hold, its kernel computes what
the graph does. Inputs are generic elements, the same on both sides; the kernel runs some iterations
at full size, and the graph is asked for some of the elements that were written. Calls of one kernel
between equal parts of a graph are one claim.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from treadle_checker.bounds import check_bounds
from treadle_checker.composites import DEFINITIONS
from treadle_checker.elements import Elements, unravel
from treadle_checker.field import ELEMENTWISE, Array, Element, Field, chosen, is_float, same
from treadle_checker.layouts import (
    Parts,
    element_count,
    held_by,
    last_addresses,
    numbers,
    places,
    result_labels,
    variables_at,
)
from treadle_checker.machine import Machine, Memory, Source, reduced
from treadle_checker.memory import aliased, check_arena, check_calls, check_phases
from treadle_checker.program import (
    Binding,
    Call,
    For,
    Kernel,
    Library,
    Matmul,
    Partial,
    Phase,
    Program,
    Step,
    Store,
    Whole,
    Work,
    walk,
)
from treadle_checker.races import check_races
from treadle_checker.reading import NotEstablished, Rejected
from treadle_checker.values import LEAVES, Graph, Node, Value

COMPARED = 14  # elements of each buffer, beside those at its ends
CHEAP, MORE = 2**17, 4  # elements up to which a kernel is compared several times
WHOLE = 2**20  # elements that a kernel may fill before another adds to them
TERMS = 2**20  # of partial sums that are looked at together
INTEGERS = 50  # integers are below it where no axis says more
MOVES = frozenset(["reshape", "permute", "broadcast", "slice", "flip", "stop_gradient", "cast"])
BY_ORDER = frozenset(["argmax", "argmin", "sort", "top_k"])


@dataclass(frozen=True)
class Claim:
    """What was looked at and how, or why it is not established."""

    claim: str
    scope: str  # the kernel, or the program
    evidence: str = ""
    condition: str = ""
    reason: str = ""  # why it is not established; nothing where it is

    @property
    def is_established(self) -> bool:
        return not self.reason


def check_program(program: Program, graphs: Mapping[str, Graph], effort: int = 1) -> list[Claim]:
    """All claims about a program; Rejected if one is wrong.

    `graphs` are those whose values buffers hold, by scope. `effort` is how often each kernel is
    compared with its graph, each time with other numbers; 0: only what holds for all iterations.
    """
    check_calls(program)
    check_phases(program)
    check_arena(program)
    claims = [
        Claim("what is read was written before, by no call of the same phase", "program"),
        Claim("buffers that live at one time do not overlap", "program"),
    ]
    for kernel in program.kernels:
        with _named(kernel, ()):
            check_bounds(kernel)
            check_races(kernel)
            claims.append(Claim("accesses are in bounds, iterations do not meet", kernel.name))
    _check_bindings(program, graphs)
    for site in Walk(program, graphs).sites() if effort else ():
        claims.append(check_call(program, site, effort))
    return claims


class _named:  # noqa: N801
    """Says of which kernel and which line something is wrong. Nothing unexpected is accepted."""

    def __init__(self, kernel: Kernel, lines: tuple[str, ...]):
        self.where = f"kernel {kernel.name}" + (f" [{lines[0]}]" if lines else "")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, wrong: BaseException | None, trace: object) -> None:
        if isinstance(wrong, Rejected):
            raise Rejected(f"{self.where}: {wrong}") from wrong
        unexpected = LookupError, ValueError, TypeError, ArithmeticError, AssertionError
        if isinstance(wrong, (*unexpected, RecursionError)):
            raise Rejected(f"{self.where} cannot be run: {type(wrong).__name__} {wrong}") from wrong


def _check_bindings(program: Program, graphs: Mapping[str, Graph]) -> None:
    known = {b.buffer for b in program.bindings}
    for name in program.buffers:
        if name not in known and program.buffers[name].size:
            raise Rejected(f"nothing says what {name} holds")
    for b in program.bindings:
        graph = graphs.get(b.scope)
        if graph is None or b.node >= len(graph.nodes):
            raise Rejected(f"{b.buffer} holds a value of no graph")
        if b.output >= len(graph.nodes[b.node].types):
            raise Rejected(f"{b.buffer} holds a value that {graph.nodes[b.node].op} does not give")
    held = {(b.buffer, b.node, b.output) for b in program.bindings if b.content == Whole()}
    for name, value, buffer in program.outputs:
        if (buffer, *value) not in held:
            raise Rejected(f"the output {name} is not what {buffer} holds")


# Which claims there are


@dataclass(frozen=True, eq=False)
class Site:
    """One call, and what its buffers hold before and after it. No graph: they belong to several."""

    call: Call
    kernel: Kernel
    graph: Graph | None
    before: Mapping[str, Binding]
    after: Mapping[str, Binding]
    earlier: tuple[Call, ...]  # that wrote the same buffers
    is_last: bool  # of those that write them

    @property
    def pairs(self) -> list[tuple[str, str, bool]]:
        """Names of buffers: the kernel's and the program's, and whether they are outputs."""
        count = len(self.kernel.inputs)
        names = zip(self.kernel.buffers, self.call.arguments, strict=True)
        return [(b.name, name, i >= count) for i, (b, (name, _)) in enumerate(names)]


class Walk:
    """Calls in the program's order, with what every buffer holds by then."""

    def __init__(self, program: Program, graphs: Mapping[str, Graph]):
        self.program, self.graphs = program, graphs
        self.every: dict[tuple[str, str], list[Binding]] = {}
        for b in program.bindings:
            self.every.setdefault((b.scope, b.buffer), []).append(b)
        inner = {name for scope, name in self.every if scope}
        for name in inner:  # what a carry is around its scan is found from the scan itself
            if len(self.every.get(("", name), ())) > 1:
                del self.every["", name]
        self.held = {key: found[0] for key, found in self.every.items()}
        self.numbers: dict[object, int] = {}
        self.writers: dict[tuple[str, str], list[Call]] = {}
        for call, repeated in _calls(program.steps, False):
            for name in self._written(call):
                self.writers.setdefault((self._scope(call, repeated) or "", name), []).append(call)

    def sites(self) -> Iterator[Site]:
        seen: set[object] = set()
        for call, repeated in _calls(self.program.steps, False):
            scope = self._scope(call, repeated)
            kernel = self.program.kernels[call.kernel]
            if scope is None:
                site = self._beside_a_scan(call, kernel, repeated)
            else:
                site = self._site(call, kernel, scope)
            key = call.kernel, site.graph and self._signature(site, site.graph)
            if key not in seen and site.is_last:
                seen.add(key)
                yield site

    def _written(self, call: Call) -> list[str]:
        return [n for n, _ in call.arguments[len(self.program.kernels[call.kernel].inputs) :]]

    def _scope(self, call: Call, repeated: bool) -> str | None:
        """The graph whose values a call's buffers hold: a body's first where it is repeated."""
        order = sorted(self.graphs, key=lambda scope: (scope == "") == repeated)
        names = {name for name, _ in call.arguments}
        return next((s for s in order if all((s, n) in self.every for n in names)), None)

    def _site(self, call: Call, kernel: Kernel, scope: str) -> Site:
        before = {name: self.held[scope, name] for name, _ in call.arguments}
        after = before | {name: self.every[scope, name][-1] for name in self._written(call)}
        self.held |= {(scope, name): b for name, b in after.items()}
        earlier, is_last = dict[Call, None](), True
        for name in self._written(call):
            writers = self.writers[scope, name]
            at = writers.index(call)
            earlier |= dict.fromkeys(writers[:at])
            is_last &= at + 1 == len(writers)
        return Site(call, kernel, self.graphs[scope], before, after, tuple(earlier), is_last)

    def _beside_a_scan(self, call: Call, kernel: Kernel, repeated: bool) -> Site:
        """A call whose buffers belong to a scan and to what is around it, as one of the two."""
        written = self._written(call)
        for scope in [s for s in self.graphs if (s != "") == repeated]:
            before: dict[str, Binding | None] = {
                name: self.held.get((scope, name)) or self._seen_from(scope, name, name in written)
                for name, _ in call.arguments
            }
            known = {name: b for name, b in before.items() if b is not None}
            if len(known) == len(before):
                own = [(scope, name) for name in written if (scope, name) in self.every]
                after = known | {name: self.every[scope, name][-1] for _, name in own}
                self.held |= {(scope, name): after[name] for _, name in own}
                return Site(call, kernel, self.graphs[scope], known, after, (), True)
        self.held |= {("", n): self.every["", n][-1] for n in written if ("", n) in self.every}
        return Site(call, kernel, None, {}, {}, (), True)

    def _seen_from(self, scope: str, name: str, is_written: bool) -> Binding | None:
        """What a buffer of a scan holds of the graph around it, or the other way round.

        Around it, what a carry is given is an operand of the scan, and what it has in the end is a
        result. Inside it, a row of an operand is an input of the body, and a row of what is stacked
        is one of its outputs.
        """
        outer = self.graphs[""]
        for inner, body in self.graphs.items():
            found = self.every.get((inner if scope == "" else "", name))
            at = inner.removeprefix("scan").removesuffix(":")
            if not found or (scope and inner != scope) or not at.isdecimal():
                continue
            position = int(at)
            if position >= len(outer.nodes) or outer.nodes[position].op != "scan":
                continue
            node = outer.nodes[position]
            carries, first = node.attributes["carries"], node.attributes["constants"]
            inputs, made = [Value(i) for i in body.inputs], [v for _, _, v in body.outputs]
            results = [Value(position, k) for k in range(len(made))]
            if scope == "":
                given = node.operands[first : first + carries]
                taken = zip(inputs[first : first + carries], given, strict=True)
                ends = zip(made[:carries], results[:carries], strict=True)
                pairs = list(taken if is_written else ends)
            else:
                slices = list(zip(node.operands, inputs, strict=False))
                slices = slices[:first] + slices[first + carries :]
                pairs = [*slices, *zip(results[carries:], made[carries:], strict=True)]
            binding = found[0] if is_written else found[-1]
            to = dict(pairs).get(_value(binding))
            if to is not None:
                return replace(binding, scope=scope, node=to.node, output=to.output)
        return None

    def _signature(self, site: Site, graph: Graph) -> object:
        """What a call is between, whatever buffers and nodes are called."""
        given = {_value(site.before[n]): i for i, (_, n, made) in enumerate(site.pairs) if not made}
        for i, (_, name, _) in enumerate(site.pairs):
            if site.before[name] is not site.after[name]:
                given.setdefault(_value(site.before[name]), i)
        known: dict[int, int] = {}
        for position in nodes_between(graph, site):
            node = graph.nodes[position]
            operands = tuple(
                ("given", given[v]) if v in given else (known[v.node], v.output)
                for v in node.operands
            )
            form = (node.key or node.op, str(node.attributes.get("name")), node.types, operands)
            known[position] = self.numbers.setdefault(form, len(self.numbers))
        contents = tuple((site.before[n].content, site.after[n].content) for _, n, _ in site.pairs)
        made = (_value(site.after[n]) for _, n, is_output in site.pairs if is_output)
        ends = tuple(("given", given[v]) if v in given else (known[v.node], v.output) for v in made)
        return contents, ends, tuple(c.kernel for c in site.earlier)


def _calls(steps: tuple[Step, ...], repeated: bool) -> Iterator[tuple[Call, bool]]:
    for step in steps:
        if isinstance(step, Phase):
            yield from ((call, repeated) for call in step.calls)
        else:
            yield from _calls(step.steps, True)


def _value(binding: Binding) -> Value:
    return Value(binding.node, binding.output)


def nodes_between(graph: Graph, site: Site) -> list[int]:
    """Nodes between what a call is given and what it gives, operands first."""
    given = {_value(site.before[name]) for _, name, made in site.pairs if not made}
    wanted = [_value(site.after[name]) for _, name, made in site.pairs if made]
    pending, found = [v.node for v in wanted if v not in given], set[int]()
    while pending:
        position = pending.pop()
        if position not in found:
            found.add(position)
            pending += [v.node for v in graph.nodes[position].operands if v not in given]
    return sorted(found)


# One claim


def check_call(program: Program, site: Site, effort: int) -> Claim:
    told = "computes its part of the graph"
    try:
        with _named(site.kernel, site.call.lines), np.errstate(all="ignore"):
            if aliased(program, site.call):
                raise Rejected("one buffer is two of its arguments, and written")
            if site.graph is None:
                raise NotEstablished("it stands between a scan and what is around it")
            trials, done, evidence = effort, 0, ""
            while done < trials:
                looked_at, work = _compared(program, site, site.graph, done)
                if not done and work < CHEAP and _is_discrete(site.kernel):
                    trials *= MORE
                evidence, done = evidence or looked_at, done + 1
        return Claim(
            told,
            site.kernel.name,
            f"{evidence}; {done} times",
            "iterations that did not run are like those that did",
        )
    except NotEstablished as reason:
        return Claim(told, site.kernel.name, reason=str(reason))
    except MemoryError:
        return Claim(told, site.kernel.name, reason="there is not enough memory")


def _is_discrete(kernel: Kernel) -> bool:
    """Whether flags or integers choose: one draw of them does not see every choice."""
    return not all(is_float(b.dtype) for b in kernel.inputs)


def _compared(program: Program, site: Site, graph: Graph, trial: int) -> tuple[str, int]:
    """Without the laws of logarithms, and with them where there are some and it needs them."""
    ops = {graph.nodes[i].op for i in nodes_between(graph, site)}
    ordered = bool(ops & BY_ORDER)
    has_logs = not ops.isdisjoint(["log", "call", "scan", *DEFINITIONS])
    for with_laws in (False, True) if "log" in ops else (has_logs,):
        try:
            field = Field(trial, ordered, with_laws)
            return _Comparison(program, site, graph, field, trial).compare()
        except Rejected:
            if with_laws == has_logs:
                raise
    raise AssertionError


class _Comparison:
    """A kernel on one side, the graph on the other."""

    def __init__(self, program: Program, site: Site, graph: Graph, field: Field, trial: int):
        self.program, self.site, self.graph = program, site, graph
        self.field, self.trial = field, trial
        self.most = _index_sizes(graph)
        self.parts: dict[Value, Source] = {}
        read = [site.before[name] for _, name, made in site.pairs if not made]
        self.cuts = {base_of(graph, _value(b)) for b in read if not isinstance(b.content, Partial)}
        for b in read:
            if isinstance(b.content, Partial):
                self.parts[_value(b)] = self._from_parts(b, b.content)
        self.on = Elements(graph, field, self._given)

    def compare(self) -> tuple[str, int]:
        """What was looked at, and how much was computed."""
        self._check_counts()
        memory = self._memory()
        for other in self.site.earlier:
            self._run_before(other, memory)
        machine = Machine(self.site.kernel, memory, self.field, self.trial)
        machine.run()
        compared = 0
        for own, name, is_output in self.site.pairs:
            if not is_output:
                continue
            written, binding = memory[own].written_at(), self.site.after[name]
            if not len(written):
                raise Rejected(f"{name} is not written")
            at = self._addresses(binding, written, self.program.buffers[name].size)
            self._check_same(binding, memory[own], at)
            compared += len(at)
        ran = ", ".join(f"{var} {some}" for var, some in machine.picked.items())
        return f"{compared} elements; iterations {ran or 'all'}", machine.count

    def _check_counts(self) -> None:
        """What a kernel fills alone it stores to at least once for each element."""
        if self.site.earlier:
            return
        stored = stored_elements(self.site.kernel)
        for own, name, is_output in self.site.pairs:
            b = self.site.after[name]
            if not is_output or b is not self.site.before[name] or isinstance(b.content, Work):
                continue
            wanted = element_count(b.content, self.graph.type_of(_value(b)))
            if stored[own] < wanted:
                raise Rejected(f"{stored[own]} of {wanted} elements of {name} are stored")

    # What goes in

    def _memory(self) -> dict[str, Memory]:
        found: dict[str, Memory] = {}
        for own, name, is_output in self.site.pairs:
            buffer, before = self.program.buffers[name], self.site.before[name]
            source, is_held = self._undefined(name, buffer.dtype), not is_output
            if is_held or before is not self.site.after[name]:
                source, is_held = self._source(before, buffer.dtype, source), True
            found[own] = Memory(buffer.dtype, source, not is_held, not is_output)
        return found

    def _undefined(self, name: str, dtype: str) -> Source:
        return lambda at: self.field.keyed(f"undefined {name}", dtype, at)

    def _run_before(self, other: Call, memory: dict[str, Memory]) -> None:
        """A kernel that fills what this one adds to: all of it."""
        kernel = self.program.kernels[other.kernel]
        names = [name for name, _ in other.arguments]
        own = {name: memory[kernels] for kernels, name, _ in self.site.pairs}
        if kernel.inputs or any(name not in own for name in names):
            raise NotEstablished(f"{kernel.name} writes the same buffer before it")
        fill = _filled_with(kernel)
        if fill is not None:
            zero = self.field.number(*fill)
            own[names[0]].fill(lambda at: zero.map(lambda a: np.broadcast_to(a, at.shape)))
            return
        if sum(b.size for b in kernel.outputs) > WHOLE:
            raise NotEstablished(f"{kernel.name} fills a buffer that is too large")
        found = {b.name: own[name] for b, name in zip(kernel.buffers, names, strict=True)}
        machine = Machine(kernel, found, self.field)
        machine.all_iterations = True
        machine.run()
        for filled in found.values():
            filled.written[:], filled.is_undefined = False, False

    def _source(self, binding: Binding, dtype: str, otherwise: Source) -> Source:
        content, name = binding.content, binding.buffer
        if isinstance(content, Work):
            raise NotEstablished(f"{name} holds numbers on the way: {content.purpose}")
        if isinstance(content, Partial):
            return lambda at: self.field.keyed(f"parts {name}", dtype, at)
        value, type_ = self._elements_of(_value(binding)), self.graph.type_of(_value(binding))
        if content == Whole():
            return lambda at: value(np.minimum(at, max(0, type_.size - 1)))
        zero = self.field.number(0, dtype)

        def source(at: Array) -> Element:
            found = places(content, type_, at)
            held = chosen(found.is_zero, zero, value(found.flat))
            return chosen(found.is_there, held, otherwise(at))

        return source

    def _elements_of(self, value: Value) -> Source:
        """By flat index: of what a value is a view of, moved. An index is moved as a number."""
        base = base_of(self.graph, value)
        source = self._given(base) or (lambda at: self.on.at(base, at))
        if base == value:
            return source
        moved = Elements(
            self.graph, self.field, lambda v: (lambda at: Element(at, at)) if v == base else None
        )
        return lambda at: source(moved.at(value, at).p)

    def _given(self, value: Value) -> Source | None:
        """What is generic: a cut's elements, and leaves'."""
        if value in self.parts:
            return self.parts[value]
        node, dtype = self.graph.nodes[value.node], self.graph.type_of(value).dtype
        if node.op in LEAVES or (value in self.cuts and node.op != "constant"):
            name, most = f"%{value.node}.{value.output}", self.most.get(value, INTEGERS)
            return lambda at: self.field.keyed(name, dtype, at, most)
        return None

    def _from_parts(self, binding: Binding, partial: Partial) -> Source:
        """A sum's elements, of parts that are given."""
        node = self.graph.nodes[binding.node]
        parts, dtype = Parts(node, partial), node.types[0].dtype

        def source(at: Array) -> Element:
            addresses = parts.addresses[at].T
            found = self.field.keyed(f"parts {binding.buffer}", dtype, addresses)
            return reduced(self.field, partial.op, found, 1, dtype)

        return source

    # What comes out

    def _addresses(self, binding: Binding, written: Array, size: int) -> Array:
        """Some that were written, some at the ends of every axis, and the last there should be."""
        content, type_ = binding.content, self.graph.type_of(_value(binding))
        if isinstance(content, Work):
            raise NotEstablished(f"{binding.buffer} holds numbers on the way: {content.purpose}")
        rng = np.random.default_rng([self.trial, len(written)])
        found = [written[0], written[-1], *written[rng.integers(0, len(written), COMPARED)]]
        found += [min(at, size - 1) for at in last_addresses(content, type_)]
        if not isinstance(content, Partial):
            few = rng.choice(written, min(len(written), 4096), replace=False)
            for index in unravel(places(content, type_, few).flat, type_.shape):
                found += [rng.choice(few[index == end]) for end in (index.min(), index.max())]
        return np.unique(np.array(found))

    def _check_same(self, binding: Binding, memory: Memory, at: Array) -> None:
        value = _value(binding)
        if isinstance(binding.content, Partial):
            terms = math.prod(extent for _, extent in binding.content.summed)
            if terms > TERMS:
                raise NotEstablished(f"each part is a sum of {terms} terms")
            at = at[
                np.linspace(0, len(at) - 1, min(len(at), max(3, 4 * TERMS // terms))).astype(int)
            ]
            for few in np.array_split(at, -(-len(at) * terms // TERMS)):
                wanted = self._parts(self.graph.nodes[value.node], binding.content, few)
                self._check_equal(binding, memory, few, wanted)
            return
        found = places(binding.content, self.graph.type_of(value), at)  # type: ignore[arg-type]
        there = found.is_there
        wanted = self.on.at(value, found.flat[there])
        wanted = chosen(found.is_zero[there], self.field.number(0, memory.dtype), wanted)
        self._check_equal(binding, memory, at[there], wanted)

    def _check_equal(self, binding: Binding, memory: Memory, at: Array, wanted: Element) -> None:
        memory.is_undefined = False  # what should have been written and was not equals nothing
        made = memory.load(at)
        if not same(made, wanted):
            wrong = (i for i in range(len(at)) if not same(_one(made, i), _one(wanted, i)))
            told = f"{binding.buffer} at {at[next(wrong, 0)]}"
            raise Rejected(f"{told} is not what %{binding.node} of the graph is there")

    def _parts(self, node: Node, partial: Partial, at: Array) -> Element:
        """Partial sums at addresses, each from its terms."""
        variables, _ = variables_at(partial.elements, at)
        extents = tuple(extent for _, extent in partial.summed)
        count = math.prod(extents)
        shape, terms = (count, len(at)), unravel(np.arange(count), extents)
        every = {name: v[None, :] for name, v in variables.items()}
        every |= {name: i[:, None] for (name, _), i in zip(partial.summed, terms, strict=True)}
        held = held_by(partial.elements.guards, every, shape)
        element = [numbers(i, every, shape) for i in partial.elements.element]
        found, dtype = self._terms(node, element), node.types[0].dtype
        if not held.all():
            if partial.op in ("max", "min"):
                raise NotEstablished("parts of a maximum that end before others")
            found = chosen(held, found, self.field.number(int(partial.op == "mul"), dtype))
            found = found.map(lambda a: np.broadcast_to(a, shape))
        return reduced(self.field, partial.op, found, 1, dtype)

    def _terms(self, node: Node, element: list[Array]) -> Element:
        """What a sum adds: elements of a reduction's operand, or products of a contraction's."""
        if node.op != "contract":
            return self._at(node.operands[0], element)
        result, depth, x, y = result_labels(node)
        axes, dtype = dict(zip([*result, *depth], element, strict=True)), node.types[0].dtype
        pairs = zip(node.operands, (x, y), strict=True)
        factors = [self._at(v, [axes[c] for c in labels]) for v, labels in pairs]
        return self.field.apply("mul", factors, [dtype, dtype], dtype)

    def _at(self, value: Value, index: list[Array]) -> Element:
        shape = self.graph.type_of(value).shape
        flat = np.zeros(index[0].shape if index else (1, 1), np.int64)
        for i, n in zip(index, shape, strict=True):
            flat = flat * n + np.clip(i, 0, max(0, n - 1))
        return self.on.at(value, flat.reshape(-1)).map(lambda a: a.reshape(flat.shape))


def _one(x: Element, i: int) -> Element:
    return x.map(lambda a: np.broadcast_to(a, x.p.shape)[i : i + 1])


def base_of(graph: Graph, value: Value) -> Value:
    """What a value is a view of; itself if it is none."""
    while True:
        node = graph.nodes[value.node]
        if node.op not in MOVES:
            return value
        types = graph.type_of(value), graph.type_of(node.operands[0])
        if node.op == "cast" and not all(is_float(t.dtype) for t in types):
            return value
        value = node.operands[0]


def _index_sizes(graph: Graph) -> dict[Value, int]:
    """How long the axes are that integers index, or are positions along."""
    found: dict[Value, int] = {}
    for position, node in reversed(list(enumerate(graph.nodes))):
        value, size = Value(position), 0
        if node.op in ("argmax", "argmin"):
            found[value] = graph.type_of(node.operands[0]).shape[node.attributes["axis"]]
        elif node.op == "gather":
            size = graph.type_of(node.operands[0]).shape[node.attributes["axis"]]
        elif node.op == "scatter_add":
            size = node.attributes["size"]
        elif value in found and (node.op in ELEMENTWISE or node.op in MOVES):
            found |= {v: found[value] for v in node.operands if v not in found}
        if size:
            found[node.operands[1]] = size
    return found


def _filled_with(kernel: Kernel) -> tuple[int | float, str] | None:
    """The number and dtype that a kernel fills its only buffer with; None for any other."""
    every = list(walk(kernel.body))
    loops, rest = ([s for s in every if isinstance(s, For) is kind] for kind in (True, False))
    match rest, kernel.buffers:
        case [Store(_, index, value, None, False)], [buffer] if value.kind == "literal":
            extents = {s.var: s.extent for s in loops if isinstance(s, For) and s.stop is None}
            terms = sorted((f, extents.get(str(a), 0)) for f, a in index.terms)
            reached = 1  # addresses next to each other, from 0
            for factor, extent in terms:
                reached = reached * extent if factor == reached else 0
            is_all = reached == buffer.size and index.offset == 0 and len(extents) == len(loops)
            return (value.number, value.dtype) if is_all else None  # type: ignore[return-value]
        case _:
            return None


def stored_elements(kernel: Kernel) -> Counter[str]:
    """How often each buffer is stored to, at most."""
    found: Counter[str] = Counter()

    def count(body: tuple[object, ...], times: int) -> None:
        for s in body:
            if isinstance(s, For):
                end = s.extent
                if s.stop is not None and not s.stop.terms:
                    end = max(0, min(end, s.stop.offset))
                count(s.body, times * end)
            elif isinstance(s, Store):
                found[s.buffer] += times
            elif isinstance(s, Matmul):
                found[s.target.buffer] += times * s.target.rows.count * s.target.columns.count
            elif isinstance(s, Library):
                for view in s.results:
                    found[view.buffer] += math.prod(view.shape)

    count(kernel.body, 1)
    return found
