"""Programs in the plan cache: the key that tells them apart, and their parts as bytes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from treadle.backends.protocol import Built, Toolchain
from treadle.base.records import from_json, to_json
from treadle.base.version import __version__
from treadle.compile_report import CompileOptions
from treadle.ir.graph import Graph
from treadle.ir.text import to_text
from treadle.ir.types import TensorType
from treadle.kernel.plan import Plan, fits
from treadle.runtime.cache import fingerprint

Code = TypeVar("Code")

ROOT = Path(__file__).parents[1]
# Folders that make no part of a program out of its graph: everything else is in the key.
UNRELATED = frozenset(["cli", "data", "fuzz", "metrics", "serve", "train", "__pycache__"])
# Options that change which programs there are, not what is compiled for a graph; the target is in
# the key as what it stands for on this machine.
SHAPELESS = frozenset(
    [
        "on_new_shape",
        "max_shapes",
        "verify",
        "detect_anomaly",
        "target",
        "check_indices",
        "search",  # what it chose is in the target
        "seconds",
    ]
)


def key_of(graph: Graph, options: CompileOptions, toolchain: Toolchain[Any, Any]) -> str:
    """A hash of all that the code depends on."""
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in SHAPELESS}
    return fingerprint(
        [
            to_text(graph),
            repr(chosen),
            repr(toolchain.target),
            *toolchain.versions,
            __version__,
            own_sources(),
        ]
    )


@functools.cache
def own_sources() -> str:
    """Treadle's own files, so that a changed compiler has its own plans; read once a process."""
    return fingerprint_of(ROOT)


def fingerprint_of(root: Path) -> str:
    """A folder's modules by path, size and time."""
    return fingerprint(sorted(_modules(str(root), len(str(root)))))


def _modules(folder: str, start: int) -> Iterator[str]:
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith(".py"):
                stat = entry.stat()
                yield f"{entry.path[start:]} {stat.st_size} {stat.st_mtime_ns}"
            elif entry.name not in UNRELATED and entry.is_dir():
                yield from _modules(entry.path, start)


def packed(
    toolchain: Toolchain[Any, Code], built: Built[Code], program: Any
) -> Callable[[], dict[str, bytes]]:
    """What is stored of a program, made when it is asked for; that does not hold the program."""
    code = toolchain.pack(built.code, program)
    plan, constants, record = built.plan, built.constants, built.record
    return lambda: {
        "plan": to_json(plan).encode(),
        "record": record(),
        **{f"constant {name}": array.tobytes() for name, array in constants.items()},
        **code,
    }


def unpacked(
    toolchain: Toolchain[Any, Code], parts: Mapping[str, bytes] | None, graph: Graph
) -> Built[Code] | None:
    """What was packed for a graph; None for anything else, a constant of another size included."""
    if parts is None:
        return None
    try:
        plan = from_json(Plan, parts["plan"])
        constants = {c.name: _array(parts[f"constant {c.name}"], c.type) for c in plan.constants}
        code = toolchain.unpack(parts, plan)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    if code is None or not fits(plan, graph, constants):
        return None
    record = parts.get("record", b"")
    return Built(plan, constants, code, lambda: record)


def _array(data: bytes, type_: TensorType) -> np.ndarray:
    """The array of a type that was stored; ValueError if there are more or fewer bytes."""
    return np.frombuffer(data, np.uint8).view(type_.dtype.numpy).reshape(type_.shape)


def packed_objects(objects: Sequence[bytes]) -> dict[str, bytes]:
    """Machine code by number."""
    return {f"object {i}": code for i, code in enumerate(objects)}


def unpacked_objects(parts: Mapping[str, bytes]) -> tuple[bytes, ...]:
    """The machine code in order; LookupError if one is missing."""
    count = sum(name.startswith("object ") for name in parts)
    return tuple(parts[f"object {i}"] for i in range(count))
