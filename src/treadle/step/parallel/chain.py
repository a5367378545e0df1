"""A data-parallel step as a chain: what `run.py` does from Python, for a device to do by itself.

The links are the same for every way of exchanging bytes, and so are the bits. One process has
nothing to exchange: what it gives is where all shards' rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from treadle.base import dtypes
from treadle.distributed.shards import Merge, merges
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.optim.append import Mode
from treadle.runtime.chain import (
    RESULTS,
    Chain,
    Copy,
    Exchange,
    Gather,
    Link,
    Place,
    Run,
    Swap,
    input_name,
)
from treadle.runtime.executable import Executable, ThreadedProgram
from treadle.step.parallel.graphs import NORM, TOTAL, WEIGHT, row_name, with_narrow_leaves
from treadle.step.parallel.numbers import (
    NUMBERS,
    SQUARES,
    every_name,
    norms_graph,
    numbers_graph,
    numbers_type,
    packed_graph,
    row_type,
    states_graph,
    sums_graph,
)
from treadle.step.parallel.programs import ParallelPrograms
from treadle.step.parallel.stages import KEPT, SUMMED, Stage

UPDATE_KEY = "key of the update"  # the input with the whole batch's random state
LOADED = 16  # bytes that a kernel loads at once: where they begin
SMALLEST = 16  # bytes between results


class ChainBuilder:
    """The links of one mode, in order, with the buffers that they need."""

    def __init__(
        self, programs: ParallelPrograms, mode: Mode, grad_norms: bool, exchanges: bool
    ) -> None:
        """`exchanges` is whether rows are gathered, for a rank by itself too."""
        self.programs, self.mode, self.grad_norms = programs, mode, grad_norms
        self.share, self.names, self.plan = programs.share, programs.names, programs.plan
        self.exchanges = exchanges
        self.links: list[Link] = []
        self.buffers: dict[str, int] = {RESULTS: 0}
        self.inputs: dict[str, TensorType] = {}
        self.results: dict[str, tuple[int, TensorType]] = {}
        self.columns = programs.columns()
        self.overlaps, self.in_parts = programs.parallel.config.overlap, False
        sharded = programs.arrays if programs.shards_parameters else []
        # Parameters of which every rank holds its rows, as programs of shards read them.
        self.fetched = {n: Place(f"whole:{n}") for n in sharded}
        self._has_open = False  # whether an exchange is on its way that nothing has waited for

    def build(self) -> Chain:
        stages = self.programs.stages
        for number in range(len(stages) - 1):
            self._stage(number)
        self._shards(stages[-1])
        self._exchange_gradients()
        self._numbers()
        if self.share.ranks > 1 or self.mode is not Mode.UPDATE:
            self._run(self.programs.fold(self.mode))
        if self.mode is not Mode.ACCUMULATE:
            self._update()
        if self.programs.states:
            self._states()
        return Chain(
            tuple(self.links),
            self.inputs,
            self.share.each,
            self.buffers,
            self.results,
            self.overlaps,
            {p.buffer: self._fetch(name, p) for name, p in self.fetched.items()},
        )

    def _fetch(self, name: str, whole: Place) -> Gather:
        return Gather(Place(self.names.rows(name)), whole, self._rows_type(name).nbytes)

    # Buffers

    def _buffer(self, name: str, nbytes: int) -> Place:
        self.buffers[name] = nbytes
        return Place(name)

    def _rows(self, what: str, type_: TensorType) -> None:
        """Room for a row of every shard; for the own ones elsewhere, where rows are exchanged."""
        each = row_type(type_).nbytes
        self._buffer(every_name(what), self.share.shards * each)
        if self.exchanges:
            self._buffer(f"own:{what}", self.share.each * each)

    def _row(self, what: str, type_: TensorType, i: int) -> Place:
        """Where the row of an own shard is written."""
        name = f"own:{what}" if self.exchanges else every_name(what)
        return Place(name, i * row_type(type_).nbytes)

    def _gathers(self, rows: Mapping[str, TensorType]) -> list[Gather]:
        if not self.exchanges:
            return []
        return [
            Gather(Place(f"own:{n}"), Place(every_name(n)), self.share.each * row_type(t).nbytes)
            for n, t in rows.items()
        ]

    def _result(self, name: str, type_: TensorType) -> Place:
        """A number that comes back to the host."""
        at = self.buffers[RESULTS]
        self.results[name] = at, type_
        self.buffers[RESULTS] = at + -(-type_.nbytes // SMALLEST) * SMALLEST
        return Place(RESULTS, at)

    def _at(self, name: str) -> Place:
        return Place(RESULTS, self.results[name][0])

    # Links

    def _run(
        self,
        program: Executable,
        leaves: Mapping[str, Place] | None = None,
        results: Mapping[str, Place] | None = None,
        sums: tuple[tuple[str, str, int], ...] = (),
    ) -> None:
        """A program; names of the session that stand for others are given their places."""
        given = dict(leaves or {})
        for name in program.graph.leaves.keys() & self._other_places().keys():
            given.setdefault(name, self._other_places()[name])
        self.links.append(Run(program, given, results or {}, sums))

    def _other_places(self) -> dict[str, Place]:
        """What one process by itself does not copy: sums of all shards are those of its own."""
        if self.share.ranks > 1:
            return {}
        found: dict[str, Place] = {}
        for name in self.programs.gradients:
            total = self._total(name)
            found[self.names.total(name)] = found[self.names.gathered(name)] = total
        return found

    def _total(self, name: str) -> Place:
        alone = self.share.ranks == 1 and self.mode is Mode.UPDATE
        return Place(self.programs.sum_name(name) if alone else self.names.total(name))

    @property
    def _of_shard(self) -> bool:
        """Whether sums of all shards are what the one shard there is has stored."""
        return self.share.shards == 1 and self.mode is Mode.UPDATE

    def _exchange(self, name: str, parts: Iterable[Gather | Swap], is_open: bool = False) -> None:
        found = tuple(p for p in parts if p.nbytes)
        if found or (self._has_open and not is_open):
            self.links.append(Exchange(name, found, is_open))
            self._has_open = is_open

    def _compiled(self, key: object, graph: Graph, name: str) -> Executable:
        return self.programs.program(("chain", key), lambda: graph, name)

    def _leaves_of_shard(self, graph: Graph, i: int) -> dict[str, Place]:
        """Where a stage of an own shard finds what it is given."""
        found = {}
        given = set(self.programs.given.names) | {RANDOM_STATE}
        for name, at in graph.leaves.items():
            if name in given:
                self.inputs[name] = graph.nodes[at].types[0]
                found[name] = Place(input_name(i, name))
            elif name.startswith(KEPT):
                found[name] = Place(f"{name} of {i}")
            elif name.startswith(SUMMED):
                found[name] = Place(name)
            elif name in self.fetched:
                found[name] = self.fetched[name]
        return found

    def _stage(self, number: int) -> None:
        """A stage of all own shards, then the sums over every shard that it ends with."""
        stage, program = self.programs.stages[number], self.programs.shard(number)
        types = _output_types(stage.graph)
        summed = {n: types[f"result:{n}"] for n in stage.summed}
        for name, type_ in summed.items():
            self._rows(name, type_)
            self._buffer(name, type_.nbytes)
        for i in range(self.share.each):
            results = {f"result:{n}": self._row(n, t, i) for n, t in summed.items()}
            for name in stage.kept:
                nbytes = types[f"result:{name}"].nbytes
                results[f"result:{name}"] = self._buffer(f"{name} of {i}", nbytes)
            self._run(program, self._leaves_of_shard(stage.graph, i), results)
        self._exchange("statistics", self._gathers(summed))
        sums = self._compiled(("sums", number), sums_graph(summed, self.share.shards), "sums")
        every = {every_name(n): Place(every_name(n)) for n in summed}
        self._run(sums, every, {f"result:{n}": Place(n) for n in summed})

    def _shards(self, stage: Stage) -> None:
        """Gradients of this rank's shards are summed; their numbers and states are rows."""
        row = numbers_type(self.columns)
        self._rows(NUMBERS, row)
        for name, type_ in self.programs.states.items():
            self._rows(f"state:{name}", type_)
        placed = [self.names.gradient(n) for n in self.programs.gradients]
        placed = placed if self.programs.places_gradients else []
        program = self.programs.program(
            ("chain", "shard"), lambda: packed_graph(stage.graph, self.columns, placed), "shard"
        )
        # Threads share the update's one long phase: its parts are sent one after the other.
        has_threads = isinstance(program, ThreadedProgram) and program.threads > 1
        self.in_parts = has_threads and self.overlaps
        for i, merge in enumerate(merges(self.share.each)):
            leaves = self._leaves_of_shard(stage.graph, i)
            for name, type_ in self.programs.states.items():
                leaves[self.names.state(name)] = self._row(f"state:{name}", type_, i)
            results = {f"result:{n}": Place(n) for n in placed}
            results[f"result:{NUMBERS}"] = self._row(NUMBERS, row, i)
            self._run(program, leaves, results)
            if merge.levels or merge.waits_at is not None:
                sums = self._sums(merge) if merge.waits_at is None else ()
                self._run(self.programs.merge(merge), sums=sums)

    def _sums(self, merge: Merge) -> tuple[tuple[str, str, int], ...]:
        """What the last merge does, where gradients are float32."""
        types = self.programs.gradients
        if self.programs.narrow or any(t.dtype is not dtypes.float32 for t in types.values()):
            return ()
        return tuple(
            (self.names.gradient(name), self.names.level(level, name), type_.size)
            for name, type_ in types.items()
            for level in merge.levels
        )

    def _exchange_gradients(self) -> None:
        """Rows of this rank's sums go to those who own them; numbers of shards to everyone."""
        rows = {NUMBERS: numbers_type(self.columns)}
        rows |= {f"state:{n}": t for n, t in self.programs.states.items()}
        parts: list[Gather | Swap] = [*self._gathers(rows)]
        if self.share.ranks > 1:
            for name in self.programs.gradients:
                given, taken = self.programs.sum_name(name), self.names.received(name)
                nbytes = self.programs.sent_type(name).nbytes
                parts.append(Swap(Place(given), Place(taken), nbytes))
        self._exchange("gradients", parts)

    def _numbers(self) -> None:
        programs = self.programs
        graph = numbers_graph(
            self.columns, programs.metrics, self.share.shards, self.plan, self.mode
        )
        results: dict[str, Place] = {}
        for label, type_ in _output_types(graph).items():
            if label == f"result:{TOTAL}":
                results[label] = self._buffer(TOTAL, type_.nbytes)
            elif not label.startswith(OutputKind.UPDATE.value):
                results[label] = self._result(label, type_)
        every = {every_name(NUMBERS): Place(every_name(NUMBERS))}
        self._run(self._compiled(("numbers", self.mode), graph, "numbers"), every, results)

    def _update(self) -> None:
        programs = self.programs
        given = {TOTAL: Place(TOTAL), WEIGHT: self._at("result:weight")}
        for name in programs.metrics:
            given[f"sum:metric:{name}"] = self._at(f"metric:{name}")
            given[f"sum:metric_weight:{name}"] = self._at(f"weight:{name}")
        if programs.shards_optimizer or self.grad_norms:
            given[NORM] = self._norms()
        wanted = programs.single if programs.shards_optimizer else list(programs.gradients)
        if self.share.ranks > 1:
            sums = [
                Gather(self._total(n), Place(self.names.gathered(n)), programs.own_type(n).nbytes)
                for n in wanted
            ]
            self._exchange("sums", sums)
        rows = self._own_rows() if programs.gathers_rows else {}
        given |= {self.names.rows(n): place for n, place in rows.items()}
        parts, copies = programs.update_parts(self.in_parts), list[Link]()
        for number, part in enumerate(parts):
            program = programs.update(number, self.in_parts, self._of_shard)
            self._run_update(program, given)
            some = {n: rows[n] for n in part.parameters if n in rows}
            copies += self._gather_rows(some, number < len(parts) - 1)
        self.links += copies

    def _run_update(self, program: Executable, given: Mapping[str, Place]) -> None:
        leaves = {n: p for n, p in given.items() if n in program.graph.leaves}
        leaves |= {n: p for n, p in given.items() if n in _updated(program.graph)}
        if RANDOM_STATE in program.graph.leaves:
            at = program.graph.leaves[RANDOM_STATE]
            self.inputs[UPDATE_KEY] = program.graph.nodes[at].types[0]
            leaves[RANDOM_STATE] = Place(input_name(0, UPDATE_KEY))
        results = {}
        for label, type_ in _output_types(program.graph).items():
            if not label.startswith(OutputKind.UPDATE.value):
                is_known = label in self.results
                results[label] = self._at(label) if is_known else self._result(label, type_)
        self._run(program, leaves, results)

    def _norms(self) -> Place:
        """Of all gradients together and of each, from sums of squares of every row."""
        programs = self.programs
        parameters = list(programs.gradients)
        row = TensorType((len(parameters),))
        self._rows(SQUARES, row)
        narrow = {row_name(n): dtype for n, dtype in programs.narrow.items()}
        graph = with_narrow_leaves(programs.squares_graph(), narrow if self._of_shard else {})
        squares = self._compiled(("squares", self._of_shard), graph, "squares")
        for i in range(self.share.each):
            leaves = {WEIGHT: self._at("result:weight")}
            for name in parameters:
                leaves[row_name(name)] = self._loaded_row(name, i)
            self._run(squares, leaves, {"result:squares": self._row(SQUARES, row, i)})
        self._exchange("norms", self._gathers({SQUARES: row}))
        graph = norms_graph(parameters, self.share.shards, self.grad_norms)
        norm = self._result("result:grad_norm", TensorType(()))
        results = {f"result:{NORM}": norm}
        for name in parameters if self.grad_norms else ():
            label = f"result:grad_norm:{name}"
            results[label] = self._result(label, TensorType(()))
        every = {every_name(SQUARES): Place(every_name(SQUARES))}
        self._run(self._compiled(("norms", self.grad_norms), graph, "norms"), every, results)
        return norm

    def _loaded_row(self, name: str, i: int) -> Place:
        """A row of a sum where it is, or a copy of it where it may be loaded from."""
        total, type_ = self._total(name), self.programs.own_type(name)
        if self._of_shard:
            return total
        nbytes = type_.nbytes // self.share.each
        if i * nbytes % LOADED == 0:
            return Place(total.buffer, i * nbytes)
        copy = self._buffer(f"row of {name}", nbytes)
        self.links.append(Copy(copy, Place(total.buffer, i * nbytes), nbytes))
        return copy

    def _own_rows(self) -> dict[str, Place]:
        """Where this rank's rows of each parameter are updated: in it, or beside it."""
        found: dict[str, Place] = {}
        for name in self.programs.arrays:
            type_, pieces = self._rows_type(name), self.programs.pieces[name]
            start = self.share.rank * type_.nbytes
            if not pieces.filling and type_.nbytes % LOADED == 0:
                found[name] = Place(name, start)
                continue
            found[name] = Place(self.names.rows(name))
            whole = self.plan.parameters[name].nbytes
            nbytes = max(0, min(type_.nbytes, whole - start))
            if nbytes:
                self.links.append(Copy(found[name], Place(name, start), nbytes))
        return found

    def _rows_type(self, name: str) -> TensorType:
        return self.programs.own_type(name).with_dtype(self.plan.parameters[name].dtype)

    def _gather_rows(self, rows: Mapping[str, Place], is_open: bool) -> list[Copy]:
        """Every rank's rows of the parameters, which are filled up beside them if at all.

        What is then to be copied, when all has arrived.
        """
        parts, copies = [], []
        for name, place in rows.items():
            target, each = Place(name), self._rows_type(name).nbytes
            if self.programs.pieces[name].filling:
                target = self._buffer(f"filled {name}", self.share.ranks * each)
                copies.append(Copy(Place(name), target, self.plan.parameters[name].nbytes))
            parts.append(Gather(place, target, each))
        self._exchange("parameters", parts, is_open)
        return copies

    def _states(self) -> None:
        states = self.programs.states
        names = [NUMBERS, *(f"state:{n}" for n in states)]
        graph = states_graph(states, self.columns, self.share.shards, self.plan.scales_loss)
        every = {every_name(n): Place(every_name(n)) for n in names}
        leaves = {n: p for n, p in every.items() if n in graph.leaves}
        self._run(self._compiled("states", graph, "states"), leaves)


def _updated(graph: Graph) -> set[str]:
    return {o.name for o in graph.outputs if o.kind is OutputKind.UPDATE}


def _output_types(graph: Graph) -> dict[str, TensorType]:
    found = zip(graph.outputs, graph.output_types, strict=True)
    return {f"{o.kind.value}:{o.name}": t for o, t in found}
