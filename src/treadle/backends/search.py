"""Measured choices: whole programs are timed with other sizes of their target, within a budget.

One choice after the other is tried on top of those that paid. A candidate whose kernels are the
same is not compiled. What was found is kept on disk, for this graph on this machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.backends.protocol import RescheduleError, Toolchain
from treadle.backends.stages import built_of
from treadle.backends.stored import key_of
from treadle.compile_report import CompileOptions, CompileReport, Trial
from treadle.domains.index_ranges import index_ranges
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.choices import Choice, Chosen, choices_of, from_numbers, numbered
from treadle.kernel.text import program_text
from treadle.runtime.cache import fingerprint, plan_cache
from treadle.runtime.executable import InPlaceProgram

ROUNDS = 5  # turns of a candidate and of the best so far
TURN = 0.02  # seconds of a turn: steps are repeated until it is over
GAIN = 0.98  # of the best so far: what is less of a difference is noise
Tools = Toolchain[Any, Any]
Values = Mapping[str, np.ndarray]


def searched(
    toolchain: Tools, graph: Graph, report: CompileReport, options: CompileOptions
) -> Tools:
    """The toolchain with the choices that make this graph's program fastest here."""
    cache, choices = plan_cache(), choices_of(toolchain.target)
    key = fingerprint(["search", key_of(graph, options, toolchain), repr(choices)])
    stored = None if cache is None else cache.get(key)
    chosen = None if stored is None else _read(stored, choices, options.seconds)
    if chosen is None:
        with report.stage("search"):
            search = _Search(toolchain, graph, options)
            chosen = search.run(options.seconds)
            report.trials.extend(search.trials)
        if cache is not None:
            content = json.dumps(numbered(chosen, choices)).encode()
            spent = json.dumps(options.seconds if search.is_cut else None).encode()
            cache.put(key, {"chosen": content, "seconds": spent})
    report.chosen = chosen
    return toolchain.tuned(chosen)


def _read(stored: Mapping[str, bytes], choices: Sequence[Choice], seconds: float) -> Chosen | None:
    """What was found before; None where less time was given than now, and it was not enough."""
    try:
        numbers, spent = json.loads(stored["chosen"]), json.loads(stored["seconds"])
        is_enough = spent is None or float(spent) >= seconds
    except (LookupError, ValueError, TypeError, RecursionError):
        return None
    return from_numbers(numbers, choices) if is_enough else None


@dataclass(frozen=True, slots=True)
class _Candidate:
    chosen: Chosen
    program: InPlaceProgram


class _Search:
    def __init__(self, toolchain: Tools, graph: Graph, options: CompileOptions):
        self.toolchain, self.graph, self.options = toolchain, graph, options
        self.values = plausible_values(graph)
        self.trials: list[Trial] = []
        self.is_cut = False  # whether choices were left when the time was over
        self.aside = CompileReport("", "")  # candidates are no part of the report
        self.seen: set[str] = set()  # texts of kernels: equal ones need no timing

    def run(self, seconds: float) -> Chosen:
        """The choices that paid, when all were tried or the time is over."""
        end = time.perf_counter() + seconds
        best = self.candidate(())
        if best is None:
            return ()
        for choice in choices_of(self.toolchain.target):
            for value in choice.values:
                if time.perf_counter() >= end:
                    self.is_cut = True
                    return best.chosen
                others = tuple(pair for pair in best.chosen if pair[0] != choice.name)
                found = self.candidate((*others, (choice.name, value)))
                if found is None:
                    continue
                ratio = self.ratio(found.program, best.program)
                self.trials.append(Trial(choice.name, value, ratio, ratio < GAIN))
                best = found if ratio < GAIN else best
        return best.chosen

    def candidate(self, chosen: Chosen) -> _Candidate | None:
        """A program with some choices; None if its kernels were tried before."""
        toolchain = self.toolchain.tuned(chosen)
        program = toolchain.schedule(self.graph, self.options)
        text = f"{toolchain.target.tasks} {program_text(program)}"
        if text in self.seen:
            return None
        try:
            built = built_of(toolchain, program, self.aside)
            loaded = toolchain.load(self.graph, built)
        except RescheduleError as missing:  # all that follows goes without the call
            self.toolchain = missing.toolchain.tuned(())
            return self.candidate(chosen)
        self.seen.add(text)
        return _Candidate(chosen, loaded)

    def ratio(self, candidate: InPlaceProgram, best: InPlaceProgram) -> float:
        """Its time over that of the best so far, the median of turns side by side."""
        return statistics.median(
            self.seconds(candidate) / max(self.seconds(best), 1e-9) for _ in range(ROUNDS)
        )

    def seconds(self, program: InPlaceProgram) -> float:
        return program.seconds(self.values, TURN)


def plausible_values(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for leaves, as times depend on them little: small floats, indices in range."""
    rng = np.random.default_rng(seed)
    allowed: dict[str, int] = {}
    for found in index_ranges(graph):
        allowed[found.leaf] = min(found.size, allowed.get(found.leaf, found.size))
    leaves = {name: graph.nodes[at].types[0] for name, at in graph.leaves.items()}
    return {n: _values(rng, t, allowed.get(n, 2)) for n, t in leaves.items()}


def _values(rng: np.random.Generator, type_: TensorType, bound: int) -> np.ndarray:
    dtype = type_.dtype
    if dtype.is_float:
        # Positive, as second moments are; about the size of weights and activations.
        return rng.uniform(0.001, 0.1, type_.shape).astype(dtype.numpy)
    return rng.integers(0, max(1, bound), type_.shape).astype(dtype.numpy)
