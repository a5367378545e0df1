"""How WebGPU runs the entries of a plan: a shader for each, and its launches.

Every element takes a word of four bytes, but for float16 where the target has it. An arena is a
part of a device's buffer that one binding can have; a launch binds the arenas that its calls touch.
A shader's text says `memory3` for the arena of the kernel's fourth buffer: which binding that is
depends on where buffers lie.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.kernel.plan import Plan, PlannedPhase, PlannedStep

MOST_WORKGROUPS = 65535  # along one dimension: what every device takes
Place = tuple[int, int]  # an arena, and bytes from its start
WORDS, FLOATS, HALVES, PACKS = "u32", "f32", "f16", "vec4<f16>"  # what a binding is an array of
# float16 by way of its bits, in which `zero` changes nothing, as no compiler knows: some leave a
# conversion there and back away, as NVIDIA's seems to (docs/decisions.md).
BY_DEVICE = "unpack2x16float(pack2x16float(vec2<f32>(x, 0.0f)) ^ zero).x"
AS_DEVICE = "rounds_as_device"  # a constant of pipelines: whether its float16 are rounded rightly
ELEMENT_BYTES = {WORDS: 4, FLOATS: 4, HALVES: 2, PACKS: 8}


@dataclass(frozen=True, slots=True)
class Shader:
    """A kernel's text, and the shape of its launches."""

    text: str
    blocks: int  # workgroups of one call
    buffers: int
    calls: int  # of one launch, at most
    elements: tuple[str, ...] = ()  # how the shader sees each buffer; () for words alone

    def element(self, buffer: int) -> str:
        return self.elements[buffer] if self.elements else WORDS

    @property
    def words(self) -> int:
        """Of a call's arguments."""
        return 4 * max(1, -(-self.buffers // 4))

    def workgroups(self, calls: int) -> tuple[int, int, int]:
        """Of a launch of some calls, along each dimension."""
        across = max(1, min(self.blocks, MOST_WORKGROUPS))
        return across, -(-self.blocks // across), calls


_MEMORY = re.compile(r"\bmemory(\d+)\b")


def module(shader: Shader, bindings: Sequence[int]) -> str:
    """A kernel's text as a module; `bindings` says for each buffer which one it lies in."""
    own = _MEMORY.sub(lambda found: f"arena{bindings[int(found[1])]}", shader.text)
    types = {b: shader.element(i) for i, b in enumerate(bindings)}
    bound = [
        f"@group(0) @binding({i}) var<storage, read_write> arena{i}: array<{types[i]}>;"
        for i in range(max(bindings, default=-1) + 1)
    ]
    enabled = [line for line in own.splitlines() if line.startswith("enable ")]
    rest = own.removeprefix("".join(f"{line}\n" for line in enabled))
    return "\n".join([*enabled, *bound, rest])


def scratch_places(plan: Plan, most: int) -> tuple[list[int], dict[int, Place]]:
    """What is between inputs and outputs in arenas of at most so many bytes: sizes, and places.

    Buffers of one part of the plan's arena keep their distances: those that live at the same time
    do not overlap. One that reaches far beyond its part has an arena of its own.
    """
    inside = {i: slot for i, slot in enumerate(plan.slots) if slot.offset >= 0}
    part = most if plan.arena <= most else most // 2 // 256 * 256
    sizes, places, arenas = list[int](), dict[int, Place](), dict[object, int]()
    for i, slot in inside.items():
        at = slot.offset % part
        is_far = at + slot.nbytes > most
        key: object = ("alone", i) if is_far else slot.offset // part
        if key not in arenas:
            arenas[key] = len(sizes)
            sizes.append(0)
        place = arenas[key], 0 if is_far else at
        places[i] = place
        sizes[place[0]] = max(sizes[place[0]], place[1] + slot.nbytes)
    return sizes, places


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Calls of one kernel that do not depend on each other, as one launch."""

    entry: int
    arenas: tuple[int, ...]  # that are bound, in order
    bindings: tuple[int, ...]  # for each buffer of the kernel, which of them has it
    words: np.ndarray  # where each buffer of each call starts, as the shader reads it
    workgroups: tuple[int, int, int]


def dispatches(
    plan: Plan, shaders: Sequence[Shader], places: Sequence[Place]
) -> Iterator[Dispatch]:
    """All launches of a run in order; `places` has every slot of the plan."""
    yield from _steps(plan.steps, shaders, places, 0)


def _steps(
    steps: Sequence[PlannedStep], shaders: Sequence[Shader], places: Sequence[Place], iteration: int
) -> Iterator[Dispatch]:
    for step in steps:
        if isinstance(step, PlannedPhase):
            yield from _phase(step, shaders, places, iteration)
        else:
            iterations = range(step.length)
            for i in reversed(iterations) if step.reverse else iterations:
                yield from _steps(step.steps, shaders, places, i)


def _phase(
    phase: PlannedPhase, shaders: Sequence[Shader], places: Sequence[Place], iteration: int
) -> Iterator[Dispatch]:
    """Calls of a kernel whose buffers lie in the same arenas go together."""
    alike: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}
    for call in phase.calls:
        found = [places[slot] for slot in call.slots]
        starts = [at + row * iteration for (_, at), row in zip(found, call.rows, strict=True)]
        alike.setdefault((call.entry, tuple(a for a, _ in found)), []).append(starts)
    for (entry, arenas), calls in alike.items():
        shader = shaders[entry]
        if not shader.blocks:
            continue
        typed = [(a, shader.element(i)) for i, a in enumerate(arenas)]  # each has one type
        bound = list(dict.fromkeys(typed))
        bindings = tuple(map(bound.index, typed))
        for first in range(0, len(calls), shader.calls):
            some = calls[first : first + shader.calls]
            words = np.zeros((len(some), shader.words), np.uint32)
            for i, starts in enumerate(some):
                words[i, : len(starts)] = [
                    at // ELEMENT_BYTES[shader.element(b)] for b, at in enumerate(starts)
                ]
            yield Dispatch(
                entry,
                tuple(arena for arena, _ in bound),
                bindings,
                words.reshape(-1),
                shader.workgroups(len(some)),
            )
