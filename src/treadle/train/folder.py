"""A folder with one writer, whose entries are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.base.errors import CheckpointError, CheckpointWarning
from treadle.runtime.files import sync_folder

if sys.platform != "win32":
    import fcntl

LOCK, WRITING, DELETING = ".lock", ".writing-", ".deleting-"
CHUNK = 1 << 20
_WITHOUT_LOCKS = frozenset([errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])  # file systems


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file must be: its length and SHA-256."""

    bytes: int
    sha256: str


def write_file(path: Path, data: bytes) -> Digest:
    """A new file that has reached the disk."""
    rest, digest = memoryview(data), hashlib.sha256(data)
    with open(path, "xb", buffering=0) as file:
        while rest:
            rest = rest[file.write(rest[:CHUNK]) :]
        os.fsync(file.fileno())
    return Digest(len(data), digest.hexdigest())


def digest_of(path: Path) -> Digest:
    digest, length = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            length += len(chunk)
    return Digest(length, digest.hexdigest())


@contextlib.contextmanager
def new_entry(folder: Path, name: str) -> Iterator[Path]:
    """A directory to fill, which gets its name when it is complete and on the disk."""
    aside = folder / f"{WRITING}{name}"
    aside.mkdir()
    try:
        yield aside
        sync_folder(aside)
        os.rename(aside, folder / name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(folder)


def delete_entry(folder: Path, name: str) -> None:
    """Out of sight first: what is only partly deleted has no name."""
    hidden = folder / f"{DELETING}{name}"
    os.rename(folder / name, hidden)
    sync_folder(folder)
    shutil.rmtree(hidden)


def delete_leftovers(folder: Path) -> None:
    """What a writer that was killed left behind. For the one who holds the lock."""
    for path in folder.iterdir():
        if path.name.startswith((WRITING, DELETING)):
            shutil.rmtree(path, ignore_errors=True)


class FolderLock:
    """One process writes: held as long as this object lives, and released if the process dies."""

    def __init__(self, folder: Path):
        self.process = os.getpid()
        self.turn = threading.Lock()  # threads of that process take turns
        self.handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        self.release = weakref.finalize(self, os.close, self.handle)
        self._acquire(folder)
        with contextlib.suppress(OSError):  # a full disk: the number is only for messages
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, str(self.process).encode(), 0)

    def _acquire(self, folder: Path) -> None:
        try:
            if sys.platform != "win32":
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self.handle, 20, 0).decode("ascii", "replace") or "unknown"
            self.release()
            raise CheckpointError(
                "CheckpointManager",
                f"process {owner} writes checkpoints to {folder}",
                "Use another folder, or read_only=True to read from this one.",
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                self.release()
                raise
            cause = f"{folder} cannot be locked: {error.strerror}"
            warnings.warn(f"{cause}; see to it that one process writes", CheckpointWarning, 2)

    @property
    def is_ours(self) -> bool:
        """A forked child has its parent's object, but not its lock."""
        return self.process == os.getpid()


_held: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> FolderLock:
    """The process's lock of a folder, shared by all who ask for it in this process."""
    path = folder.resolve()
    lock = _held.get(path)
    if lock is None:
        lock = _held[path] = FolderLock(path)
    return lock


def _forget() -> None:
    """A forked child must not keep its parent's locks alive, and does not hold them."""
    for lock in list(_held.values()):
        lock.release()
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
