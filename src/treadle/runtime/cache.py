"""The plan cache: what was compiled, on disk, under a hash of everything that went in.

Machine code is run from it, so an entry counts only if no one but the current user can have written
it, and only if every byte of it is as it was. Whatever else goes wrong, one warning says so and the
program goes on: a cache may cost time, never a run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from treadle.base.errors import CacheWarning
from treadle.base.origin import user_origin
from treadle.runtime.later import Later

VERSION = 1  # of the folder's layout and of the files in it
LIMIT = 1 << 30  # bytes, all files together
STALE = 3600 * 10**9  # nanoseconds after which a file aside has lost its writer

# A file: these four, a sha256 of them and of all that follows, a JSON header, the parts' bytes.
_START = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, bytes of the file
_MAGIC = b"TREADLE\x1a"
_DIGEST = hashlib.sha256().digest_size

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.plan")
_ASIDE = re.compile(r"\.aside-[0-9a-f]{32}")
_OFF = frozenset(["", "0", "off"])
_HOME_CACHE = "~/.cache/treadle"


def fingerprint(parts: Iterable[str | bytes]) -> str:
    """A sha256 in hexadecimal. Each part's length goes in too: ("a", "bc") is not ("ab", "c")."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class CacheContents:
    """What a cache holds now."""

    folder: Path
    entries: int
    bytes: int


class PlanCache:
    """Named byte strings under keys, in one folder that only the user can write.

    Any number of threads and processes may use one folder: an entry is written aside and renamed,
    so that a reader sees all of it or none. Nothing is flushed to the disk: what a power cut leaves
    behind fails its checksum.
    """

    def __init__(self, folder: Path, limit: int = LIMIT):
        self.folder = folder.absolute()
        self.limit = limit
        self._layout = f"v{VERSION}"
        self._later = Later()

    def get(self, key: str) -> dict[str, bytes] | None:
        """The parts stored under a key; None where there are none that can be trusted."""
        self._later.finish(key)
        try:
            with self._open_folder() as folder:
                return self._read(folder, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(f"{self.folder} cannot be read: {_reason(error)}")
            return None

    def put(self, key: str, parts: Mapping[str, bytes]) -> None:
        """Store parts under a key; over the limit, what was unused for longest is removed."""
        pieces = _packed(key, parts)
        size = sum(map(len, pieces))
        if size > self.limit:
            cause = f"an entry of {size} bytes is larger than the limit of {self.limit}"
            _warn(cause, "Raise TREADLE_CACHE_MB to keep it.")
            return
        try:
            with self._open_folder(create=True) as folder:
                _write(folder, _file_name(key), pieces)
                self._trim(folder)
        except OSError as error:
            _warn(f"{self.folder} cannot be written: {_reason(error)}")

    def put_later(self, key: str, parts: Callable[[], Mapping[str, bytes]]) -> None:
        """Store parts that are made a moment later, when nobody waits for them.

        A folder that cannot be written is told at once, where the user asked for a program.
        """
        try:
            with self._open_folder(create=True):
                self._later.add(key, lambda: self._put_if_there(key, parts))
        except OSError as error:
            _warn(f"{self.folder} cannot be written: {_reason(error)}")

    def _put_if_there(self, key: str, parts: Callable[[], Mapping[str, bytes]]) -> None:
        if self.folder.is_dir():  # or else somebody has removed it since
            self.put(key, parts())

    def info(self) -> CacheContents:
        """The folder, the number of entries and the bytes of all files; zeros if unusable."""
        self._later.finish()
        files: list[_File] = []
        with suppress(OSError), self._open_folder() as folder:
            files = _files(folder)
        entries = sum(not f.is_aside for f in files)
        return CacheContents(self.folder, entries, sum(f.size for f in files))

    def clear(self) -> int:
        """Remove all entries, and files aside whose writer is gone; returns how many there were."""
        self._later.finish()
        removed = 0
        with suppress(OSError), self._open_folder() as folder:
            for file in _files(folder):
                if not file.is_aside or file.is_stale:
                    removed += _remove(folder, file.name)
        return removed

    @contextmanager
    def _open_folder(self, create: bool = False) -> Iterator[int]:
        """The folder's descriptor. Files are named relative to it, so that the folder that was
        checked is the one that is used, whatever happens to the path meanwhile."""
        if create:
            _make_folder(self.folder)
        flags = os.O_RDONLY | os.O_DIRECTORY
        outer = os.open(self.folder, flags)
        try:
            _check_folder(self.folder, os.fstat(outer))
            if create:
                _make_under(outer, self._layout)
            inner = os.open(self._layout, flags | os.O_NOFOLLOW, dir_fd=outer)
        finally:
            os.close(outer)
        try:
            _check_folder(self.folder / self._layout, os.fstat(inner))
            yield inner
        finally:
            os.close(inner)

    def _read(self, folder: int, key: str) -> dict[str, bytes] | None:
        name = _file_name(key)
        try:
            # Neither wait for a pipe's writer nor follow a link.
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                return None
            raise
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                return None
            is_small = status.st_size <= self.limit
            parts = _unpacked(key, _content(file, status.st_size)) if is_small else None
            if parts is None:
                _remove(folder, name)
            else:
                _touch(file)
            return parts
        finally:
            os.close(file)

    def _trim(self, folder: int) -> None:
        files = _files(folder)
        total = sum(f.size for f in files)
        # Files that lost their writer go first, then entries by their last use.
        removable = [f for f in files if not f.is_aside or f.is_stale]
        for file in sorted(removable, key=lambda f: (not f.is_stale, f.used)):
            if total <= self.limit and not file.is_stale:
                break
            _remove(folder, file.name)
            total -= file.size


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    used: int  # when it was last read or written, in nanoseconds
    is_aside: bool
    is_stale: bool  # aside, and so old (or so far in the future) that no one is writing it


def _files(folder: int) -> list[_File]:
    """Entries and files aside. What has no such name is not ours to count or to remove."""
    found = []
    now = time.time_ns()
    with os.scandir(folder) as entries:
        for entry in entries:
            is_aside = _ASIDE.fullmatch(entry.name) is not None
            if not is_aside and not _ENTRY.fullmatch(entry.name):
                continue
            with suppress(OSError):  # another process removed it
                status = entry.stat(follow_symlinks=False)
                used = status.st_mtime_ns
                is_stale = is_aside and abs(now - used) > STALE
                found.append(_File(entry.name, status.st_size, used, is_aside, is_stale))
    return found


def _file_name(key: str) -> str:
    """Keys are fingerprints; any other string is hashed, so that no key can name another place."""
    return (key if _FINGERPRINT.fullmatch(key) else fingerprint([key])) + ".plan"


def _packed(key: str, parts: Mapping[str, bytes]) -> list[bytes]:
    """A file's content, in pieces."""
    header = json.dumps({"key": key, "parts": {n: len(p) for n, p in parts.items()}}).encode()
    body = [header, *parts.values()]
    size = _START.size + _DIGEST + sum(map(len, body))
    start = _START.pack(_MAGIC, VERSION, len(header), size)
    digest = hashlib.sha256(start)
    for piece in body:
        digest.update(piece)
    return [start, digest.digest(), *body]


def _unpacked(key: str, content: bytes) -> dict[str, bytes] | None:
    """The parts in a file's content; None if it is not what `_packed` made of this key."""
    at = _START.size + _DIGEST
    if len(content) < at:
        return None
    magic, version, header_size, size = _START.unpack_from(content)
    if (magic, version, size) != (_MAGIC, VERSION, len(content)):
        return None
    digest = hashlib.sha256(content[: _START.size])
    digest.update(memoryview(content)[at:])
    if digest.digest() != content[_START.size : at]:
        return None
    try:
        header = json.loads(content[at : at + header_size])
        found, sizes = header["key"], header["parts"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # sealed, but by another program
    parts, at = {}, at + header_size
    for name, length in sizes:
        if not isinstance(length, int) or length < 0:
            return None
        parts[name] = content[at : at + length]
        at += length
    return parts if found == key and at == size else None


def _content(file: int, size: int) -> bytes:
    """A file's bytes, but no more than its start if that is not one of ours."""
    with open(file, "rb", closefd=False) as reader:
        start = reader.read(_START.size)
        return start + reader.read(size - len(start)) if start.startswith(_MAGIC) else start


def _write(folder: int, name: str, pieces: list[bytes]) -> None:
    aside = f".aside-{os.urandom(16).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        file = os.open(aside, flags, 0o600, dir_fd=folder)
        with open(file, "wb") as writer:
            writer.writelines(pieces)
            writer.flush()
            os.fchmod(file, 0o600)  # whatever the process's mask
            _touch(file)
        # Out here because some file systems report a full disk when the file is closed.
        os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:  # the folder was cleared meanwhile
        return
    except BaseException:
        _remove(folder, aside)
        raise


def _touch(file: int) -> None:
    """Used now. The time is given because the file system's own clock is coarser."""
    now = time.time_ns()
    with suppress(OSError):  # reading from a read-only file system is fine
        os.utime(file, ns=(now, now))


def _remove(folder: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:  # gone already, or not ours to remove
        return False
    return True


def _make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, for the user alone."""
    if path.is_dir():
        return
    if path != path.parent:
        _make_folder(path.parent)
    with suppress(FileExistsError):  # another process made it, or it is a file: opening will tell
        os.mkdir(path, 0o700)


def _make_under(folder: int, name: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)


def _is_ours(status: os.stat_result) -> bool:
    """Whether no one but the current user can have written it."""
    others_write = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.geteuid() and not status.st_mode & others_write


def _check_folder(path: Path, status: os.stat_result) -> None:
    if _is_ours(status):
        return
    user = os.geteuid()
    if status.st_uid != user:
        raise PermissionError(f"{path} belongs to user {status.st_uid}, this process is {user}")
    mode = stat.S_IMODE(status.st_mode)
    raise PermissionError(f"others can write to {path} (mode {mode:o}); chmod 700 helps")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


_REMEDY = "Set TREADLE_CACHE to a folder of yours, or to 0 to go without a plan cache."
_warned = False


def _warn(cause: str, remedy: str = _REMEDY) -> None:
    """Say it once in a process: a cause that stays would be said at each compile."""
    global _warned
    if _warned:
        return
    _warned = True
    origin = user_origin()
    file, line = (origin.file, origin.line) if origin else ("treadle", 0)
    warnings.warn_explicit(f"plan cache: {cause}. {remedy} [{origin}]", CacheWarning, file, line)


def plan_cache(environment: Mapping[str, str] | None = None) -> PlanCache | None:
    """The process's plan cache; None where it is disabled or has no place.

    `TREADLE_CACHE` is its folder, or `0`, `off` or empty to go without; `TREADLE_CACHE_MB` is its
    limit. Nothing on disk is touched before the first `put`.
    """
    given = os.environ if environment is None else environment
    is_off = given.get("TREADLE_CACHE", _HOME_CACHE).strip().lower() in _OFF
    if is_off or os.name != "posix":  # elsewhere it cannot be told who can write a file
        return None
    limit = _limit(given.get("TREADLE_CACHE_MB", ""))
    folder = _folder(given) if limit else None
    return None if folder is None else _cache_of(folder, limit)


@lru_cache(maxsize=8)
def _cache_of(folder: Path, limit: int) -> PlanCache:
    return PlanCache(folder, limit)


def _folder(environment: Mapping[str, str]) -> Path | None:
    """Where the cache is, by the environment; None if that names no place."""
    above = environment.get("XDG_CACHE_HOME", "")
    # Only absolute paths count there, by the convention that defines the variable.
    default = os.path.join(above, "treadle") if os.path.isabs(above) else _HOME_CACHE
    named = environment.get("TREADLE_CACHE", default).strip()
    home = environment.get("HOME", "")
    if named.startswith("~/"):
        if not os.path.isabs(home):
            _warn(f"{named} has no place: HOME is not an absolute path")
            return None
        named = os.path.join(home, named[2:])
    try:
        return Path(named).absolute()
    except OSError as error:  # relative to a working folder that is gone
        _warn(f"{named} has no place: {_reason(error)}")
        return None


def _limit(megabytes: str) -> int:
    """The limit in bytes; a value that says nothing is not worth stopping for."""
    if not megabytes.strip():
        return LIMIT
    try:
        given = float(megabytes)
    except ValueError:
        given = math.nan
    if not 0 <= given < math.inf:
        cause = f"TREADLE_CACHE_MB is {megabytes!r}, which is no size; {LIMIT >> 20} is used"
        _warn(cause, "Set it to a number of megabytes.")
        return LIMIT
    return int(given * (1 << 20))
