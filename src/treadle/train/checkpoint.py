"""Checkpoints: everything that training depends on, kept so that nothing is lost.

A checkpoint is a directory with a safetensors file for each step and a manifest. It is written
aside, flushed to the disk and renamed, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treadle.base.errors import ArgumentError, CheckpointError, CheckpointWarning, LoadError
from treadle.distributed.environment import launched_rank
from treadle.metrics.direction import DIRECTIONS, Direction, checked_direction
from treadle.runtime.files import as_path
from treadle.step.loading import model_values
from treadle.step.train_step import TrainStep
from treadle.train.folder import (
    Digest,
    FolderLock,
    delete_entry,
    delete_leftovers,
    lock_folder,
    new_entry,
    write_file,
)
from treadle.train.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    Ranking,
    StepRecord,
    as_json,
    check_files,
    finite_metrics,
    read_manifest,
    versions,
)
from treadle.train.not_finite import not_finite_error
from treadle.train.packing import ARRAYS, file_name, pack, unpack
from treadle.train.restoring import (
    Restored,
    State,
    Steps,
    Target,
    load_states,
    read_states,
    steps_by_name,
    stopped,
    targets_by_name,
)
from treadle.train.together import Contents, contents_of, write_together
from treadle.train.world import World

_ENTRY = re.compile(r"(\d{6,})-step-\d+")
LOOKS = 3  # at a folder whose writer deletes what is being read


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is there: where, how far training was, and what was saved beside it."""

    path: Path
    number: int  # in the order of writing
    records: Mapping[str, StepRecord]
    metrics: Mapping[str, float | None]
    extra: Any

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that were saved beside the steps."""
        names = read_manifest(self.path).files
        return unpack(self.path, ARRAYS, names) if _has(names, ARRAYS) else {}

    def params(self, name: str | None = None) -> dict[str, np.ndarray]:
        """Parameters and states of the model, without the optimizer's; every byte is checked.

        `name` is that of the step, where several were saved together.
        """
        own = name or next(iter(self.records))
        if own not in self.records:
            known = ", ".join(self.records)
            raise ArgumentError("params", f"there is no step {name!r}", f"There are: {known}.")
        try:
            manifest = read_manifest(self.path)
            check_files(self.path, manifest)
            return model_values(unpack(self.path, own, manifest.files))
        except (DamagedError, LoadError) as error:
            cause = f"{self.path} is damaged: {error}"
            raise CheckpointError("params", cause, "Use another checkpoint.") from error

    @property
    def count(self) -> int:
        """Updates done; of the first step, where there are several."""
        return next(iter(self.records.values())).count

    @property
    def micro_step(self) -> int:
        """Micro-batches accumulated since the last update."""
        return next(iter(self.records.values())).micro_step

    @property
    def fingerprint(self) -> str:
        """A hash of the graph, device and precision it was written under."""
        return next(iter(self.records.values())).fingerprint

    @staticmethod
    def of(path: Path, manifest: Manifest) -> Checkpoint:
        found = _ENTRY.fullmatch(path.name)
        number = int(found[1]) if found else 0
        return Checkpoint(path, number, manifest.records, manifest.metrics, manifest.extra)


class Read(NamedTuple):
    """What a checkpoint holds, and which damaged ones were passed over."""

    path: Path
    manifest: Manifest
    states: dict[str, State]
    passed: dict[str, str]


class CheckpointManager:
    """Writes checkpoints of a step to a folder, keeps the last and the best, finds one to go on.

    `keep_last` of them stay (None: all), and beside them the `keep_best` best by `metric`. `mode`
    is "min" or "max"; known metrics such as "val/loss" and "val/accuracy" need none. Both are
    written with the checkpoints: a manager without them takes those of the folder, else "loss".
    `compress=True` writes gzip files, which takes longer. One process writes to a folder: it is
    locked until `close`, or the end of the process. `read_only=True` reads beside a writer.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = 3,
        keep_best: int = 1,
        metric: str | None = None,
        mode: Direction | None = None,
        compress: bool = False,
        read_only: bool = False,
    ):
        if metric is not None and not isinstance(metric, str):
            cause = f"metric = {metric!r}"
            raise ArgumentError("CheckpointManager", cause, 'One name: "val/loss".')
        if keep_last is not None and keep_last < 1:
            raise ArgumentError("CheckpointManager", f"keep_last = {keep_last}", "At least 1.")
        if keep_best < 0 or mode not in (None, *DIRECTIONS):
            cause = f"keep_best = {keep_best}, mode = {mode!r}"
            raise ArgumentError("CheckpointManager", cause, 'Not negative; "min" or "max".')
        self.folder = as_path("CheckpointManager", folder)
        self.keep_last, self.keep_best = keep_last, keep_best
        self._metric, self._mode, self.compress = metric, mode, compress
        self._default = "loss"
        self._damaged: set[str] = set()  # found to be so while restoring
        self._reads_only = read_only
        # Of ranks that train together the first writes; one that trains alone locks when it does.
        waits = read_only or launched_rank() > 0
        self._lock: FolderLock | None = None if waits else self._locked()
        if not read_only and keep_best:
            try:
                self._ranking()
            except ArgumentError:
                self.close()
                raise

    def _locked(self) -> FolderLock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(self.folder)
            with lock.turn:
                delete_leftovers(self.folder)
        except OSError as error:
            raise CheckpointError(
                "CheckpointManager",
                f"{self.folder} cannot be written to: {error.strerror}",
                "Use another folder, or read_only=True to read from this one.",
            ) from error
        return lock

    @property
    def metric(self) -> str:
        """What the best is by."""
        return self._ranking().metric

    @property
    def mode(self) -> str:
        """Whether small or large is good: "min" or "max"."""
        return self._ranking().mode

    def rank_by_default(self, metric: str) -> None:
        """Go by this metric where neither the user nor the folder says another."""
        self._default = metric

    def _ranking(self) -> Ranking:
        """As the user says, else as the last checkpoint says, else as the metric's name says."""
        there = self._stored_ranking()
        is_chosen = there is not None and there.metric != "loss"  # which is what nobody chose
        metric = self._metric or (there.metric if there and is_chosen else self._default)
        is_same = there is not None and there.metric == metric
        mode = self._mode or (there.mode if there and is_same else None)
        return Ranking(metric, checked_direction("CheckpointManager", metric, mode))

    def _stored_ranking(self) -> Ranking | None:
        for path in reversed(self._numbers().values()):
            with contextlib.suppress(DamagedError, CheckpointError):
                return read_manifest(path).ranking
        return None

    def close(self) -> None:
        """Let others write to the folder."""
        self._lock, self._reads_only = None, True

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        step: Steps,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: object = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint of a step, or of several by name; then delete those not kept.

        `extra` is JSON of your own, such as the position in the data, and `arrays` are arrays of
        your own. If it fails, the step and the checkpoints before are as they were. A step whose
        values are no longer finite is refused by a `NotFiniteError`.
        """
        steps = steps_by_name(step)
        values, wanted = finite_metrics(metrics or {}), self.metric
        if values and self.keep_best and wanted not in values:
            cause = f"metrics has {', '.join(values)}, but the best is by {wanted!r}"
            raise ArgumentError("save", cause, "Pass it, or make the manager with another metric.")
        own = as_json(extra)
        world = World.of(steps.values())
        if not world.is_alone:
            return self._save_together(world, steps, values, own, arrays or {})
        with self._turn():
            try:
                checkpoint = self._write(steps, values, own, arrays or {})
            except OSError as error:
                raise CheckpointError(
                    "save",
                    f"a checkpoint cannot be written to {self.folder}: {error.strerror}",
                    "The step and the checkpoints before are as they were.",
                ) from error
            self._prune()
        return checkpoint

    def _save_together(
        self,
        world: World,
        steps: Mapping[str, TrainStep],
        metrics: dict[str, float | None],
        extra: object,
        arrays: Mapping[str, np.ndarray],
    ) -> Checkpoint:
        """Every rank its chunk, the first one the rest; all or nothing, on every rank."""
        with contextlib.ExitStack() as stack:
            world.agreed(
                "save", lambda: stack.enter_context(self._turn()) if world.writes else None
            )
            contents = contents_of(world, steps, arrays)
            self._refuse_wrong(world, steps, contents)
            name = world.first(self._next_name(contents.records))

            def manifest_of(files: dict[str, Digest]) -> Manifest:
                now, ranking = versions(), self._ranking()
                found = contents.records, files, metrics, extra, now, ranking, contents.chunks
                return Manifest(*found)

            write_together(world, self.folder, name, contents, self.compress, manifest_of)
            world.agreed("save", lambda: self._prune() if world.writes else None)
        path = self.folder / name
        return world.agreed("save", lambda: Checkpoint.of(path, read_manifest(path)))

    def _refuse_wrong(
        self, world: World, steps: Mapping[str, TrainStep], contents: Contents
    ) -> None:
        """What is not finite on any rank is refused on all of them."""
        for rank, told in enumerate(world.told(contents.wrong)):
            for name, wrong in told:
                if wrong:
                    last, where = self.latest(), f" on rank {rank}"
                    raise not_finite_error(
                        "save", tuple(wrong), steps[name].count, last, None, where
                    )

    def _next_name(self, records: Mapping[str, StepRecord]) -> str:
        number = max(self._numbers(), default=0) + 1
        return f"{number:06d}-step-{next(iter(records.values())).count}"

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """While this process, and this thread of it, may write."""
        if self._lock is None and not self._reads_only:
            self._lock = self._locked()
        if self._lock is None:
            raise CheckpointError("save", "the manager is closed or was made with read_only=True")
        if not self._lock.is_ours:
            raise CheckpointError(
                "save", "this process was forked from the one that writes", "Save there."
            )
        with self._lock.turn:
            yield

    def _write(
        self,
        steps: Mapping[str, TrainStep],
        metrics: dict[str, float | None],
        extra: object,
        arrays: Mapping[str, np.ndarray],
    ) -> Checkpoint:
        with stopped(steps):
            records = {name: StepRecord.of(step) for name, step in steps.items()}
            states = {name: step.state_dict() for name, step in steps.items()}
        self._check_finite(steps, states)
        if arrays:
            states[ARRAYS] = dict(arrays)
        name = self._next_name(records)
        with new_entry(self.folder, name) as aside:
            files = {}
            for own, state in states.items():
                file = file_name(own, self.compress)
                files[file] = write_file(aside / file, pack(own, state, self.compress))
            manifest = Manifest(records, files, metrics, extra, versions(), self._ranking())
            write_file(aside / MANIFEST, manifest.encode())
        return Checkpoint.of(self.folder / name, manifest)

    def _check_finite(self, steps: Mapping[str, TrainStep], states: Mapping[str, State]) -> None:
        """What is kept can be gone on from."""
        for name, step in steps.items():
            wrong = step.not_finite(states[name])
            if wrong:
                raise not_finite_error("save", wrong, step.count, self.latest())

    def _numbers(self) -> dict[int, Path]:
        """The entries of the folder, readable or not, in the order of writing."""
        if not self.folder.is_dir():
            return {}
        matches = [(p, _ENTRY.fullmatch(p.name)) for p in self.folder.iterdir()]
        return dict(sorted((int(m[1]), p) for p, m in matches if m is not None))

    def list(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that are not known to be damaged, in the order of writing.

        Manifests and the lengths of files are looked at; only `restore` reads every byte.
        """
        found = []
        for path in self._numbers().values():
            with contextlib.suppress(DamagedError, CheckpointError):
                if path.name not in self._damaged:
                    found.append(Checkpoint.of(path, read_manifest(path)))
        return tuple(found)

    def best(self) -> Checkpoint | None:
        """The best by the metric, of those that have it."""
        ranked = self._ranked(self.list())
        return ranked[0] if ranked else None

    def latest(self) -> Checkpoint | None:
        """The last that was written."""
        found = self.list()
        return found[-1] if found else None

    def _ranked(self, found: tuple[Checkpoint, ...]) -> tuple[Checkpoint, ...]:
        """Those with the metric, best first; of equals the older."""
        ranking = self._ranking()
        sign = 1.0 if ranking.mode == "min" else -1.0
        values = {c.number: c.metrics.get(ranking.metric) for c in found}
        known = [(sign * v, n) for n, v in values.items() if v is not None]
        by_number = {c.number: c for c in found}
        return tuple(by_number[n] for _, n in sorted(known))

    def _prune(self) -> None:
        """Only what can be read is counted, and only that is deleted."""
        found = self.list()
        if self.keep_last is None:
            return
        kept = {c.number for c in found[-self.keep_last :]}
        kept |= {c.number for c in self._ranked(found)[: self.keep_best]}
        for checkpoint in found:
            if checkpoint.number not in kept:
                try:
                    delete_entry(self.folder, checkpoint.path.name)
                except OSError as error:
                    cause = f"{checkpoint.path} cannot be deleted: {error.strerror}"
                    warnings.warn(cause, CheckpointWarning, stacklevel=3)

    def restore(self, step: Target, which: str | Path = "auto") -> Checkpoint | None:
        """Continue a step, or several by name, exactly where a checkpoint was written.

        A forward takes the parameters and states of the model, and nothing of the optimizer.
        `which` is "auto" (the latest; None if there is none), "latest", "best", or a path or name.
        A damaged one is passed over with a warning, unless it was asked for by name. If it fails,
        the step is as it was.
        """
        steps = targets_by_name(step)
        world = World.of(steps.values())
        found = self._found(steps, which) if world.is_alone else self._same(world, steps, which)
        if found is None:
            return None
        load_states(found.path, found.manifest, found.states, steps)
        if world.writes:
            _warn_passed(found.passed, found.path)
        return Checkpoint.of(found.path, found.manifest)

    def _same(self, world: World, steps: Mapping[str, Restored], which: str | Path) -> Read | None:
        """What the first rank chooses, read by every rank."""
        found = world.agreed("restore", lambda: self._found(steps, which) if world.writes else None)
        chosen = world.first(None if found is None else str(found.path))
        if chosen is None:
            return None
        path = Path(chosen)
        return world.agreed("restore", lambda: found or Read(path, *read_states(path, steps), {}))

    def _found(self, steps: Mapping[str, Restored], which: str | Path) -> Read | None:
        """The checkpoint to go on from, every byte of it checked."""
        if which not in ("auto", "latest", "best"):
            return self._named(steps, as_path("restore", which))
        candidates: tuple[Path, ...] = ()
        for _ in range(LOOKS):
            candidates, passed = self._candidates(str(which))
            for path in candidates:
                try:
                    manifest, states = read_states(path, steps)
                except DamagedError as error:
                    if path.exists():  # else its writer has deleted it since we looked
                        passed[path.name] = str(error)
                        self._damaged.add(path.name)
                    continue
                return Read(path, manifest, states, passed)
            if passed:
                cause = "; ".join(f"{name}: {error}" for name, error in passed.items())
                raise CheckpointError(
                    "restore", f"every checkpoint in {self.folder} is damaged: {cause}"
                )
        if which == "auto" and not candidates:
            return None
        cause = f" with the metric {self.metric!r}" if which == "best" else ""
        raise CheckpointError("restore", f"there is no checkpoint{cause} in {self.folder}")

    def _candidates(self, which: str) -> tuple[tuple[Path, ...], dict[str, str]]:
        """Where to look, the wanted one first; and what cannot even be ranked."""
        paths = tuple(self._numbers().values())
        if which != "best":
            return paths[::-1], {}
        found, passed = [], {}
        for path in paths:
            try:
                found.append(Checkpoint.of(path, read_manifest(path)))
            except DamagedError as error:
                passed[path.name] = str(error)
        return tuple(c.path for c in self._ranked(tuple(found))), passed

    def _named(self, steps: Mapping[str, Restored], given: Path) -> Read:
        path = given if given.exists() else self.folder / given
        if not path.exists():
            raise CheckpointError(
                "restore",
                f"there is no checkpoint {str(given)!r} in {self.folder}",
                'Use "auto", "latest", "best" or the path of one.',
            )
        try:
            manifest, states = read_states(path, steps)
        except DamagedError as error:
            cause = f"{path} is damaged: {error}"
            raise CheckpointError("restore", cause, '"latest" finds one that is not.') from error
        return Read(path, manifest, states, {})


def _has(files: Mapping[str, object], name: str) -> bool:
    return any(file_name(name, packed) in files for packed in (False, True))


def _warn_passed(passed: Mapping[str, str], used: Path) -> None:
    for name, error in passed.items():
        cause = f"checkpoint {name} is damaged: {error}; {used.name} is used instead"
        warnings.warn(cause, CheckpointWarning, stacklevel=3)
