"""The programs of a training step, each built when first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from treadle.backends.passing import add_part
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.marks import marked
from treadle.ir.types import TensorType
from treadle.optim.append import Mode, state_types
from treadle.pipeline import CompileOptions, CompileReport, load
from treadle.runtime.executable import Executable
from treadle.runtime.session import select
from treadle.step.index_checks import checks_of
from treadle.step.index_guard import guarded


class Watched(NamedTuple):
    """What a call asks for beyond loss and metrics. What is not asked for is not computed."""

    captures: bool = False
    grad_norms: bool = False
    histograms: bool = False


UNWATCHED = Watched()


class Variants:
    """The programs of one batch shape, each built when first asked for.

    On a device they look at indices themselves, whether those come from there or from the host:
    a second program for arrays that are there would be compiled and held beside the first.
    """

    def __init__(
        self,
        graphs: Mapping[Mode, Graph],
        report: CompileReport,
        options: CompileOptions,
        on_device: bool,
    ):
        self.graphs, self._report, self._options = graphs, report, options
        self._built: dict[tuple[object, ...], Executable] = {}
        self.indices = checks_of(graphs[Mode.UPDATE], options.check_indices)
        self._on_device = on_device
        self.is_random = any(RANDOM_STATE in g.leaves for g in graphs.values())

    def states(self) -> dict[str, TensorType]:
        """The state that the programs read."""
        return state_types(list(self.graphs.values()))

    def step(self, mode: Mode, watched: Watched) -> Executable:
        known = self._built.get((mode, watched))
        if known is not None:
            return known
        kinds = {OutputKind.METRIC, OutputKind.WEIGHT, OutputKind.UPDATE, OutputKind.PRINT}
        if watched.captures:
            kinds.add(OutputKind.CAPTURE)
        if watched.histograms:
            kinds.add(OutputKind.GRADIENT)
        graph = self.graphs[mode]
        names = ["loss", "weight", "grad_norm", "updated"]
        if watched.grad_norms:
            names += [o.name for o in graph.outputs if o.name.startswith("grad_norm:")]
        return self._program((mode, watched), graph, kinds, names)

    def main(self, mode: Mode) -> Executable:
        """The program that most of the time goes to."""
        return self.step(mode, UNWATCHED)

    def main_inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What that program is given."""
        return arrays

    def gradients(self) -> Executable:
        kinds = {OutputKind.GRADIENT, OutputKind.PRINT}
        key = ("gradients", UNWATCHED)
        return self._program(key, self.graphs[Mode.UPDATE], kinds, ["loss"])

    def _program(
        self,
        key: tuple[object, Watched],
        graph: Graph,
        kinds: set[OutputKind],
        names: list[str],
    ) -> Executable:
        if key not in self._built:
            name = "gradients" if key[0] == "gradients" else "step"
            whole = marked(graph)
            chosen = select(whole, kinds, names)
            chosen = guarded(chosen, self.indices) if self._on_device else chosen
            add_part(self._report, self._options, name, whole, chosen)
            self._built[key] = load(chosen, self._report, self._options, name)
            self._report.compiles += 1
        return self._built[key]


class Evaluation:
    """The programs that evaluate one batch shape: without captures and with them."""

    def __init__(
        self, graph: Graph, report: CompileReport, options: CompileOptions, on_device: bool
    ):
        self._graph, self._report, self._options = graph, report, options
        self._built: dict[bool, Executable] = {}
        self.indices = checks_of(graph, options.check_indices)
        self._on_device = on_device

    def program(self, captures: bool) -> Executable:
        if captures not in self._built:
            kinds = {OutputKind.METRIC, OutputKind.WEIGHT, OutputKind.PRINT}
            if captures:
                kinds.add(OutputKind.CAPTURE)
            whole = marked(self._graph)
            chosen = select(whole, kinds, ["loss", "weight"])
            chosen = guarded(chosen, self.indices) if self._on_device else chosen
            add_part(self._report, self._options, "evaluate", whole, chosen)
            self._built[captures] = load(chosen, self._report, self._options, "evaluate")
            self._report.compiles += 1
        return self._built[captures]
