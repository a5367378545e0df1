"""What a checkpoint says about itself: JSON with checksums, read without trust."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, CheckpointError
from treadle.ir.graph import Graph
from treadle.ir.text import to_text
from treadle.metrics.direction import DIRECTIONS
from treadle.step.train_step import TrainStep
from treadle.train.folder import Digest, digest_of

MANIFEST = "manifest.json"
KIND, SCHEMA = "treadle checkpoint", 1
CHUNKED = 2  # the schema of checkpoints that several ranks wrote
KNOWN = (SCHEMA, CHUNKED)
_CALLED = re.compile(r'(= call\([^"]*)name="(?:[^"\\]|\\.)*"')  # in the text of a graph


class DamagedError(Exception):
    """A checkpoint that is not what was written; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """How far a step was, and the plan it ran by."""

    count: int  # updates
    micro_step: int
    plan: dict[str, Any]

    @staticmethod
    def of(step: TrainStep) -> StepRecord:
        return StepRecord(step.count, step.micro_step, plan_of(step))

    @property
    def fingerprint(self) -> str:
        """A hash of the plan: equal plans give equal bits."""
        return hashlib.sha256(canonical(self.plan)).hexdigest()


@dataclass(frozen=True, slots=True)
class Ranking:
    """What the best checkpoint is by."""

    metric: str
    mode: str  # one of DIRECTIONS


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the ranks that wrote a step had in rows: how many ranks and rows, and whole shapes."""

    ranks: int
    shards: int
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything beside the arrays."""

    records: dict[str, StepRecord]
    files: dict[str, Digest]
    metrics: dict[str, float | None]
    extra: Any
    versions: dict[str, str]
    ranking: Ranking | None  # None: written before it was kept here
    chunks: dict[str, Chunks] = field(default_factory=dict)  # of steps that ranks had in parts

    def encode(self) -> bytes:
        steps = {n: asdict(r) | {"fingerprint": r.fingerprint} for n, r in self.records.items()}
        body = {
            "kind": KIND,
            "schema": CHUNKED if self.chunks else SCHEMA,
            "versions": self.versions,
            "steps": steps,
            "files": {name: asdict(digest) for name, digest in self.files.items()},
            "metrics": self.metrics,
            "extra": self.extra,
        }
        if self.ranking is not None:
            body["ranking"] = asdict(self.ranking)
        if self.chunks:
            body["chunks"] = {name: asdict(chunks) for name, chunks in self.chunks.items()}
        body["checksum"] = checksum(body)
        return json.dumps(body, indent=1, allow_nan=False).encode()


def plan_of(step: TrainStep) -> dict[str, Any]:
    """What decides the bits of a step, on one machine and with the same versions."""
    recipe = step.recipe
    return {
        "device": step.report.device,
        "precision": recipe.precision.name,
        "accumulate": recipe.accumulate,
        "graph": _graph_hash(step.graph, recipe.prefix),
    }


@lru_cache(maxsize=4)
def _graph_hash(graph: Graph, prefix: str) -> str:
    """Of the graph's text, with the names that any step of this kind has.

    What functions are called, that of the loss and those that are computed again, decides nothing.
    """
    text = to_text(replace(graph, name="step")).replace(f'"{prefix}', '"step:')
    text = _CALLED.sub(r'\1name=""', text)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """What else decides the bits."""
    return {"treadle": sys.modules["treadle"].__version__, "numpy": np.__version__}


def canonical(value: object) -> bytes:
    """The JSON that hashes are of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def checksum(body: Mapping[str, object]) -> str:
    """Of a manifest without its own checksum. Every schema has this rule."""
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return hashlib.sha256(canonical(rest)).hexdigest()


def as_json(extra: object) -> object:
    """What reading will give back; anything that JSON has no place for is refused."""
    try:
        return json.loads(canonical(extra))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "save",
            f"extra is not JSON: {error}",
            "Use dicts with string keys, lists, strings, finite numbers, True, False and None.",
        ) from error


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON has them: None where they are not finite."""
    values = {name: float(value) for name, value in metrics.items()}
    return {name: v if math.isfinite(v) else None for name, v in values.items()}


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, whose files are all there with the right length."""
    body = _body(path)
    try:
        manifest = _manifest(body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # A checksum is no signature: whoever writes a manifest can write a fitting one.
        raise DamagedError(f"{MANIFEST} has no sense: {error!r}") from error
    for name, digest in manifest.files.items():
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise DamagedError(f"it names the file {name!r}, which is not in it")
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{name} cannot be read: {error.strerror}") from error
        if found != digest.bytes:
            raise DamagedError(f"{name} has {found} bytes, not {digest.bytes}")
    return manifest


def _manifest(body: Mapping[str, Any]) -> Manifest:
    """What a body says; DamagedError, or what Python raises, where it says something else."""
    manifest = Manifest(
        {n: _record(r) for n, r in body["steps"].items()},
        {n: Digest(_count(d["bytes"]), str(d["sha256"])) for n, d in body["files"].items()},
        {n: None if v is None else float(v) for n, v in body["metrics"].items()},
        body["extra"],
        {n: str(v) for n, v in body["versions"].items()},
        _ranking(body.get("ranking")),
        {n: _chunks(n, c) for n, c in body.get("chunks", {}).items()},
    )
    if not manifest.records:
        raise DamagedError(f"{MANIFEST} is of no step")
    return manifest


def _count(given: object) -> int:
    if type(given) is not int or given < 0:
        raise DamagedError(f"{MANIFEST} has {given!r} where a count belongs")
    return given


def _ranking(given: object) -> Ranking | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("mode") not in DIRECTIONS:
        raise DamagedError(f"{MANIFEST} has the ranking {given!r}")
    return Ranking(str(given.get("metric")), given["mode"])


def _chunks(name: str, given: Any) -> Chunks:
    found: dict[str, Any] = given if isinstance(given, dict) else {}
    ranks, shards, shapes = (found.get(key) for key in ("ranks", "shards", "shapes"))
    sizes = [n for shape in shapes.values() for n in shape] if isinstance(shapes, dict) else [-1]
    is_right = all(isinstance(n, int) and n >= 0 for n in (ranks, shards, *sizes))
    if not is_right or not 1 <= int(ranks or 0) <= int(shards or 0):
        raise DamagedError(f"{MANIFEST} has chunks of {name} that make no sense")
    whole = {str(n): tuple(shape) for n, shape in (shapes or {}).items()}
    return Chunks(int(ranks or 0), int(shards or 0), whole)


def _record(given: Mapping[str, Any]) -> StepRecord:
    return StepRecord(_count(given["count"]), _count(given["micro_step"]), dict(given["plan"]))


def _body(path: Path) -> dict[str, Any]:
    try:
        body = json.loads((path / MANIFEST).read_bytes())
        is_object = isinstance(body, dict) and body.get("kind") == KIND
        expected = checksum(body) if is_object else None
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is not JSON: {error}") from error
    if expected is None:
        raise DamagedError(f"{MANIFEST} is not a checkpoint's")
    schema = body.get("schema")
    if body.get("checksum") != expected:
        says = f" (and says schema {schema}, not {SCHEMA})" if schema not in KNOWN else ""
        raise DamagedError(f"{MANIFEST} does not match its checksum{says}")
    if schema not in KNOWN:
        raise CheckpointError(
            "restore",
            f"{path} has schema {schema}, this version reads {SCHEMA} and {CHUNKED}",
            "Use the version of Treadle that wrote it, or a newer one.",
        )
    return body


def check_files(path: Path, manifest: Manifest) -> None:
    """Every byte against the checksums."""
    for name, digest in manifest.files.items():
        try:
            found = digest_of(path / name)
        except OSError as error:
            raise DamagedError(f"{name} cannot be read: {error.strerror}") from error
        if found != digest:
            raise DamagedError(f"{name} does not match its checksum")


def differences(then: StepRecord, now: StepRecord) -> list[str]:
    """What is another plan now, in words."""
    return [
        "the graph differs" if key == "graph" else f"{key} was {then.plan.get(key)}, is {value}"
        for key, value in now.plan.items()
        if then.plan.get(key) != value
    ]
