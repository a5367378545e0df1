"""Checks a program: its memory, then each distinct kernel, for all iterations where that can be
shown, and against the graph over the field where it cannot.

A call claims that, between what its inputs hold and what its outputs hold, its kernel computes what
the graph does. Inputs are generic elements, the same on both sides; the kernel runs some iterations
at full size, and the graph is asked for some of the elements that were written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from treadle_checker import layouts, randomness
from treadle_checker.bounds import check_bounds, reads_what_it_writes, stored_elements
from treadle_checker.budget import FILE, Budget
from treadle_checker.draws import index_sizes
from treadle_checker.elements import Elements, Source, Use, unravel
from treadle_checker.field import Array, Element, Field, chosen, is_float, same
from treadle_checker.machine import Machine, Memory, undefined
from treadle_checker.memory import check_memory
from treadle_checker.program import Kernel, Layout, Program, Whole, Work
from treadle_checker.races import check_races
from treadle_checker.reading import UNEXPECTED, NotEstablished, Rejected
from treadle_checker.sites import Site, Walk, nodes_between
from treadle_checker.states import Held
from treadle_checker.types import LEAVES, Graph, Node, Value, is_view

COMPARED = 14  # elements of each buffer, beside those at its ends
CHEAP, MORE = 2**17, 4  # elements up to which a kernel is compared several times
TERMS = 2**20  # of partial sums that are looked at together
INTEGERS = 50  # integers are below it where no axis says more
MOST_BETWEEN = 1000  # values between one and what it may be made of


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


def check_program(
    program: Program, graphs: Mapping[str, Graph], effort: int = 1, budget: Budget | None = None
) -> list[Claim]:
    """All claims about a program; Rejected if one is wrong.

    `graphs` are those whose values buffers hold, by scope. `effort` is how often each kernel is
    compared with its graph, each time with other numbers; 0: only what holds for all iterations.
    """
    check_memory(program)
    budget = budget or Budget()
    claims = [
        Claim("what is read was written before, by no call of the same phase", "program"),
        Claim("buffers that live at one time do not overlap", "program"),
    ]
    for kernel in program.kernels:
        with _named(kernel):
            check_bounds(kernel)
            check_races(kernel)
            claims.append(Claim("accesses are in bounds, iterations do not meet", kernel.name))
    for site in Walk(program, graphs).sites():
        if effort:
            claims.append(check_call(program, site, effort, budget))
    return claims


@contextmanager
def _named(kernel: Kernel, lines: tuple[str, ...] = ()) -> Iterator[None]:
    """Says of which kernel and which line something is wrong. Nothing unexpected is accepted."""
    where = f"kernel {kernel.name}" + (f" [{lines[0]}]" if lines else "")
    try:
        yield
    except RecursionError as deep:
        raise NotEstablished("its part of the graph is too deep") from deep
    except Rejected as wrong:
        raise Rejected(f"{where}: {wrong}") from wrong
    except UNEXPECTED as wrong:
        raise Rejected(f"{where} cannot be run: {type(wrong).__name__} {wrong}") from wrong


def check_call(program: Program, site: Site, effort: int, budget: Budget | None = None) -> Claim:
    budget = budget or Budget()
    told = "computes its part of the graph"
    try:
        with _named(site.kernel, site.call.lines), np.errstate(all="ignore"):
            trials, done, evidence = effort, 0, ""
            while done < trials:
                looked_at, work = _compared(program, site, done, budget.part(FILE // 4))
                # One draw of flags or integers does not see every choice.
                is_discrete = not all(is_float(b.dtype) for b in site.kernel.inputs)
                if not done and work < CHEAP and is_discrete:
                    trials *= MORE
                evidence, done = evidence or looked_at, done + 1
            if site.missing:
                raise NotEstablished(site.missing)
            if site.meets:
                raise NotEstablished(f"calls that fill {site.meets} may store the same element")
        condition = "iterations that did not run are like those that did"
        return Claim(told, site.kernel.name, f"{evidence}; {done} times", condition)
    except (NotEstablished, MemoryError) as reason:
        return Claim(told, site.kernel.name, reason=str(reason) or "there is not enough memory")


def _compared(program: Program, site: Site, trial: int, budget: Budget) -> tuple[str, int]:
    """Without the laws of logarithms; with them if it needs them; with what is given as the graph
    makes it of what else is, where a kernel reads it and computes it too."""
    ordered = any(site.graph.nodes[i].op == "order" for i in nodes_between(site))
    for has_logs in (False, True):
        with suppress(Rejected):
            field = Field(trial, ordered, has_logs, budget)
            return _Comparison(program, site, field, trial).compare()
    field = Field(trial, ordered, True, budget)
    return _Comparison(program, site, field, trial, is_made=True).compare()


class _Comparison:
    """A kernel on one side, the graph on the other."""

    def __init__(
        self, program: Program, site: Site, field: Field, trial: int, is_made: bool = False
    ):
        self.program, self.site, self.graph = program, site, site.graph
        self.field, self.trial = field, trial
        self.outputs = {b.name for b in site.kernel.outputs}
        self.most = index_sizes(self.graph)
        self.parts: dict[Value, Source] = {}
        self.sums: dict[str, Held] = {}  # of some terms, which the kernel goes on with
        self.cuts: dict[Value, Value] = {}  # values that are given, each by one that it equals
        for own, held in site.before.items():
            is_replaced = own in self.outputs and held is not site.after[own]
            is_read = is_replaced and reads_what_it_writes(site.kernel, own)
            is_part = isinstance(held.content, Layout) and bool(held.content.op)
            if is_part and own not in self.outputs:
                self.parts[held.value] = self._from_parts(held)
            elif is_part and is_read:
                self.sums[own] = held
            elif is_read or own not in self.outputs:
                self._cut(held)
        for cut in filter(self._is_made, sorted(self.cuts, reverse=True) if is_made else ()):
            del self.cuts[cut]
        self.on = Elements(self.graph, field, self._given)

    def _cut(self, held: Held) -> None:
        """What is given is generic, in one way where values are the same."""
        first: dict[int, Value] = {}
        for value, number in held.given.items():
            base = base_of(self.graph, value)
            first.setdefault(number, base)
            for cut in cuts_of(self.graph, base):
                self.cuts.setdefault(cut, first[number] if cut == base else cut)

    def _is_made(self, cut: Value) -> bool:
        """Whether a value is made of other cuts alone; looked at as far as it costs little."""
        others, seen, pending = {*self.cuts, *self.parts} - {cut}, {cut}, [cut]
        while pending:
            node = self.graph.nodes[pending.pop().node]
            if node.op in LEAVES or len(seen) > MOST_BETWEEN:
                return False
            new = {*node.operands} - others - seen
            pending, seen = [*pending, *new], seen | new
        return list(self.cuts.values()).count(cut) == 1  # others may be the same

    def compare(self) -> tuple[str, int]:
        """What was looked at, and how much was computed."""
        self._check_counts()
        memory = self._memory()
        machine = Machine(self.site.kernel, memory, self.field, self.trial)
        machine.run()
        compared = 0
        for own in sorted(self.outputs):
            written, held = memory[own].written_at(), self.site.after[own]
            if not len(written):
                raise Rejected(f"{held.buffer} is not written")
            at = self._addresses(own, held, written)
            self._check_same(own, held, memory[own], at)
            compared += len(at)
        self.on.forget()
        ran = ", ".join(f"{var} {some}" for var, some in machine.picked.items())
        return f"{compared} elements; iterations {ran or 'all'}", machine.count

    def _check_counts(self) -> None:
        """Of what is filled here, by this call and others, each element is stored at least once."""
        stored = stored_elements(self.site.kernel) + Counter(self.site.by_others)
        for own in self.outputs:
            held, before = self.site.after[own], self.site.before.get(own)
            if isinstance(held.content, Work):
                continue
            if before is not None and before is not held:
                # What is made of what was there, or added to a number, may leave some of it.
                is_number = self.graph.nodes[before.value.node].op == "constant"
                adds = is_number and reads_what_it_writes(self.site.kernel, own)
                if adds or held.value.node in self.graph.made_of([before.value.node]):
                    continue
            wanted = math.prod(extent for _, extent in self._layout(held).variables)
            if stored[own] < wanted:
                raise Rejected(f"{stored[own]} of {wanted} elements of {held.buffer} are stored")

    # What goes in

    def _memory(self) -> dict[str, Memory]:
        """The kernel's buffers, each from where it begins in the program's."""
        found: dict[str, Memory] = {}
        for buffer in self.site.kernel.buffers:
            own, dtype, is_output = buffer.name, buffer.dtype, buffer.name in self.outputs
            name, offset = self.site.names[own]
            source, before = undefined(self.field, name, dtype), self.site.before.get(own)
            is_held = before is not None and before is not self.site.after.get(own)
            if before is not None and is_held:
                source = self._source(before, dtype, source)
            shifted = (lambda at, of=source, by=offset: of(at + by)) if offset else source
            found[own] = Memory(dtype, shifted, not is_held, not is_output)
        return found

    def _layout(self, binding: Held) -> Layout:
        if isinstance(binding.content, Work):
            told = f"{binding.buffer} holds numbers on the way: {binding.content.purpose}"
            raise NotEstablished(told)
        return layouts.layout_of(binding.content, self.graph.type_of(binding.value))

    def _source(self, binding: Held, dtype: str, otherwise: Source) -> Source:
        layout, name = self._layout(binding), binding.buffer
        if layout.op:
            return lambda at: self.field.keyed(f"parts {name}", dtype, at)
        value, type_ = partial(self.on.at, binding.value), self.graph.type_of(binding.value)
        if binding.content == Whole():
            return lambda at: value(np.minimum(at, max(0, type_.size - 1)))
        zero = self.field.number(0, dtype)

        def source(at: Array) -> Element:
            found = layouts.places(layout, type_, at)
            held = chosen(found.is_zero, zero, value(found.flat))
            return chosen(found.is_there, held, otherwise(at))

        return source

    def _given(self, value: Value) -> Source | None:
        """What is generic: a cut's elements, and leaves'."""
        if value in self.parts:
            return self.parts[value]
        node, dtype = self.graph.nodes[value.node], self.graph.type_of(value).dtype
        if node.op in LEAVES or (value in self.cuts and node.op != "constant"):
            value = self.cuts.get(value, value)
            name, most = f"%{value.node}.{value.output}", self.most.get(value, INTEGERS)
            return lambda at: self.field.keyed(name, dtype, at, most)
        return None

    def _from_parts(self, binding: Held) -> Source:
        """A sum's elements, of parts that are given."""
        node, partial = self.graph.nodes[binding.value.node], self._layout(binding)
        parts, dtype = layouts.part_addresses(node, partial), node.types[0].dtype

        def source(at: Array) -> Element:
            found = self.field.keyed(f"parts {binding.buffer}", dtype, parts[at].T)
            return self.field.reduced(partial.op, found, dtype)

        return source

    # What comes out

    def _addresses(self, own: str, held: Held, written: Array) -> Array:
        """Some that were written, some at the ends of every axis, and the last there should be."""
        layout, type_ = self._layout(held), self.graph.type_of(held.value)
        name, offset = self.site.names[own]
        rng = randomness.generator(5, self.trial, len(written))
        found = [written[0], written[-1], *written[rng.integers(0, len(written), COMPARED)]]
        if not (self.site.by_others or {}).get(own):
            last = (at - offset for at in layouts.last_addresses(layout))
            found += [min(at, self.program.buffers[name].size - 1) for at in last]
        if not layout.op:
            few = rng.choice(written, min(len(written), 4096), replace=False)
            for index in unravel(layouts.places(layout, type_, few + offset).flat, type_.shape):
                found += [rng.choice(few[index == end]) for end in (index.min(), index.max())]
        return np.unique(np.array(found))

    def _check_same(self, own: str, held: Held, memory: Memory, at: Array) -> None:
        layout, offset = self._layout(held), self.site.names[own][1]
        if layout.op:
            self._check_parts(own, held, layout, memory, at)
            return
        found = layouts.places(layout, self.graph.type_of(held.value), at + offset)
        there = found.is_there
        wanted = self.on.at(held.value, found.flat[there])
        wanted = chosen(found.is_zero[there], self.field.number(0, memory.dtype), wanted)
        self._check_equal(own, held, memory, at[there], wanted)

    def _check_parts(self, own: str, held: Held, layout: Layout, memory: Memory, at: Array) -> None:
        terms = math.prod(extent for _, extent in layout.summed)
        if terms > TERMS:
            raise NotEstablished(f"each part is of {terms} terms")
        at = at[np.linspace(0, len(at) - 1, min(len(at), max(3, 4 * TERMS // terms))).astype(int)]
        node, offset = self.graph.nodes[held.value.node], self.site.names[own][1]
        for few in np.array_split(at, -(-len(at) * terms // TERMS)):
            wanted = self._parts(node, layout, few + offset)
            self._check_equal(own, held, memory, few, wanted)

    def _check_equal(
        self, own: str, held: Held, memory: Memory, at: Array, wanted: Element
    ) -> None:
        if own in self.sums:  # what is there was generic, instead of the sum of its terms
            before, dtype, at_ = self.sums[own], memory.dtype, at + self.site.names[own][1]
            known = self._parts(self.graph.nodes[before.value.node], self._layout(before), at_)
            generic = self._source(before, dtype, undefined(self.field, own, dtype))(at_)
            rest = self.field.apply("sub", [wanted, known], [dtype, dtype], dtype)
            wanted = self.field.apply("add", [rest, generic], [dtype, dtype], dtype)
        memory.is_undefined = False  # what should have been written and was not equals nothing
        made = memory.load(at)
        if not same(made, wanted):
            told = f"{held.buffer} at {at[int(np.argmin(made.p == wanted.p))]}"
            raise Rejected(f"{told} is not what %{held.stated.node} of the graph is there")

    def _parts(self, node: Node, partial: Layout, at: Array) -> Element:
        """Partial sums at addresses, each from its terms."""
        variables, _ = layouts.variables_at(partial, at)
        extents = tuple(extent for _, extent in partial.summed)
        count = math.prod(extents)
        shape, terms = (count, len(at)), unravel(np.arange(count), extents)
        every = {name: v[None, :] for name, v in variables.items()}
        every |= {name: i[:, None] for (name, _), i in zip(partial.summed, terms, strict=True)}
        held = layouts.held_by(partial.guards, every, shape)
        element = {str(k): layouts.numbers(i, every, shape) for k, i in enumerate(partial.element)}
        found, dtype = Use(self.on, node, np.zeros(0, np.int64)).term(element), node.types[0].dtype
        if not held.all():
            found = chosen(held, found, self.field.nothing(partial.op, dtype))
        return self.field.reduced(partial.op, found.spread(shape), dtype)


def cuts_of(graph: Graph, value: Value) -> list[Value]:
    """What is generic where a value is given: what it is a view of. Of an integer that is held
    between bounds, the integer before that: it is held between them on both sides."""
    base = base_of(graph, value)
    node = graph.nodes[base.node]
    if node.op in ("max", "min") and not is_float(node.types[0].dtype):
        return [cut for v in node.operands for cut in cuts_of(graph, v)]
    return [base]


def base_of(graph: Graph, value: Value) -> Value:
    """What a value is a view of; itself if it is none."""
    while True:
        node = graph.nodes[value.node]
        if node.op == "cast":
            types = graph.type_of(value), graph.type_of(node.operands[0])
            is_same = all(is_float(t.dtype) for t in types)
        else:
            is_same = node.op == "stop_gradient" or is_view(node)
        if not is_same:
            return value
        value = node.operands[0]
