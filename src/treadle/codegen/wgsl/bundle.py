"""Compiled programs as one JSON-able record, for a runtime that knows WebGPU and nothing else.

    {
      "version": 1,
      "limits": {"invocations", "workgroup_bytes", "storage_buffers", "binding_bytes", …},
      "shaders": {name: WGSL},            # entry point "main"
      "arenas": [{"name", "bytes"}],      # a storage buffer each, zeros at first
      "values": {name: {
          "arena": name, "offset": bytes, "bytes": n, "dtype", "shape", "role",
          "initial": base64                # of constants: the words as they lie
      }},
      "programs": {name: {
          "inputs": {leaf: value},         # to be written before each run
          "outputs": [{"kind", "name", "value"}],   # to be read after it; kinds of the graph
          "updates": [value],              # parameters and state that a run writes in place
          "launches": [{
              "shader": name, "arenas": [name],     # binding i of group 0 is arenas[i]
              "workgroups": [x, y, z],
              "arguments": [word]          # u32s of the uniform buffer, group 1 binding 0
          }]
      }}
    }

Every element is a little-endian word of four bytes: float32, int32 and uint32 as they are, bfloat16
and float16 as float32, bool as 0 or 1, 8-bit integers widened. Roles: "parameter" and "state" are
shared by all programs, and the runtime writes their first values; "input", "output", "constant" and
"scratch" (one for each program) are a program's own and are named "program/name".

The uniform binding has a dynamic offset; each launch's arguments start at a multiple of 256 bytes,
and the binding is as long as the longest. Launches of a run are one compute pass, in order.

A program that draws random numbers has the input "random:key": six words, the seed's low and high
32 bits, how many steps were made before, the micro-step (0 unless gradients are accumulated), 0, 0.
Everything else that counts (the optimizer's step) is state, which the program moves on by itself.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import OutOfMemoryError
from treadle.base.words import WORD, as_words
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.kernel.plan import Plan
from treadle.kernel.shaders import Place, Shader, dispatches, module, scratch_places
from treadle.kernel.target_webgpu import WebGpuLimits

VERSION = 1
RANDOM = "random:key"  # the leaf that has it
ALIGNMENT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A program before it is bound to memory."""

    graph: Graph
    plan: Plan
    constants: Mapping[str, np.ndarray]
    shaders: Sequence[Shader]


def bundle(programs: Mapping[str, Compiled], limits: WebGpuLimits) -> dict[str, Any]:
    """The record of some programs over the same parameters and state."""
    made = _Bundle(limits)
    for compiled in programs.values():
        made.hold(compiled)
    found = {name: made.program(name, compiled) for name, compiled in programs.items()}
    return {
        "version": VERSION,
        "limits": asdict(limits),
        "shaders": {name: text for text, name in made.shaders.items()},
        "arenas": [{"name": name, "bytes": size} for name, size in made.arenas.items()],
        "values": made.values,
        "programs": found,
    }


def role_of(graph: Graph, leaf: str) -> str:
    """parameter, state or input; what is only written is state, and the random key is given."""
    at = graph.leaves.get(leaf)
    if at is None or leaf == RANDOM:
        return "state" if at is None else "input"
    return graph.nodes[at].op.name


class _Bundle:
    def __init__(self, limits: WebGpuLimits):
        self.limits = limits
        self.arenas: dict[str, int] = {}  # bytes so far
        self.values: dict[str, dict[str, Any]] = {}
        self.shaders: dict[str, str] = {}  # names by text

    def hold(self, compiled: Compiled) -> None:
        """Places for parameters and state, of all programs together."""
        for name, _, type_ in compiled.plan.leaves:
            role = role_of(compiled.graph, name)
            if role != "input" and name not in self.values:
                self._add(name, "values", type_, role)

    def _add(
        self, name: str, stem: str, type_: TensorType, role: str, nbytes: int | None = None
    ) -> dict[str, Any]:
        """A value in the first arena of its stem that has room."""
        size = type_.size * WORD if nbytes is None else nbytes
        padded = -(-max(WORD, size) // ALIGNMENT) * ALIGNMENT
        most, count = self.limits.binding_bytes, 0
        while self.arenas.get(f"{stem}{count}", 0) + padded > most:
            count += 1
            if padded > most:
                cause = f"{name} needs {size:,} bytes, and a binding has at most {most:,}"
                raise OutOfMemoryError("bundle", cause, "Use a smaller batch or model.")
        arena = f"{stem}{count}"
        start = self.arenas.get(arena, 0)
        self.arenas[arena] = start + padded
        found: dict[str, Any] = {"arena": arena, "offset": start, "bytes": size}
        found |= {"dtype": type_.dtype.name, "shape": list(type_.shape), "role": role}
        self.values[name] = found
        return found

    def program(self, name: str, compiled: Compiled) -> dict[str, Any]:
        plan, graph = compiled.plan, compiled.graph
        by_slot: dict[int, str] = {}
        inputs: dict[str, str] = {}
        for leaf, slot, type_ in plan.leaves:
            by_slot[slot] = leaf
            if role_of(graph, leaf) == "input":
                by_slot[slot] = inputs[leaf] = f"{name}/{leaf}"
                self._add(by_slot[slot], f"{name}/own", type_, "input")
        for slot, constant in ((c.slot, c.name) for c in plan.constants):
            words = as_words(compiled.constants[constant])
            by_slot[slot] = f"{name}/constant {constant}"
            type_ = _words_type(words.size)
            value = self._add(by_slot[slot], f"{name}/own", type_, "constant")
            value["initial"] = base64.b64encode(words.tobytes()).decode()
        outputs = list[dict[str, str]]()
        for output in plan.outputs:
            if output.slot not in by_slot:
                by_slot[output.slot] = f"{name}/{output.kind.value}:{output.name}"
                nbytes = plan.slots[output.slot].nbytes
                own = by_slot[output.slot], f"{name}/own", output.type, "output", nbytes
                self._add(*own)
            if output.kind is not OutputKind.UPDATE:
                kind, value_name = output.kind.value, by_slot[output.slot]
                outputs.append({"kind": kind, "name": output.name, "value": value_name})
        sizes, places = scratch_places(plan, self.limits.binding_bytes)
        for i, size in enumerate(sizes):
            part = f"{name}/scratch {i}"
            self._add(part, f"{name}/scratch {i}.", _words_type(size // WORD), "scratch", size)
        return {
            "inputs": inputs,
            "outputs": outputs,
            "updates": [by_slot[slot] for leaf, slot, _ in plan.leaves if leaf in plan.updated],
            "launches": self._launches(name, compiled, by_slot, places),
        }

    def _launches(
        self,
        name: str,
        compiled: Compiled,
        by_slot: Mapping[int, str],
        inside: Mapping[int, Place],
    ) -> list[dict[str, Any]]:
        arenas, places = list(self.arenas), list[Place]()
        for i in range(len(compiled.plan.slots)):
            part, offset = inside.get(i, (0, 0))
            value = self.values.get(by_slot.get(i, f"{name}/scratch {part}"))
            where = (arenas.index(value["arena"]), value["offset"] + offset) if value else (0, 0)
            places.append(where)
        found = list[dict[str, Any]]()
        for d in dispatches(compiled.plan, compiled.shaders, places):
            if len(d.arenas) > self.limits.storage_buffers:
                cause = f"{name} binds {len(d.arenas)} arenas at once"
                raise OutOfMemoryError("bundle", cause, "Use a smaller batch or model.")
            text = module(compiled.shaders[d.entry], d.bindings)
            shader = self.shaders.setdefault(text, f"kernel_{len(self.shaders)}")
            launch = {"shader": shader, "arenas": [arenas[a] for a in d.arenas]}
            found.append(launch | {"workgroups": list(d.workgroups), "arguments": d.words.tolist()})
        return found


def _words_type(count: int) -> TensorType:
    return TensorType((count,), dtypes.uint32)
