"""From a checkpoint's files into steps, or into forwards, which take the model's values only."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from treadle.base.errors import ArgumentError, CheckpointError, CheckpointWarning, LoadError
from treadle.step.forward import Forward
from treadle.step.loading import model_values
from treadle.step.train_step import TrainStep
from treadle.train.chunks import read_state
from treadle.train.manifest import (
    DamagedError,
    Manifest,
    StepRecord,
    check_files,
    differences,
    read_manifest,
    versions,
)

Steps = TrainStep | Mapping[str, TrainStep]
Restored = TrainStep | Forward
Target = Restored | Mapping[str, Restored]
State = dict[str, np.ndarray]
SMALLEST, ROOM = 1 << 26, 16  # bytes, and a multiple of a step's own: chosen
ALONE = "step"  # the name of a step that is saved by itself
_STEP_NAME = re.compile(r"\w[\w-]*")


def steps_by_name(step: object) -> dict[str, TrainStep]:
    """What is saved: a step, or several by name."""
    given = _by_name(step)
    found = {name: own for name, own in given.items() if isinstance(own, TrainStep)}
    _check_all("save", given, found, "Pass a step, or a dict of steps.")
    return found


def targets_by_name(step: object) -> dict[str, Restored]:
    """What is restored: a step or forward, or several by name."""
    given = _by_name(step)
    found = {name: own for name, own in given.items() if isinstance(own, (TrainStep, Forward))}
    _check_all("restore", given, found, "Pass a step or a forward, or a dict of them.")
    return found


def _by_name(step: object) -> dict[str, object]:
    return dict(step) if isinstance(step, Mapping) else {ALONE: step}


def _check_all(
    operation: str, given: Mapping[str, object], found: Mapping[str, object], remedy: str
) -> None:
    wrong = [n for n in given if n not in found or not _STEP_NAME.fullmatch(str(n))]
    if wrong or not given:
        what = ", ".join(f"{n!r}: {type(given[n]).__name__}" for n in wrong) or "nothing"
        raise ArgumentError(operation, f"{what} is not a step by a plain name", remedy)


@contextlib.contextmanager
def stopped(steps: Mapping[str, Restored]) -> Iterator[None]:
    """While no thread runs one of the steps."""
    sessions = {id(s.session): s.session for s in steps.values()}
    with contextlib.ExitStack() as stack:
        for _, session in sorted(sessions.items()):
            stack.enter_context(session.lock)
        yield


def read_states(path: Path, names: Mapping[str, object]) -> tuple[Manifest, dict[str, State]]:
    """What a checkpoint holds of some steps, every byte of it checked.

    Steps must be those that were saved. Forwards may be some of them, and a single one is of a
    single step whatever its name.
    """
    manifest = read_manifest(path)
    check_files(path, manifest)
    records = manifest.records
    only_forwards = all(isinstance(n, Forward) for n in names.values())
    sources = {name: name for name in names}
    if only_forwards and list(names) == [ALONE] and len(records) == 1:
        sources = {ALONE: next(iter(records))}
    fits = set(sources.values()) <= records.keys()
    if not fits or not (only_forwards or len(names) == len(records)):
        raise CheckpointError(
            "restore",
            f"{path} is of {_listed(records)}, not of {_listed(names)}",
            "Pass the steps by the names they were saved with.",
        )
    try:
        return manifest, {
            n: read_state(path, own, manifest, _most_bytes(names[n])) for n, own in sources.items()
        }
    except LoadError as error:
        raise DamagedError(error.cause) from error


def _most_bytes(target: object) -> int | None:
    """Bytes that the file of a step may unpack to; None where that is not known.

    More than a step holds, so that the file of another optimizer is still read, and named.
    """
    if not isinstance(target, TrainStep) or target.session.sharded is not None:
        return None
    return max(SMALLEST, ROOM * target.session.nbytes)


def _listed(names: Mapping[str, object]) -> str:
    return "one step" if list(names) == [ALONE] else f"the steps {', '.join(names)}"


def load_states(
    path: Path, manifest: Manifest, states: Mapping[str, State], targets: Mapping[str, Restored]
) -> None:
    """Load all states, or none."""
    with stopped(targets):
        before = {name: _state(target) for name, target in targets.items()}
        for name, target in targets.items():
            try:
                _load(target, states[name])
            except LoadError as error:
                for own, state in before.items():
                    _load(targets[own], state)
                raise CheckpointError(
                    "restore",
                    f"{path} does not fit the step: {error.cause}",
                    "It is of another model, optimizer or accumulation. Nothing was loaded.",
                ) from error
    steps = {n: s for n, s in targets.items() if isinstance(s, TrainStep)}
    if steps:
        _warn_of_differences(path, manifest, steps)


def _state(target: Restored) -> State:
    return target.state_dict() if isinstance(target, TrainStep) else target.params


def _load(target: Restored, state: State) -> None:
    if isinstance(target, TrainStep):
        target.load_state_dict(state)
    else:
        target.load_params(model_values(state))


def _warn_of_differences(path: Path, manifest: Manifest, steps: Mapping[str, TrainStep]) -> None:
    """The same bits are promised under the same plan and versions only."""
    found = [
        f"{'' if name == ALONE else f'{name}: '}{difference}"
        for name, step in steps.items()
        for difference in differences(manifest.records[name], StepRecord.of(step))
    ]
    now = versions()
    found += [
        f"{name} was {manifest.versions.get(name)}, is {version}"
        for name, version in now.items()
        if manifest.versions.get(name) != version
    ]
    if found:
        cause = f"checkpoint {path.name} was written under another plan: {'; '.join(found)}"
        advice = "training goes on from its values, but not with the same bits as without a stop"
        warnings.warn(f"{cause}: {advice}", CheckpointWarning, stacklevel=5)
