"""Which processor to compile for, out of an option, the environment and the processor itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treadle.base.errors import DeviceError
from treadle.kernel.machine import (
    ARM64,
    LEVELS,
    NATIVE,
    Machine,
    features_in,
    features_of,
    target_name,
)

VARIABLE = "TREADLE_TARGET"


@dataclass(frozen=True, slots=True)
class Target:
    """A processor that is compiled for, as LLVM names it, and what code uses of it."""

    name: str
    cpu: str
    features: str
    machine: Machine

    @property
    def width(self) -> int:
        """Lanes of float32."""
        return self.machine.width


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor of this process, in LLVM's words."""

    triple: str
    cpu: str
    features: Mapping[str, bool]

    @property
    def is_x86(self) -> bool:
        return self.triple.startswith("x86_64")

    def has(self, feature: str) -> bool:
        return bool(self.features.get(feature))

    @property
    def flat_features(self) -> str:
        """As LLVM takes them: all that it has and all that it has not."""
        return ",".join(f"{'+' if has else '-'}{name}" for name, has in self.features.items())


def named_target(given: str | int, environment: Mapping[str, str] | None = None) -> str:
    """The name of a target: the option's, or the environment's where the option is the default."""
    name = target_name(given)
    if features_in(name):
        cause = f"{name!r} asks for features of WebGPU"
        raise DeviceError("target", cause, 'Use device="webgpu", or leave them out.')
    found = (os.environ if environment is None else environment).get(VARIABLE, "").strip()
    return target_name(found, VARIABLE) if name == NATIVE and found else name


def target_of(name: str, processor: Processor) -> Target:
    """A target by its name, which this processor can run."""
    if name in LEVELS:
        return _level(name, processor)
    if name == ARM64:
        return _arm64(processor)
    width = _lanes(processor) if name == NATIVE else int(name)
    machine = Machine(
        width,
        permutes=_permutes(width, processor.has),
        has_fma=not processor.is_x86 or processor.has("fma"),
        has_half=not processor.is_x86 or processor.has("f16c"),
        registers=_registers(processor, width),
    )
    return Target(name, processor.cpu, processor.flat_features, machine)


def _lanes(processor: Processor) -> int:
    return 16 if processor.has("avx512f") else 8 if processor.has("avx2") else 4


def _permutes(width: int, has: Callable[[str], bool]) -> int:
    """Numbers of a register in which lanes look others up; sixteen where vectors are as long."""
    if width == 16 and has("avx512f"):
        return 16
    return 8 if width % 8 == 0 and has("avx2") else 0


def _registers(processor: Processor, width: int) -> int:
    """Vectors of a width that registers hold: wide ones take several."""
    has_many = not processor.is_x86 or processor.has("avx512vl")
    return (32 if has_many else 16) // max(1, width // _lanes(processor))


def can_run(level: str, processor: Processor) -> bool:
    """Whether a processor has all that a level of x86-64 needs."""
    return processor.is_x86 and all(map(processor.has, features_of(level)))


def _level(name: str, processor: Processor) -> Target:
    remedy = f'Use "{NATIVE}" (the default; {VARIABLE} may say otherwise).'
    if not processor.is_x86:
        cause = f"{name} is a level of x86-64, and this machine is {processor.triple}"
        raise DeviceError("target", cause, remedy)
    needed = features_of(name)
    missing = [feature for feature in needed if not processor.has(feature)]
    if missing:
        cause = f"this processor ({processor.cpu}) cannot run {name}: it has no "
        raise DeviceError("target", cause + ", ".join(missing), remedy)
    machine = Machine(
        LEVELS[name][1],
        permutes=_permutes(LEVELS[name][1], needed.__contains__),
        has_fma="fma" in needed,
        has_half="f16c" in needed,
        registers=32 if "avx512vl" in needed else 16,
    )
    return Target(name, name, "", machine)


def _arm64(processor: Processor) -> Target:
    """What all processors of that name have in common."""
    if not processor.triple.startswith((ARM64, "aarch64")):
        cause = f"this machine is {processor.triple}"
        raise DeviceError("target", cause, f'Use "{NATIVE}" (the default).')
    return Target(ARM64, "generic", "+neon,+fp-armv8", Machine(4, registers=32))
