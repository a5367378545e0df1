"""Graphs compiled for browsers: the record of `codegen/wgsl/bundle.py`, ready for its files."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.backends.stages import build
from treadle.backends.webgpu.backend import WebGpuToolchain
from treadle.codegen.wgsl.bundle import Compiled, bundle
from treadle.compile_report import CompileOptions, CompileReport
from treadle.domains.index_ranges import index_ranges
from treadle.frontend.scopes import RANDOM_STATE
from treadle.ir.graph import Graph
from treadle.kernel.target_webgpu import BASE
from treadle.nn.tracing import INPUT_PREFIX

DEVICE = "webgpu"
RECORD = "record"  # the version of what the compiler made of the programs
Facts = dict[str, Any]  # plain values, as JSON


@dataclass(frozen=True, slots=True, eq=False)
class WebProgram:
    """A compiled graph, its random stream's seed, and names of results that have none."""

    compiled: Compiled
    seed: list[int]
    paths: Sequence[str] = ()

    @property
    def state(self) -> list[str]:
        """Names of the session's values that it reads or writes."""
        return [n for n, _, _ in self.compiled.plan.leaves if not _is_given(n)]


def _is_given(leaf: str) -> bool:
    return leaf == RANDOM_STATE or leaf.startswith(INPUT_PREFIX)


def web_program(
    graph: Graph,
    report: CompileReport,
    options: CompileOptions,
    seed: list[int],
    paths: Sequence[str] = (),
) -> WebProgram:
    """A graph compiled for what every WebGPU device has; none is needed."""
    built = build(WebGpuToolchain(BASE), graph, report, options)
    return WebProgram(Compiled(graph, built.plan, built.constants, built.code), seed, paths)


def record_of(programs: Mapping[str, WebProgram]) -> tuple[Facts, str, dict[str, np.ndarray]]:
    """What the runtime must know of programs, their kernels as WGSL, and constants in words."""
    record = bundle({name: p.compiled for name, p in programs.items()}, BASE)
    record[RECORD] = record.pop("version")
    arenas = {
        launch["shader"]: len(launch["arenas"])
        for facts in record["programs"].values()
        for launch in facts["launches"]
    }
    shaders = record.pop("shaders").items()
    source = "".join(f"//// {name} {arenas[name]}\n{text}" for name, text in shaders)
    constants = {
        name: np.frombuffer(base64.b64decode(value.pop("initial")), np.uint32)
        for name, value in record["values"].items()
        if "initial" in value
    }
    for name, program in programs.items():
        facts = record["programs"][name]
        facts["seed"] = program.seed
        for output in facts["outputs"]:
            output["key"] = _key(output, program.paths)
        _note_ranges(program.compiled.graph, facts["inputs"], record["values"])
    return record, source, constants


def _key(output: Facts, paths: Sequence[str]) -> str:
    """What a result is called: by its path in what the function returns, or by its name."""
    name = str(output["name"])
    if output["kind"] != "result":
        return f"{output['kind']}:{name}"
    return paths[int(name)] or name if paths else name


def _note_ranges(graph: Graph, inputs: Mapping[str, str], values: Mapping[str, Facts]) -> None:
    """The numbers that are right for inputs which are indices."""
    for found in index_ranges(graph):
        if found.positions is None and found.leaf in inputs:
            allowed = [[int(n) for n in pair] for pair in found.allowed]
            values[inputs[found.leaf]]["allowed"] = allowed
