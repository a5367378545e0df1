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


def write_folder(path: str | Path, files: Mapping[str, bytes]) -> Path:
    """Write files aside, then rename. An earlier export is replaced; anything else is refused."""
    target = as_path("export_web", path)
    try:
        _refuse_other(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=WRITING, dir=target.parent))
        try:
            for name, data in files.items():
                (aside / name).write_bytes(data)
            os.chmod(aside, 0o755)  # a server of another user may read it
            sync_folder(aside)
            _take_place(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        if isinstance(error, SaveError):
            raise
        cause = f"{target} cannot be written: {getattr(error, 'strerror', None) or error}"
        raise SaveError("export_web", cause, "Use another place.") from error
    return target


def _refuse_other(target: Path) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise SaveError("export_web", f"{target} is not a folder", "Name one that is new.")
    if any(target.iterdir()) and not _is_export(target):
        cause = f"{target} has other files in it"
        raise SaveError("export_web", cause, "Name a new folder, or one that was exported before.")


def _is_export(folder: Path) -> bool:
    try:
        found = json.loads((folder / BUNDLE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "treadle" in found and "programs" in found


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
        os.rename(old / target.name, target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
