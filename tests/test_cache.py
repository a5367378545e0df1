"""The plan cache: what goes in comes out, and nothing else does, whatever happens to the folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from plans import KEY, OTHER, PARTS, age, entry, failing, files, key, place
from treadle.base.errors import CacheWarning
from treadle.runtime import cache as module
from treadle.runtime.cache import LIMIT, STALE, PlanCache, fingerprint, plan_cache


@pytest.fixture(autouse=True)
def _no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "plans"


@pytest.fixture
def store(folder: Path) -> PlanCache:
    return PlanCache(folder)


# Fingerprints


def test_a_fingerprint_is_the_sha256_of_parts_with_their_lengths() -> None:
    data = b"\x02\0\0\0\0\0\0\0ab" + b"\x00\0\0\0\0\0\0\0" + b"\x01\0\0\0\0\0\0\0c"
    assert fingerprint(["ab", b"", b"c"]) == hashlib.sha256(data).hexdigest()


def test_fingerprints_tell_where_parts_end() -> None:
    cases = [[], [""], ["", ""], ["ab"], ["a", "b"], ["", "ab"], ["ab", ""], ["a\0b"], ["ba"]]
    assert len({fingerprint(parts) for parts in cases}) == len(cases)


def test_fingerprints_take_any_text() -> None:
    assert fingerprint(["é"]) == fingerprint(["é".encode()])
    assert fingerprint(iter(["file\udcff"])) != fingerprint(["file"])


# What goes in comes out


def test_parts_come_back(store: PlanCache) -> None:
    assert store.get(KEY) is None
    store.put(KEY, PARTS)
    assert store.get(KEY) == PARTS
    assert list(store.get(KEY) or {}) == list(PARTS)
    assert store.get(OTHER) is None


@pytest.mark.parametrize("parts", [{}, {"": b""}, {"naïve \udcff name": b"\0" * 100_000}])
def test_odd_parts_come_back(store: PlanCache, parts: dict[str, bytes]) -> None:
    store.put(KEY, parts)
    assert store.get(KEY) == parts


def test_a_later_put_wins(store: PlanCache, folder: Path) -> None:
    store.put(KEY, PARTS)
    store.put(KEY, {"plan": b"new"})
    assert store.get(KEY) == {"plan": b"new"}
    assert files(folder) == [entry(folder).name]


def test_another_cache_on_the_folder_sees_it(store: PlanCache, folder: Path) -> None:
    store.put(KEY, PARTS)
    assert PlanCache(folder).get(KEY) == PARTS


@pytest.mark.parametrize("name", ["../../escaped", "/absolute", "", "a\0b", KEY.upper(), KEY + "0"])
def test_a_key_names_no_other_place(store: PlanCache, folder: Path, name: str) -> None:
    store.put(name, PARTS)
    assert store.get(name) == PARTS
    assert files(folder) == [f"{fingerprint([name])}.plan"]
    assert store.get(fingerprint([name])) is None  # the same file, but stored under another key


def test_a_relative_folder_does_not_follow_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = PlanCache(Path("plans"))
    monkeypatch.chdir("/")
    store.put(KEY, PARTS)
    assert entry(tmp_path / "plans").is_file()


def test_folders_and_files_are_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        PlanCache(tmp_path / "home" / "cache" / "plans").put(KEY, PARTS)
    finally:
        os.umask(before)
    top = tmp_path / "home"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [top, *top.rglob("*")]}
    assert modes == {
        "home": 0o700, "cache": 0o700, "plans": 0o700, "v1": 0o700, f"{KEY}.plan": 0o600,
    }  # fmt: skip


def test_a_mask_that_takes_everything_from_files(store: PlanCache, folder: Path) -> None:
    store.put(OTHER, PARTS)
    before = os.umask(0o777)
    try:
        store.put(KEY, PARTS)
    finally:
        os.umask(before)
    assert stat.S_IMODE(entry(folder).stat().st_mode) == 0o600


def test_reading_makes_nothing(store: PlanCache, folder: Path) -> None:
    assert store.get(KEY) is None
    assert store.info().entries == store.clear() == 0
    assert not folder.exists()


def test_no_descriptor_stays_open(store: PlanCache, folder: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    store.put(KEY, PARTS)
    entry(folder, key(1)).mkdir()
    entry(folder, key(2)).write_bytes(b"garbage")
    entry(folder, key(3)).symlink_to(entry(folder))
    before = descriptors()
    for name in (KEY, OTHER, key(1), key(2), key(3)):
        store.get(name)
    store.put(KEY, PARTS)
    store.info()
    assert descriptors() == before


# What is written later


def test_parts_that_are_made_later_are_there_when_they_are_asked_for(store: PlanCache) -> None:
    made: list[str] = []

    def parts(name: str) -> dict[str, bytes]:
        made.append(name)
        return PARTS

    store.put_later(KEY, lambda: parts("one"))
    store.put_later(OTHER, lambda: parts("other"))
    assert store.get(key(9)) is None
    assert made == []
    assert store.get(KEY) == PARTS
    assert made == ["one", "other"]
    store.put_later(KEY, lambda: parts("again"))
    assert store.info().entries == 2
    assert store.clear() == 2
    assert made == ["one", "other", "again"]


def test_nothing_is_made_for_a_folder_that_is_gone(store: PlanCache, folder: Path) -> None:
    store.put_later(KEY, lambda: pytest.fail("it is made"))
    shutil.rmtree(folder)
    assert store.get(KEY) is None
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_told_at_once(store: PlanCache, folder: Path) -> None:
    folder.touch()  # a file
    with pytest.warns(CacheWarning, match="cannot be written"):
        store.put_later(KEY, lambda: pytest.fail("it is made"))


# The file


def sealed(
    header: object, body: bytes = b"", version: int = 1, magic: bytes = b"TREADLE\x1a"
) -> bytes:
    """A file by the format's description, apart from the code that writes it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = struct.pack("<8sIIQ", magic, version, len(text), 24 + 32 + len(text) + len(body))
    return start + hashlib.sha256(start + text + body).digest() + text + body


def test_the_format(store: PlanCache, folder: Path) -> None:
    content = sealed({"key": KEY, "parts": {"a": 2, "b": 1}}, b"xyz")
    store.put(KEY, {"a": b"xy", "b": b"z"})
    assert entry(folder).read_bytes() == content
    place(folder, content)
    assert store.get(KEY) == {"a": b"xy", "b": b"z"}


FOREIGN = {
    "another version": sealed({"key": KEY, "parts": {"a": 1}}, b"x", version=2),
    "another magic": sealed({"key": KEY, "parts": {"a": 1}}, b"x", magic=b"TREADLE\x1b"),
    "another key": sealed({"key": OTHER, "parts": {"a": 1}}, b"x"),
    "no key": sealed({"parts": {"a": 1}}, b"x"),
    "no parts": sealed({"key": KEY}, b"x"),
    "a list of parts": sealed({"key": KEY, "parts": [["a", 1]]}, b"x"),
    "a list": sealed([KEY, {"a": 1}], b"x"),
    "a part too short": sealed({"key": KEY, "parts": {"a": 0}}, b"x"),
    "a part too long": sealed({"key": KEY, "parts": {"a": 2}}, b"x"),
    "sizes that cancel": sealed({"key": KEY, "parts": {"a": 2, "b": -1}}, b"x"),
    "a fraction": sealed({"key": KEY, "parts": {"a": 1.0}}, b"x"),
    "a text for a size": sealed({"key": KEY, "parts": {"a": "1"}}, b"x"),
    "not JSON": sealed(b"{", b"x"),
    "not UTF-8": sealed(b'{"key": "\xff"}', b"x"),
    "deep": sealed(b"[" * 100_000, b"x"),
    "nothing": b"",
    "only the magic": b"TREADLE\x1a",
    "text": b"hello\n" * 100,
    "zeros": bytes(1000),
    "an ELF file": b"\x7fELF" + bytes(1000),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_file_is_ignored_and_removed(
    store: PlanCache, folder: Path, content: bytes
) -> None:
    path = place(folder, content)
    assert store.get(KEY) is None
    assert not path.exists()
    store.put(KEY, PARTS)
    assert store.get(KEY) == PARTS


def test_every_flipped_bit_is_noticed(store: PlanCache, folder: Path) -> None:
    parts = {"plan": b"{ }", "object": b"\0\xff code"}
    store.put(KEY, parts)
    content = entry(folder).read_bytes()
    for at in range(len(content)):
        for bit in range(8):
            wrong = bytearray(content)
            wrong[at] ^= 1 << bit
            path = place(folder, bytes(wrong))
            assert store.get(KEY) is None, (at, bit)
            assert not path.exists()
    place(folder, content)
    assert store.get(KEY) == parts


def test_every_truncation_is_noticed(store: PlanCache, folder: Path) -> None:
    store.put(KEY, PARTS)
    content = entry(folder).read_bytes()
    draw = random.Random(0)
    for wrong in (
        *(content[:n] for n in range(len(content))),
        content + b"\0",
        content + content,
        content[1:],
        *(content[:n] + content[n + draw.randint(1, 50) :] for n in range(len(content) - 50)),
        *(content[:n] + bytes(len(content) - n) for n in range(len(content) - 800)),  # not written
    ):
        path = place(folder, wrong)
        assert store.get(KEY) is None
        assert not path.exists()


def test_an_entry_under_another_name_is_ignored(store: PlanCache, folder: Path) -> None:
    """Right in itself, but a program that was compiled from something else."""
    store.put(KEY, PARTS)
    os.rename(entry(folder), entry(folder, OTHER))
    assert store.get(OTHER) is None
    assert files(folder) == []


def test_a_file_beyond_the_limit_is_not_read(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(folder, b"TREADLE\x1a")
    os.truncate(path, LIMIT + 1)  # takes no space

    def read(*_: object) -> bytes:
        raise AssertionError("was read")

    monkeypatch.setattr(module, "_content", read)
    assert store.get(KEY) is None
    assert not path.exists()


def test_garbage_is_not_read_whole(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(folder, b"garbage")
    os.truncate(path, LIMIT)
    seen: list[bytes] = []
    unpacked = module._unpacked
    monkeypatch.setattr(module, "_unpacked", lambda k, c: seen.append(c) or unpacked(k, c))  # type: ignore[func-returns-value]
    assert store.get(KEY) is None
    assert len(seen[0]) < 100
    assert not path.exists()


# Trust


def test_a_file_that_others_can_write_is_ignored(store: PlanCache, folder: Path) -> None:
    for mode in (0o620, 0o602, 0o666, 0o777):
        store.put(KEY, PARTS)
        assert store.get(KEY) == PARTS
        entry(folder).chmod(mode)
        assert store.get(KEY) is None, oct(mode)
        assert entry(folder).exists()
    store.put(KEY, PARTS)
    entry(folder).chmod(0o644)  # reading is not writing
    assert store.get(KEY) == PARTS


@pytest.mark.parametrize("inner", ["", "v1"])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o775, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_ignored(
    store: PlanCache, folder: Path, inner: str, mode: int
) -> None:
    store.put(KEY, PARTS)
    (folder / inner).chmod(mode)
    with pytest.warns(CacheWarning, match=rf"others can write to .*{inner} \(mode {mode:o}\)"):
        assert store.get(KEY) is None
    store.put(OTHER, PARTS)
    assert store.info().entries == store.clear() == 0
    assert files(folder) == [entry(folder).name]
    (folder / inner).chmod(0o755)
    assert store.get(KEY) == PARTS


def test_nothing_is_made_in_a_folder_that_others_can_write(store: PlanCache, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.warns(CacheWarning, match="chmod 700"):
        store.put(KEY, PARTS)
    assert os.listdir(folder) == []


def test_a_folder_of_another_user_is_ignored(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, PARTS)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(CacheWarning, match=f"belongs to user {me}, this process is {me + 1}"):
        assert store.get(KEY) is None
    store.put(OTHER, PARTS)
    assert store.clear() == 0
    assert files(folder) == [entry(folder).name]


def test_a_file_of_another_user_is_ignored(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, PARTS)
    fstat = os.fstat

    def of_another(file: int) -> Any:
        status = fstat(file)
        if stat.S_ISDIR(status.st_mode):
            return status
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))

    monkeypatch.setattr(os, "fstat", of_another)
    assert store.get(KEY) is None
    assert entry(folder).exists()
    monkeypatch.undo()
    assert store.get(KEY) == PARTS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given", ["", "v1", f"v1/{KEY}.plan"])
def test_what_root_gave_away_is_ignored(store: PlanCache, folder: Path, given: str) -> None:
    store.put(KEY, PARTS)
    os.chown(folder / given, 65534, -1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert store.get(KEY) is None
    assert [w.category for w in said] == ([] if given.endswith(".plan") else [CacheWarning])
    assert entry(folder).exists()


def test_a_link_is_not_followed(store: PlanCache, folder: Path, tmp_path: Path) -> None:
    store.put(KEY, PARTS)
    elsewhere = tmp_path / "elsewhere"
    os.rename(entry(folder), elsewhere)
    entry(folder).symlink_to(elsewhere)
    assert store.get(KEY) is None
    store.put(KEY, {"plan": b"mine"})  # replaces the link, not what it points to
    assert store.get(KEY) == {"plan": b"mine"}
    assert not entry(folder).is_symlink()
    assert b"mine" not in elsewhere.read_bytes()


def test_an_inner_folder_that_is_a_link_is_not_followed(
    store: PlanCache, folder: Path, tmp_path: Path
) -> None:
    store.put(KEY, PARTS)
    os.rename(folder / "v1", tmp_path / "elsewhere")
    (folder / "v1").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert store.get(KEY) is None
    store.put(OTHER, PARTS)
    assert os.listdir(tmp_path / "elsewhere") == [entry(folder).name]


def test_the_user_may_link_the_folder_itself(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir(0o700)
    (tmp_path / "plans").symlink_to(tmp_path / "big disk")
    store = PlanCache(tmp_path / "plans")
    store.put(KEY, PARTS)
    assert store.get(KEY) == PARTS
    (tmp_path / "big disk").chmod(0o777)
    with pytest.warns(CacheWarning, match="others can write"):
        assert store.get(KEY) is None


def test_things_that_are_not_files_are_ignored(store: PlanCache, folder: Path) -> None:
    store.put(OTHER, PARTS)
    os.mkfifo(entry(folder, key(1)), 0o600)  # nobody writes: waiting for it would be for ever
    entry(folder, key(2)).mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as made:
        inside = os.open(folder / "v1", os.O_RDONLY)
        made.bind(f"/proc/self/fd/{inside}/{key(3)}.plan")  # a socket's path must be short
        os.close(inside)
    for number in (1, 2, 3):
        assert store.get(key(number)) is None
        assert entry(folder, key(number)).exists()
    store.put(key(1), PARTS)
    assert store.get(key(1)) == PARTS
    with pytest.warns(CacheWarning, match="cannot be written: Is a directory"):
        store.put(key(2), PARTS)
    assert not [f for f in files(folder) if f.startswith(".")]


# The limit


def fill(store: PlanCache, count: int, size: int = 10_000) -> None:
    """Entries 0, 1, …, each used an hour after the one before."""
    for n in range(count):
        store.put(key(n), {"object": bytes(size)})
        age(entry(store.folder, key(n)), 3600 * (count - n))


def held(store: PlanCache, count: int = 20) -> list[int]:
    return [n for n in range(count) if entry(store.folder, key(n)).exists()]


def test_the_total_stays_within_the_limit(folder: Path) -> None:
    store = PlanCache(folder, 55_000)
    for n in range(20):
        store.put(key(n), {"object": bytes(10_000)})
        assert store.info().bytes <= 55_000
        assert store.get(key(n)) is not None
    assert store.info().entries == 5


def test_what_was_unused_for_longest_goes_first(folder: Path) -> None:
    fill(PlanCache(folder), 5)
    store = PlanCache(folder, 55_000)
    assert store.get(key(0)) is not None  # used now
    assert store.get(key(2)) is not None
    store.put(key(5), {"object": bytes(10_000)})
    assert held(store) == [0, 2, 3, 4, 5]
    store.put(key(6), {"object": bytes(20_000)})
    assert held(store) == [0, 2, 5, 6]


def test_writing_again_is_a_use(folder: Path) -> None:
    fill(PlanCache(folder), 5)
    store = PlanCache(folder, 55_000)
    store.put(key(0), {"object": bytes(10_000)})
    store.put(key(5), {"object": bytes(10_000)})
    assert held(store) == [0, 2, 3, 4, 5]


def test_uses_are_timed_finer_than_the_file_system_does(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (10**18 + 7, 10**18 + 1007):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        store.put(KEY, PARTS)
        assert entry(folder).stat().st_mtime_ns == now
        monkeypatch.setattr(time, "time_ns", lambda now=now: now + 500)
        assert store.get(KEY) == PARTS
        assert entry(folder).stat().st_mtime_ns == now + 500


def test_a_lower_limit_takes_effect_with_the_next_put(folder: Path) -> None:
    fill(PlanCache(folder), 10)
    store = PlanCache(folder, 25_000)
    assert store.info().entries == 10
    store.put(key(10), {"object": bytes(10_000)})
    assert held(store) == [9, 10]


def test_an_entry_larger_than_the_limit_is_not_kept(folder: Path) -> None:
    fill(PlanCache(folder), 2)
    store = PlanCache(folder, 50_000)
    with pytest.warns(
        CacheWarning, match=r"larger than the limit of 50000\. Raise TREADLE_CACHE_MB"
    ):
        store.put(key(2), {"object": bytes(50_000)})
    assert held(store) == [0, 1]


def test_what_others_are_writing_counts_but_stays(folder: Path) -> None:
    fill(PlanCache(folder), 3)
    aside = folder / "v1" / f".aside-{'a' * 32}"
    aside.write_bytes(bytes(20_000))
    age(aside, 1800)
    age(entry(folder, key(2)), 60)
    store = PlanCache(folder, 35_000)
    store.put(key(3), {"object": bytes(10_000)})
    assert held(store) == [3]
    assert aside.exists()


def test_foreign_names_are_neither_counted_nor_removed(store: PlanCache, folder: Path) -> None:
    store.put(KEY, PARTS)
    size = store.info().bytes
    names = ["notes.txt", f"{KEY}.plan~", f"{KEY[:-1]}.plan", ".aside-1", ".aside-", KEY]
    for name in names:
        (folder / "v1" / name).write_bytes(bytes(1000))
        age(folder / "v1" / name, 10 * STALE / 1e9)
    (folder / "v1" / "folder").mkdir()
    assert (store.info().entries, store.info().bytes) == (1, size)
    PlanCache(folder, size).put(KEY, PARTS)
    assert store.clear() == 1
    assert files(folder) == sorted([*names, "folder"])


def test_files_that_vanish_while_they_are_counted(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 3)
    unlink = os.unlink

    def twice(*given: Any, **options: Any) -> None:
        unlink(*given, **options)
        unlink(*given, **options)

    monkeypatch.setattr(os, "unlink", twice)
    PlanCache(folder, 25_000).put(key(3), {"object": bytes(10_000)})
    assert held(store) == [2, 3]


def test_info_and_clear(store: PlanCache, folder: Path) -> None:
    fill(store, 3, size=1000)
    info = store.info()
    assert (info.folder, info.entries) == (folder, 3)
    assert info.bytes == sum(p.stat().st_size for p in (folder / "v1").iterdir()) > 3000
    assert store.clear() == 3
    assert files(folder) == []
    assert store.info() == module.CacheContents(folder, 0, 0)
    assert store.clear() == 0


# The environment


def test_the_default_folder() -> None:
    cases = {
        "/home/u/.cache/treadle": {"HOME": "/home/u"},
        "/xdg/treadle": {"HOME": "/home/u", "XDG_CACHE_HOME": "/xdg"},
        "/x/treadle": {"XDG_CACHE_HOME": "/x"},
        "/h/.cache/treadle": {"HOME": "/h", "XDG_CACHE_HOME": "relative"},
        "/g/.cache/treadle": {"HOME": "/g", "XDG_CACHE_HOME": ""},
        "/mine": {"HOME": "/home/u", "XDG_CACHE_HOME": "/xdg", "TREADLE_CACHE": "/mine"},
        "/alone": {"TREADLE_CACHE": "/alone"},
        "/home/u/plans": {"HOME": "/home/u", "TREADLE_CACHE": "~/plans"},
        f"{os.getcwd()}/here": {"TREADLE_CACHE": "here"},
    }
    for expected, environment in cases.items():
        found = plan_cache(environment)
        assert found is not None
        assert (str(found.folder), found.limit) == (expected, LIMIT)


@pytest.mark.parametrize("value", ["", " ", "0", "off", "OFF", "Off "])
def test_it_can_be_disabled(value: str) -> None:
    assert plan_cache({"HOME": "/h", "TREADLE_CACHE": value}) is None


@pytest.mark.parametrize(
    "environment",
    [{}, {"HOME": ""}, {"HOME": "relative"}, {"TREADLE_CACHE": "~/plans"}, {"XDG_CACHE_HOME": "x"}],
)
def test_no_home_means_no_cache(environment: dict[str, str]) -> None:
    with pytest.warns(CacheWarning, match="HOME is not an absolute path. Set TREADLE_CACHE"):
        assert plan_cache(environment) is None
    assert plan_cache(environment) is None


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", failing(errno.ENOENT))
    with pytest.warns(CacheWarning, match="plans has no place: No such file"):
        assert plan_cache({"TREADLE_CACHE": "plans"}) is None


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ("", LIMIT),
        (" ", LIMIT),
        ("1", 1 << 20),
        ("0.5", 1 << 19),
        ("4096", 4 << 30),
        (" 2 ", 2 << 20),
    ],
)
def test_the_limit_is_read(value: str, limit: int) -> None:
    found = plan_cache({"HOME": "/h", "TREADLE_CACHE_MB": value})
    assert found is not None
    assert found.limit == limit


@pytest.mark.parametrize("value", ["much", "-1", "inf", "nan", "1 GB"])
def test_a_limit_that_says_nothing(value: str) -> None:
    with pytest.warns(CacheWarning, match=f"TREADLE_CACHE_MB is '{value}'.* 1024 is used"):
        found = plan_cache({"HOME": "/h", "TREADLE_CACHE_MB": value})
    assert found is not None
    assert found.limit == LIMIT


def test_no_room_is_no_cache() -> None:
    assert plan_cache({"TREADLE_CACHE_MB": "0"}) is None


def test_it_is_one_for_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(folder))
    monkeypatch.delenv("TREADLE_CACHE_MB", raising=False)
    first = plan_cache()
    assert first is not None
    assert first is plan_cache()
    assert first.folder == folder
    assert not folder.exists()
    monkeypatch.setenv("TREADLE_CACHE", "off")
    assert plan_cache() is None


def test_where_owners_cannot_be_checked_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "name", "nt")
        assert plan_cache({"TREADLE_CACHE": "/x"}) is None


def test_the_suite_has_a_cache_of_its_own() -> None:
    """conftest.py moves it, here and in every process that tests start."""
    named = "from treadle.runtime.cache import plan_cache; print(plan_cache().folder)"
    started = subprocess.run([sys.executable, "-c", named], capture_output=True, text=True)
    found = plan_cache()
    assert found is not None
    assert found.folder.name.startswith("treadle-tests-")
    assert started.stdout.strip() == str(found.folder)
