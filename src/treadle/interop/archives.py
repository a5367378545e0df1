"""Zip archives that are not trusted: what they promise is bounded before anything is unpacked."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.base.errors import LoadError
from treadle.base.memory import refuse_beyond, shown
from treadle.interop.opened import check_file, damage, damaged
from treadle.runtime.files import as_path

MOST_ENTRIES = 1_000_000
MOST_TIMES = 100  # an archive's content may be this much larger than the archive,
ALWAYS = 1 << 28  # or have this many bytes: zeros shrink to a thousandth
METHODS = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
TROUBLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,  # an entry that is encrypted
    ValueError,
    OverflowError,
    RecursionError,
)


class Archive:
    """The entries of a zip file by name."""

    def __init__(self, source: Path, opened: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]):
        self.source, self._opened, self.entries = source, opened, entries

    def read(self, name: str) -> bytes:
        """The content of an entry: as many bytes as were promised, which its checksum matches."""
        entry = self.entries.get(name)
        if entry is None:
            raise damaged(self.source, f"there is no entry {name[:80]!r}")
        with damage(self.source, *TROUBLE):
            found = self._opened.read(entry)
        if len(found) != entry.file_size:
            raise damaged(self.source, f"{name[:80]!r} has {len(found):,} of its bytes")
        return found


@contextmanager
def open_archive(
    path: str | Path, what: str, *, largest: int | None = None, is_stored: bool = False
) -> Iterator[Archive]:
    """A zip file, whose content has at most `largest` bytes, or a multiple of the file's.

    `is_stored` refuses what is compressed.
    """
    source = as_path("load", path)
    check_file(source)
    with damage(source, *TROUBLE):
        if not zipfile.is_zipfile(source):
            remedy = "Use another copy."
            raise LoadError("load", f"{source} is damaged, or not {what}", remedy)
        opened = zipfile.ZipFile(source)
    with opened:
        entries = {e.filename: e for e in opened.infolist()}
        _check(source, opened.infolist(), largest, is_stored)
        yield Archive(source, opened, entries)


def _check(
    source: Path, entries: list[zipfile.ZipInfo], largest: int | None, is_stored: bool
) -> None:
    if len(entries) > MOST_ENTRIES or len({e.filename for e in entries}) < len(entries):
        raise damaged(source, f"it has {len(entries):,} entries, or two of one name")
    allowed = {zipfile.ZIP_STORED} if is_stored else set(METHODS)
    for entry in entries:
        if entry.compress_type not in allowed or entry.flag_bits & 1:
            how = "encrypted" if entry.flag_bits & 1 else f"packed by method {entry.compress_type}"
            raise damaged(source, f"the entry {entry.filename[:80]!r} is {how}")
    total, size = sum(e.file_size for e in entries), source.stat().st_size
    bound = max(ALWAYS, MOST_TIMES * size) if largest is None else largest
    if is_stored:
        bound = size  # entries that overlap promise more
    if total > bound:
        cause = f"{source} has {shown(size)} and promises {shown(total)}, more than {shown(bound)}"
        remedy = "Use another copy." if is_stored else "If it is to be trusted, pass largest=."
        raise LoadError("load", cause, remedy)
    refuse_beyond("load", f"what is in {source}", total)
