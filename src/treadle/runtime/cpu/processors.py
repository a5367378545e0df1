"""How many processors this process may use: its affinity, its cgroups' quotas, the user's word."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from treadle.base.errors import ArgumentError

MOST_THREADS = 4096  # beyond any machine: a slip of the keyboard


def default_threads(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> int:
    """`TREADLE_THREADS`, or as many threads as the process may keep busy.

    A container's processor limit is a quota of time, not an affinity: threads beyond it are stopped
    in the middle of a step, and all others wait for them at the next barrier.
    """
    given = (os.environ if environment is None else environment).get("TREADLE_THREADS", "").strip()
    if given:
        return _threads(given)
    quota = min((_quota(g) for g in _cgroups(root)), default=math.inf)
    allowed = _affinity()
    return allowed if quota >= allowed else math.ceil(quota)


def _threads(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_THREADS))
    if not is_number or not 1 <= int(text) <= MOST_THREADS:
        raise ArgumentError(
            "threads",
            f"TREADLE_THREADS is {text!r}, not a whole number from 1 to {MOST_THREADS}",
            "Correct it, or unset it to use all processors that the process may use.",
        )
    return int(text)


def _affinity() -> int:
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # not every system has it
        return os.cpu_count() or 1


@dataclass(frozen=True)
class _Cgroup:
    """A folder of the cgroup file system that holds this process, itself or below."""

    folder: Path
    is_v2: bool


def _quota(group: _Cgroup) -> float:
    """Processors' worth of time that a group may use; infinity where nothing is said."""
    if group.is_v2:
        texts = _read(group.folder / "cpu.max").split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        texts = [_read(group.folder / name).strip() for name in names]
    try:
        quota, period = (int(t) for t in texts)
    except ValueError:  # "max", or not there
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _cgroups(root: Path) -> Iterator[_Cgroup]:
    """The process's groups that can limit processor time, and all that enclose them."""
    paths = dict(_paths(_read(root / "proc/self/cgroup")))
    for mount in _mounts(_read(root / "proc/self/mountinfo")):
        path = paths.get(mount.is_v2)
        # In a container the mount may show only a part of the tree: ours, if the process is in it.
        if path is None or not path.is_relative_to(mount.shows) or ".." in path.parts:
            continue
        below = path.relative_to(mount.shows)
        for inner in (below, *below.parents):
            folder = root / mount.at.relative_to("/") / inner
            yield _Cgroup(folder, mount.is_v2)


def _paths(text: str) -> Iterator[tuple[bool, PurePosixPath]]:
    """Whether v2, and the process's group. Lines are `number:controllers:path`; v2 names none."""
    for line in text.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if path.startswith("/") and (not controllers or "cpu" in controllers.split(",")):
            yield not controllers, PurePosixPath(path)


@dataclass(frozen=True)
class _Mount:
    shows: PurePosixPath  # the group that appears as the mount's root
    at: PurePosixPath
    is_v2: bool


def _mounts(text: str) -> Iterator[_Mount]:
    """Lines are `id parent device shows at options … - kind source options`."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(kinds) < 3:
            continue
        is_v2 = kinds[0] == "cgroup2"
        if is_v2 or (kinds[0] == "cgroup" and "cpu" in kinds[2].split(",")):
            shows, at = (PurePosixPath(_unescaped(f)) for f in fields[3:5])
            if at.is_absolute():
                yield _Mount(shows, at, is_v2)


def _unescaped(field: str) -> str:
    """Spaces and the like are written as octal numbers, `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
