"""A folder that is there as a whole or not at all, and only ever replaces another export."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from treadle.base.errors import SaveError
from treadle.runtime.files import WRITING, as_path, sync_folder

BUNDLE = "bundle.json"  # what tells an export from other folders
LISTED = "folder"  # in it: the names of all files of the folder


def write_folder(path: str | Path, files: Mapping[str, bytes]) -> Path:
    """Write files aside, then rename. An earlier export is replaced; anything else is refused."""
    given = refuse_other(path)
    target = Path(os.path.abspath(given))  # what is written aside is beside ".", not in it
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=WRITING, dir=target.parent))
        try:
            for name, data in files.items():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (aside / name).write_bytes(data)
            for folder in (aside, *(p for p in aside.rglob("*") if p.is_dir())):
                os.chmod(folder, 0o755)  # a server of another user may read it
                sync_folder(folder)
            _take_place(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise _unwritable(given, error) from error
    return given


def refuse_other(path: str | Path) -> Path:
    """The folder, if it is new, empty or an earlier export with nothing beside it."""
    target = as_path("export_web", path)
    try:
        if not target.exists() and not target.is_symlink():
            return target
        if not target.is_dir() or target.is_symlink():
            raise SaveError("export_web", f"{target} is not a folder", "Name one that is new.")
        others = _others(target)
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise _unwritable(target, error) from error
    if others:
        cause = f"{target} has other files in it: {', '.join(others[:6])}"
        raise SaveError("export_web", cause, "Name a new folder, or one that was exported before.")
    return target


def _unwritable(target: Path, error: Exception) -> SaveError:
    cause = f"{target} cannot be written: {getattr(error, 'strerror', None) or error}"
    return SaveError("export_web", cause, "Use another place.")


def _others(folder: Path) -> list[str]:
    """Files that no export wrote, which would be lost."""
    try:
        found = json.loads((folder / BUNDLE).read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "treadle" not in found or "programs" not in found:
        return sorted(p.name for p in folder.iterdir())
    there = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())
    listed = found.get(LISTED)
    own = {n for n in listed if isinstance(n, str)} if isinstance(listed, list) else set(there)
    return [name for name in there if name not in own]


def _take_place(aside: Path, target: Path) -> None:
    """What was there goes when the new folder has its name."""
    if not target.exists():
        os.rename(aside, target)
        return
    old = Path(tempfile.mkdtemp(prefix=WRITING, dir=target.parent))
    os.rename(target, old / target.name)
    try:
        os.rename(aside, target)
    except BaseException:
        os.rename(old / target.name, target)  # where that fails too, it stays in `old`
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
