"""One call of a data-parallel step: shards, sums over ranks, the update, parameters for all."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from treadle.base.errors import NotFiniteError
from treadle.distributed.shards import merges
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.graph import Graph
from treadle.optim.append import Mode
from treadle.runtime.session import Session
from treadle.step.parallel.agree import check_batch_digests
from treadle.step.parallel.graphs import FINE, NORM, ROW, TOTAL, WEIGHT, row_name
from treadle.step.parallel.programs import ParallelPrograms

Arrays = dict[str, np.ndarray]


class ParallelProgram:
    """What a session runs as if it were one program: all ranks run it at the same time."""

    is_in_place, shares_arena, can_repeat = True, False, False
    prints: Sequence[str] = ()
    workspace = 0

    def __init__(
        self,
        programs: ParallelPrograms,
        mode: Mode,
        grad_norms: bool = False,
        only_gradients: bool = False,
    ):
        self.programs, self.mode, self._calls = programs, mode, 0
        self.only_gradients = only_gradients
        self.share, self.names = programs.share, programs.names
        self.communicator = programs.parallel.communicator
        self.grad_norms = grad_norms
        found = ["result:loss", "result:weight"]
        found += [f"{kind}:{m}" for m in programs.metrics for kind in ("metric", "weight")]
        if mode is not Mode.ACCUMULATE:
            found += ["result:grad_norm"]
            found += ["result:updated"] if programs.plan.scales_loss else []
            if grad_norms:
                found += [f"result:grad_norm:{n}" for n in programs.gradients]
        if only_gradients:
            found = ["result:loss", *(f"gradient:{n}" for n in programs.gradients)]
        self.results = found, list(range(len(found)))

    @property
    def runs(self) -> int:
        """Calls that have changed the session's values."""
        return self._calls

    @property
    def graph(self) -> Graph:
        return self.programs.shard_graph

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        raise AssertionError("a data-parallel program changes the values of a session")

    def run_on(
        self,
        owner: Session,
        version: int,
        values: Mapping[str, np.ndarray],
        inputs: Mapping[str, Any],
        wanted: Sequence[int],
        stays: bool = False,
    ) -> tuple[Any, ...]:
        """Loss, metrics and norms; the owner's values are updated."""
        before = self.communicator.waited
        found = _Call(self, owner, inputs).run()
        self._calls += 1
        self.programs.report.add_exchange("waiting", self.communicator.waited - before)
        names, _ = self.results
        return tuple(np.asarray(found[names[i]]) for i in wanted)


class _Call:
    """The stages of one call, in order."""

    def __init__(self, program: ParallelProgram, session: Session, inputs: Mapping[str, Any]):
        self.program, self.session, self.inputs = program, session, inputs
        self.programs, self.plan = program.programs, program.programs.plan
        self.share, self.names = program.share, program.names
        self.mode, self.communicator = program.mode, program.communicator
        self.found: dict[str, Any] = {}

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.programs.report.add_exchange(what, time.perf_counter() - start)

    def run(self) -> dict[str, Any]:
        if not self.program.runs and self.share.ranks > 1 and not self.programs.is_local:
            check_batch_digests(self.communicator, self.inputs)
        with ExitStack() as stack:
            if self.programs.shards_parameters:
                with self._timed("exchange of parameters"):
                    stack.enter_context(self.session.gathered())
            with self._timed("shards"):
                rows, states = self._shards()
        with self._timed("numbers"):
            numbers, states = self._gathered(rows, states)
        with self._timed("exchange of gradients"):
            self._exchange()
        self._refuse_anomaly(numbers)  # with nothing on its way
        self._numbers(numbers)
        if self.program.only_gradients:
            self._whole_gradients()
            return self.found
        with self._timed("sums"):
            self.session.run(self.programs.fold(self.mode), {})
        if self.mode is not Mode.ACCUMULATE:
            self._update()
        if not self.plan.scales_loss or numbers[FINE].all():
            self._write_states(states)
        return self.found

    def _shards(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Gradients of this rank's shards are summed; their numbers and states are rows."""
        programs, session = self.programs, self.session
        columns = self.programs.columns()
        rows = np.zeros((self.share.each, len(columns)))
        states = {
            n: np.zeros((self.share.each, *t.shape), t.dtype.numpy)
            for n, t in programs.states.items()
        }
        kept = [programs.shard_arrays(self.inputs, shard) for shard in self.share.own]
        for number in range(len(programs.stages) - 1):
            self._stage(number, kept)
        steps = zip(kept, merges(self.share.each), strict=True)
        for i, (inputs, merge) in enumerate(steps):
            outputs = session.run(programs.shard(), inputs)
            inputs.clear()
            rows[i] = [float(outputs[c]) for c in columns]
            for name, held in states.items():
                held[i] = session.values[self.names.state(name)]
            if merge.levels or merge.waits_at is not None:
                session.run(programs.merge(merge), {})
        return rows, states

    def _stage(self, number: int, kept: list[dict[str, Any]]) -> None:
        """A stage of all own shards, then the sums over every shard that it ends with."""
        stage, program = self.programs.stages[number], self.programs.shard(number)
        summed: dict[str, list[np.ndarray]] = {n: [] for n in stage.summed}
        for inputs in kept:
            outputs = self.session.run_there(program, inputs)
            inputs |= {n: outputs[f"result:{n}"] for n in stage.kept}
            for name, rows in summed.items():
                rows.append(np.asarray(outputs[f"result:{name}"]))
        every, pending = {}, []
        for name, rows in summed.items():
            own = np.stack(rows)
            every[name] = np.empty((self.share.shards, *own.shape[1:]), own.dtype)
            pending.append(self.communicator.all_gather(own, every[name]))
        self.communicator.wait(pending)
        sums = {name: tree_sum(rows) for name, rows in every.items()}
        for inputs in kept:
            inputs |= sums

    def _gathered(
        self, rows: np.ndarray, states: dict[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What every shard gave, on every rank."""
        shards, comm = self.share.shards, self.communicator
        if comm.size > 1:
            every = np.zeros((shards, rows.shape[1]))
            taken = {n: np.zeros((shards, *a.shape[1:]), a.dtype) for n, a in states.items()}
            pending = [comm.all_gather(rows, every)]
            pending += [comm.all_gather(a, taken[n]) for n, a in states.items()]
            comm.wait(pending)
            rows, states = every, taken
        names = [c.removeprefix("result:") for c in self.programs.columns()]
        return {n: rows[:, i] for i, n in enumerate(names)}, states

    def _refuse_anomaly(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Every rank sees the numbers of every shard: all of them refuse together."""
        if not self.programs.recipe.options.detect_anomaly or self.plan.scales_loss:
            return
        wrong = np.flatnonzero(~np.isfinite(numbers["total"]))
        if not len(wrong):
            return
        shard = int(wrong[0])
        count = int(self.session.values[self.plan.name("count")])
        raise NotFiniteError(
            "step",
            f"the loss of shard {shard}, on rank {self.share.rank_of(shard)}, is "
            f"{numbers['total'][shard]}",
            "Nothing was updated on any rank.",
            step=count,
            loss=float(numbers["total"][shard]),
            names=(),
        )

    def _exchange(self) -> None:
        """Rows of this rank's sums go to those who own them, and theirs come here."""
        if self.communicator.size == 1:
            return
        pending, taken = [], {}
        for name in self.programs.gradients:
            given = self.session.values[self.programs.sum_name(name)]
            taken[name] = self._room(self.names.received(name))
            pending.append(self.communicator.all_to_all(_contiguous(given), taken[name]))
        self.communicator.wait(pending)
        self._write({self.names.received(n): a for n, a in taken.items()})

    def _room(self, name: str) -> np.ndarray:
        """Where an array arrives: its own memory, or on the way to a device."""
        if self.session.memory.is_host:
            return self.session.values[name]
        type_ = self.session.types[name]
        return np.empty(type_.shape, type_.dtype.numpy)

    def _write(self, values: Mapping[str, Any]) -> None:
        """Values in place on the host, where arrays that are there already need nothing."""
        if not self.session.memory.is_host:
            self.session.write(values)
            return
        for name, value in values.items():
            held = self.session.values[name]
            if held is not value:
                held[...] = value

    def _numbers(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Loss, weight and metrics over all shards, and over the micro-steps before."""
        totals = {"total": _sum(numbers["total"]), "weight": _sum(numbers["weight"])}
        for name in self.programs.metrics:
            value, weight = numbers[f"metric:{name}"], numbers[f"weight:{name}"]
            # A value without weight, NaN perhaps, counts for nothing.
            totals[f"metric:{name}"] = _sum(np.where(weight == 0, 0, value * weight))
            totals[f"metric_weight:{name}"] = _sum(weight)
        if self.mode is not Mode.UPDATE:
            totals = self._accumulated(totals)
        self.totals = totals
        self.found["result:loss"] = np.float32(_ratio(totals["total"], totals["weight"]))
        self.found["result:weight"] = np.float32(totals["weight"])
        for name in self.programs.metrics:
            amount = totals[f"metric_weight:{name}"]
            self.found[f"metric:{name}"] = np.float32(_ratio(totals[f"metric:{name}"], amount))
            self.found[f"weight:{name}"] = np.float32(amount)

    def _accumulated(self, totals: dict[str, float]) -> dict[str, float]:
        names = {n: self.plan.name("accumulator", n) for n in totals}
        found = {
            n: float(np.float32(float(self.session.values[names[n]]) + t))
            for n, t in totals.items()
        }
        is_last = self.mode is Mode.ACCUMULATE_AND_UPDATE
        self._write({names[n]: np.asarray(0.0 if is_last else t) for n, t in found.items()})
        return found

    def _update(self) -> None:
        programs = self.programs
        key = {RANDOM_STATE: self.inputs[RANDOM_STATE]} if RANDOM_STATE in self.inputs else {}
        scalars: dict[str, Any] = {
            TOTAL: np.float32(self.totals["total"]),
            WEIGHT: np.float32(self.totals["weight"]),
        }
        for name in programs.metrics:
            scalars[f"sum:metric:{name}"] = self.found[f"metric:{name}"]
            scalars[f"sum:metric_weight:{name}"] = self.found[f"weight:{name}"]
        if programs.shards_optimizer or self.program.grad_norms:
            with self._timed("norms"):
                self._norms(scalars)
        given = {n: np.asarray(v, np.float32) for n, v in scalars.items()}
        with self._timed("exchange of sums"):
            self._gather_sums()
        outputs = self._update_rows(given | key)
        if not programs.shards_optimizer:
            self.found["result:grad_norm"] = outputs["result:grad_norm"]
        if self.plan.scales_loss:
            self.found["result:updated"] = outputs["result:updated"]

    def _update_rows(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the update gives; where ranks have updated rows, they are gathered."""
        programs, session = self.programs, self.session
        if not programs.gathers_rows:
            with self._timed("update"):
                return session.run(programs.update(), given)
        with self._timed("update"):
            self._take_rows()
            outputs = session.run(programs.update(), given)
        with self._timed("exchange of parameters"):
            sent = self._send_rows()
            for name, rows in sent.items():
                if not self._is_direct(name):
                    self._write({name: programs.pieces[name].glue(rows)})
        return outputs

    def _whole_gradients(self) -> None:
        """The mean gradients of the batch, whole on every rank; nothing else changes."""
        self.session.run(self.programs.fold(Mode.UPDATE), {})
        scale = (
            float(self.session.values[self.plan.name("loss_scale")]) if self.plan.scales_loss else 1
        )
        factor = self.totals["weight"] * scale
        for name, pieces in self.programs.pieces.items():
            given = _contiguous(self.session.values[self.names.total(name)])
            taken = np.empty((self.share.shards, pieces.length), given.dtype)
            self.communicator.wait([self.communicator.all_gather(given, taken)])
            self.found[f"gradient:{name}"] = pieces.glue(taken) / given.dtype.type(factor)

    def _norms(self, scalars: dict[str, Any]) -> None:
        """Of all gradients together and of each, from sums of squares of every row."""
        programs, comm = self.programs, self.communicator
        own = np.zeros((self.share.each, len(programs.gradients)), np.float32)
        for i in range(self.share.each):
            inputs = {WEIGHT: np.asarray(scalars[WEIGHT])} | self._row(i)
            own[i] = self.session.run(programs.squares(), inputs)["result:squares"]
        every = np.zeros((self.share.shards, own.shape[1]), np.float32)
        comm.wait([comm.all_gather(own, every)])
        wide = every.astype(np.float64)
        scalars[NORM] = np.float32(math.sqrt(_sum(wide)))
        self.found["result:grad_norm"] = scalars[NORM]
        for i, name in enumerate(programs.gradients):
            self.found[f"result:grad_norm:{name}"] = np.float32(math.sqrt(_sum(wide[:, i])))

    def _row(self, number: int) -> dict[str, np.ndarray]:
        """A row of every sum; on a device its number alone."""
        if not self.session.memory.is_host:
            return {ROW: np.asarray(number, np.int32)}
        names = {n: self.names.total(n) for n in self.programs.gradients}
        values = self.session.values
        return {
            row_name(n): np.ascontiguousarray(values[held][number]) for n, held in names.items()
        }

    def _gather_sums(self) -> None:
        """All rows of the sums, for what every rank updates."""
        programs, comm = self.programs, self.communicator
        wanted = programs.single if programs.shards_optimizer else list(programs.gradients)
        pending, taken = [], {}
        for name in wanted:
            taken[name] = self._room(self.names.gathered(name))
            given = self.session.values[self.names.total(name)]
            pending.append(comm.all_gather(_contiguous(given), taken[name]))
        comm.wait(pending)
        self._write({self.names.gathered(n): a for n, a in taken.items()})

    def _take_rows(self) -> None:
        """This rank's rows of the parameters, beside them."""
        own = slice(self.share.own.start, self.share.own.stop)
        rows = {
            self.names.rows(n): self.programs.pieces[n].cut(self.session.values[n])[own]
            for n in self.programs.arrays
        }
        self._write(rows)

    def _send_rows(self) -> dict[str, np.ndarray]:
        """Every rank's rows of all parameters, where they have arrived."""
        pending, sent = [], {}
        for name in self.programs.arrays:
            given = self.session.values[self.names.rows(name)]
            shape = (self.share.shards, self.programs.pieces[name].length)
            sent[name] = self._target(name, shape, given.dtype)
            pending.append(self.communicator.all_gather(_contiguous(given), sent[name]))
        self.communicator.wait(pending)
        return sent

    def _is_direct(self, name: str) -> bool:
        """Whether rows arrive where the parameter is."""
        return self.session.memory.is_host and not self.programs.pieces[name].filling

    def _target(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if self._is_direct(name):
            return self.session.values[name].reshape(shape)
        return np.empty(shape, dtype)

    def _write_states(self, states: Mapping[str, np.ndarray]) -> None:
        """States of the model: what all shards agree on, or the mean of floats."""
        self._write({n: _combined(rows) for n, rows in states.items()})


def tree_sum(rows: np.ndarray) -> np.ndarray:
    """The sum over all shards, in their tree."""
    waiting: dict[int, np.ndarray] = {}
    total = rows[0]
    for row, merge in zip(rows, merges(len(rows)), strict=True):
        total = row
        for level in merge.levels:
            total = waiting[level] + total
        if merge.waits_at is not None:
            waiting[merge.waits_at] = total
    return total


def _combined(rows: np.ndarray) -> np.ndarray:
    words = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    if (words == words[:1]).all() or rows.dtype.kind not in "fV":
        return rows[0]
    total = np.zeros(rows.shape[1:])
    for row in rows:
        total = total + row.astype(np.float64)
    return (total / len(rows)).astype(rows.dtype)


def _sum(values: np.ndarray) -> float:
    """Exact, then rounded once: whatever the order. NaN and infinities as they come."""
    flat = values.reshape(-1)
    return math.fsum(flat.tolist()) if np.isfinite(flat).all() else float(flat.sum())


def _ratio(total: float, weight: float) -> float:
    return float(np.float64(total) / np.float64(weight)) if weight else math.nan


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array)
