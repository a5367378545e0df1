"""The gluing check: what ranks compute by parts is what one process computes as a whole.

Every value has a layout: which rank holds which part of it. All shards and all ranks are put
together as one graph, by the tree, the rows and the programs that a step uses, on a batch of few
rows: parts that two ranks hold must agree, and what they make when glued must be the new values of
the step without shards, exactly over the finite field. A part that is wrong, missing, counted
twice or weighted otherwise is an error that names the value and the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.base.errors import GraphError
from treadle.base.shapes import Shape, size_of
from treadle.distributed.shards import Pieces, Share, merges
from treadle.domains.domain import evaluate
from treadle.domains.field import FiniteField, Residues
from treadle.domains.philox import key_of_shard, make_key
from treadle.frontend.coerce import cast, constant
from treadle.frontend.functions.arithmetic import sqrt
from treadle.frontend.functions.shaping import concat, reshape, slice_along
from treadle.frontend.scopes import RANDOM_STATE, Trace, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import emit
from treadle.ir.graph import Graph, Node, Output, OutputKind, Value
from treadle.ir.literal import ArrayLiteral
from treadle.ir.ops.indexing import KEY_TYPE
from treadle.ir.ops.leaves import CONSTANT, Constant, Leaf
from treadle.ir.ops.reductions import SHARD_SUM
from treadle.ir.rewrite import remove_dead_code
from treadle.ir.types import TensorType
from treadle.kernel.claims import Claim
from treadle.nn.tracing import smaller_inputs
from treadle.optim.append import Mode
from treadle.pipeline import CompileReport, build_step
from treadle.step.parallel.building import build_programs
from treadle.step.parallel.graphs import NORM, TOTAL, WEIGHT, Names, cut_rows, row_name
from treadle.step.parallel.programs import Parallel, ParallelPrograms

MOST_ELEMENTS = 2**21  # of all leaves, times the shards


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a flat array that a rank holds."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank holds which elements of a value."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    @staticmethod
    def of(name: str, shape: Shape, shards: int, ranks: int) -> Layout:
        """Rows of shards, each on the rank that computes its shard."""
        pieces, parts = Pieces(shape, shards), []
        for rank in range(ranks):
            own = [pieces.part(shard) for shard in Share(shards, ranks, rank).own]
            parts.append(Part(rank, own[0].start, own[-1].stop))
        return Layout(name, shape, tuple(parts))

    def rank_of(self, element: int) -> int:
        return next(p.rank for p in self.parts if p.start <= element < p.stop)

    def check(self) -> None:
        """Every element is held, and by one rank alone: what several hold is to be compared."""
        held = np.zeros(size_of(self.shape), np.int64)
        for part in self.parts:
            held[part.start : part.stop] += 1
        wrong = np.flatnonzero(held != 1)
        if len(wrong):
            at = int(wrong[0])
            ranks = [p.rank for p in self.parts if p.start <= at < p.stop]
            told = f"held by ranks {ranks}" if ranks else "held by no rank"
            raise GraphError("verify", f"{self.name}: element {at} of {self.shape} is {told}")


@dataclass(frozen=True, slots=True)
class Sharded:
    """The graphs of a step by shards: of one shard, of the squares of a row, of each rank's rows.

    `whole` are the gradients' types; `scale` is the name of float16's loss scale.
    """

    shard: Graph
    squares: Graph
    updates: Sequence[Graph]
    whole: Mapping[str, TensorType]
    share: Share
    names: Names
    is_cut: Callable[[str, TensorType], bool]


def checked_gluing(programs: ParallelPrograms) -> Claim:
    """The gluing check of a step, on a batch as small as the model takes."""
    config, share, recipe = programs.parallel.config, programs.share, programs.recipe
    reason = "every rank updates everything" if not config.shard_optimizer else ""
    reason = "there is one shard" if config.shards == 1 else reason
    if reason or (not config.synchronises and programs.has_batch_norm):
        return Claim("gluing", "step", reason=reason or "batch norms are of each shard by itself")
    ranks = share.ranks if share.ranks > 1 else 2 if _is_even(share.shards) else share.shards
    several = Share(share.shards, ranks)
    quiet = replace(recipe.options, verify="fast", memory_budget=None)
    shown = replace(recipe, options=quiet)
    parallel = Parallel(replace(config, local=False), programs.parallel.communicator, several)
    given = programs.parallel.shard_inputs(programs.given)
    for small in smaller_inputs(given):
        report = CompileReport(programs.report.device, recipe.precision.name, 0)
        whole = parallel.whole_inputs(small)
        alone = replace(shown, shards=0, accumulate=1)
        try:
            few = build_programs(shown, programs.plan, parallel, whole, report)
            unsharded = build_step(alone, alone.plan(), whole, report)[Mode.UPDATE]
            report.evidence.settle()
        except Exception:
            continue  # the user's function, of these sizes alone
        sharded = Sharded(
            few.shard_graph,
            few.squares_graph(),
            [few.rows_update(several)] * ranks,
            few.whole,
            several,
            few.names,
            parallel.is_cut,
        )
        return check_gluing(sharded, unsharded)
    return Claim("gluing", "step", reason="the loss could not be traced once more")


def _is_even(shards: int) -> bool:
    """Whether two ranks can share them."""
    return shards % 2 == 0 and not shards // 2 & (shards // 2 - 1)


def check_gluing(sharded: Sharded, unsharded: Graph, trial: int = 0) -> Claim:
    """That ranks make what one process does; a GraphError that names a value and a rank if not."""
    leaves = {n: unsharded.nodes[i] for n, i in unsharded.leaves.items()}
    types = {n: node.types[0] for n, node in leaves.items()}
    if sum(t.size for t in types.values()) * sharded.share.shards > MOST_ELEMENTS:
        return Claim("gluing", "step", reason="its parameters are too many for the finite field")
    rows, share = sharded.whole, sharded.share
    layouts = {n: Layout.of(n, t.shape, share.shards, share.ranks) for n, t in rows.items()}
    for layout in layouts.values():
        layout.check()
    glued = glued_graph(sharded, leaves)
    field, rng = FiniteField(trial), np.random.default_rng(trial)
    inputs = {n: _leaf(field, n, t, rng) for n, t in types.items()}
    found = _updates(glued, evaluate(glued, inputs, field))
    wanted = _updates(unsharded, evaluate(unsharded, inputs, field))
    for name, value in wanted.items():
        if name not in found:
            raise GraphError("verify", f"{name} is updated by no rank")
        at = _difference(found[name], value)
        if at is not None:
            shape = np.shape(value.p)
            rank = Layout.of(name, shape, share.shards, share.ranks).rank_of(at) if shape else 0
            raise GraphError(
                "verify",
                f"{name} on rank {rank} of {share.ranks}: element {at} of {shape}, glued from "
                f"{share.shards} shards, is not what one process computes",
                "The loss of a batch must be the mean of those of its shards: see td.Mean.",
            )
    return Claim("gluing", "step", buffers=tuple(wanted))


def _updates(graph: Graph, values: Sequence[Residues]) -> dict[str, Residues]:
    pairs = zip(graph.outputs, graph.output_types, values, strict=True)
    return {o.name: v for o, t, v in pairs if o.kind is OutputKind.UPDATE and t.is_float}


def _leaf(field: FiniteField, name: str, type_: TensorType, rng: np.random.Generator) -> Residues:
    if name == RANDOM_STATE:
        return field.lift(make_key(0), type_)
    if type_.is_float:
        return field.random(type_, rng)
    return field.lift(rng.integers(0, 2, type_.shape), type_)


def _difference(found: Residues, wanted: Residues) -> int | None:
    """The first element that is equal in neither lane."""
    differs = (found.p != wanted.p) & (found.q != wanted.q)
    at = np.flatnonzero(np.reshape(differs, -1))
    return int(at[0]) if len(at) else None


def _as_rows(stored: Tensor, type_: TensorType, share: Share) -> Tensor:
    """What a shard has stored of a gradient, as rows of the gradient's own type."""
    length = Pieces(type_.shape, share.shards).length
    return reshape(cast(stored, type_.dtype), (share.shards, length))


def glued_graph(sharded: Sharded, leaves: Mapping[str, Node]) -> Graph:
    """All shards and ranks as one graph over the whole batch, whole parameters and states."""
    share, names = sharded.share, sharded.names
    with isolated_tracing("glued") as trace:
        gluing = _Gluing(trace, sharded, leaves)
        shards = gluing.shards()
        found = [dict(zip(_labels(sharded.shard), outputs, strict=True)) for outputs in shards]
        numbers = {n: gluing.tree([s[f"result:{n}"] for s in found]) for n in ("total", "weight")}
        sums = {  # (shards, length) of each parameter
            n: gluing.tree([_as_rows(s[f"update:{names.gradient(n)}"], t, share) for s in found])
            for n, t in sharded.whole.items()
        }
        given = {TOTAL: numbers["total"], WEIGHT: numbers["weight"]}
        given[NORM] = gluing.norm(sums, given)
        rows: dict[str, list[Tensor]] = {}
        single: dict[str, Tensor] = {}
        for rank, update in enumerate(sharded.updates):
            own = Share(share.shards, share.ranks, rank).own
            gluing.update(update, own, sums, given, rows, single)
        outputs = [Output(OutputKind.UPDATE, n, t.handle) for n, t in single.items()]
        for name, parts in rows.items():
            outputs.append(Output(OutputKind.UPDATE, name, gluing.glued(name, parts).handle))
        for name, value in gluing.states(found).items():
            outputs.append(Output(OutputKind.UPDATE, name, value.handle))
        return remove_dead_code(trace.finish_outputs(outputs))


def _labels(graph: Graph) -> list[str]:
    return [f"{o.kind.value}:{o.name}" for o in graph.outputs]


class _Gluing:
    """Graphs put into one trace, over leaves of the whole."""

    def __init__(self, trace: Trace, sharded: Sharded, leaves: Mapping[str, Node]):
        self.trace, self.sharded, self.leaves = trace, sharded, leaves
        self.share, self.names = sharded.share, sharded.names

    def leaf(self, name: str) -> Tensor:
        return self.trace.leaf(self.leaves[name].op, name, self.leaves[name].types[0])

    def tree(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over shards, in their tree."""
        waiting: dict[int, Tensor] = {}
        total = parts[0]
        for part, merge in zip(parts, merges(len(parts)), strict=True):
            total = part
            for level in merge.levels:
                total = waiting[level] + total
            if merge.waits_at is not None:
                waiting[merge.waits_at] = total
        return total

    def shards(self) -> list[list[Tensor]]:
        """Outputs of all shards, which are computed side by side: sums over them wait for all."""
        graph, count = self.sharded.shard, self.share.shards
        made: list[list[tuple[Value, ...]]] = [[] for _ in range(count)]
        for node in graph.nodes:
            if isinstance(node.attributes, Leaf):
                for shard, own in enumerate(made):
                    own.append((self._part(node.attributes, shard).handle,))
                continue
            operands = [[own[v.node][v.output] for v in node.operands] for own in made]
            if node.op is SHARD_SUM:
                total = self.tree([self.trace.tensor(values[0]) for values in operands])
                for own in made:
                    own.append((total.handle,))
                continue
            for own, values in zip(made, operands, strict=True):
                position = self.trace.builder.copy(node, values)
                own.append(tuple(Value(position, i) for i in range(len(node.types))))
        return [
            [self.trace.tensor(own[o.value.node][o.value.output]) for o in graph.outputs]
            for own in made
        ]

    def _part(self, leaf: Leaf, shard: int) -> Tensor:
        """A shard's rows of the batch; its key; everything else whole."""
        if leaf.name == RANDOM_STATE:
            key = ArrayLiteral(key_of_shard(make_key(0), shard))
            return self.trace.tensor(
                self.trace.builder.add(CONSTANT, Constant(key, KEY_TYPE), ())[0]
            )
        whole = self.leaf(leaf.name)
        if not self.sharded.is_cut(leaf.name, leaf.type) or whole.shape == leaf.type.shape:
            return whole
        rows = leaf.type.shape[0]
        return slice_along(whole, 0, shard * rows, (shard + 1) * rows)

    def norm(self, sums: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        graph = self.sharded.squares
        total = constant(0, (), given[WEIGHT].dtype)
        for shard in range(self.share.shards):
            bound = dict(given)
            for name, rows in sums.items():
                row = slice_along(rows, 0, shard, shard + 1)
                bound[row_name(name)] = reshape(row, (rows.shape[1],))
            (squares,) = emit(graph, self._bound(graph, bound))
            for i in range(len(sums)):
                total = total + reshape(slice_along(squares, 0, i, i + 1), ())
        return sqrt(total)

    def _bound(self, graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leaves of a graph: what is given, and the whole's own."""
        return {n: given[n] if n in given else self.leaf(n) for n in graph.leaves}

    def update(
        self,
        graph: Graph,
        own: range,
        sums: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
        rows: dict[str, list[Tensor]],
        single: dict[str, Tensor],
    ) -> None:
        """What one rank updates: its rows of arrays, and numbers as all ranks do."""
        names, bound = self.names, dict(given)
        parameters = {names.rows(n): n for n in sums}
        totals = {names.total(n): n for n in sums}
        gathered = {names.gathered(n): n for n in sums}
        for name, position in graph.leaves.items():
            type_ = graph.nodes[position].types[0]
            if name in totals:
                bound[name] = slice_along(sums[totals[name]], 0, own.start, own.stop)
            elif name in gathered:
                bound[name] = sums[gathered[name]]
            elif name not in bound and type_.shape:
                whole = parameters.get(name, name)
                kept = self.leaf(whole)
                pieces = Pieces(kept.shape, self.share.shards)
                bound[name] = slice_along(cut_rows(kept, pieces), 0, own.start, own.stop)
        values = emit(graph, self._bound(graph, bound))
        for output, value in zip(graph.outputs, values, strict=True):
            if output.kind is not OutputKind.UPDATE:
                continue
            name = parameters.get(output.name, output.name)
            if value.shape:
                rows.setdefault(name, []).append(value)
            else:
                single.setdefault(name, value)

    def glued(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A whole array from the rows of each rank, by their layout."""
        from_ranks = [reshape(p, (p.size,)) for p in parts]
        flat = concat(from_ranks)
        type_ = self.leaves[name].types[0]
        whole = slice_along(flat, 0, 0, type_.size)
        return cast(reshape(whole, type_.shape), type_.dtype)

    def states(self, found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """States of the model, of which shards agree: the first one's."""
        prefix = "update:" + self.names.state("")
        return {n.removeprefix(prefix): t for n, t in found[0].items() if n.startswith(prefix)}
