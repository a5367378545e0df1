"""The plan cache in trouble: what cannot be written or read, other users, killed writers."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plans import KEY, OTHER, PARTS, age, entry, failing, files, key, place
from treadle.base.errors import CacheWarning
from treadle.runtime import cache as module
from treadle.runtime.cache import STALE, PlanCache, plan_cache


@pytest.fixture(autouse=True)
def _no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "plans"


@pytest.fixture
def store(folder: Path) -> PlanCache:
    return PlanCache(folder)


# What cannot be written or read


class FullFile(io.FileIO):
    """A file on a disk that has no room for it."""

    code = errno.ENOSPC
    at = "writelines"

    def writelines(self, lines: Any, /) -> None:
        for line in lines:
            self.write(line)
            if self.at == "writelines":
                failing(self.code)()

    def flush(self) -> None:
        if self.at == "flush":
            failing(self.code)()

    def close(self) -> None:
        is_first = not self.closed
        super().close()
        if is_first and self.at == "close":
            failing(self.code)()


@pytest.mark.parametrize("at", ["writelines", "flush", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch, at: str, code: int
) -> None:
    store.put(KEY, PARTS)

    def open_full(file: int, mode: str, **options: Any) -> Any:
        return FullFile(file, "w") if mode == "wb" else builtins.open(file, mode, **options)

    monkeypatch.setattr(FullFile, "at", at)
    monkeypatch.setattr(FullFile, "code", code)
    monkeypatch.setattr(module, "open", open_full, raising=False)
    with pytest.warns(CacheWarning, match=f"cannot be written: {os.strerror(code)}"):
        store.put(OTHER, PARTS)
    store.put(KEY, {"plan": b"new"})  # said once
    assert store.get(OTHER) is None
    assert store.get(KEY) == PARTS  # what was there is as it was
    assert files(folder) == [entry(folder).name]
    monkeypatch.undo()
    store.put(OTHER, PARTS)
    assert store.get(OTHER) == PARTS


@pytest.mark.parametrize("function", ["open", "fchmod", "replace", "scandir"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_call_when_writing(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    store.put(KEY, PARTS)
    monkeypatch.setattr(os, function, failing(code))
    with pytest.warns(CacheWarning) as said:
        store.put(OTHER, PARTS)
    store.put(OTHER, PARTS)  # said once
    monkeypatch.undo()
    (message,) = [str(w.message) for w in said]
    assert message.startswith(f"plan cache: {folder} cannot be written: {os.strerror(code)}. Set")
    assert "TREADLE_CACHE to a folder of yours, or to 0" in message
    assert "test_cache_trouble.py" in message
    assert said[0].filename == __file__
    assert store.get(KEY) == PARTS
    assert not [f for f in files(folder) if f.startswith(".")]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_made(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "mkdir", failing(code))
    with pytest.warns(CacheWarning, match=f"cannot be written: {os.strerror(code)}"):
        store.put(KEY, PARTS)
    assert not folder.exists()
    assert store.get(KEY) is None


@pytest.mark.parametrize("function", ["open", "fstat"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_failing_call_when_reading(
    store: PlanCache, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    store.put(KEY, PARTS)
    monkeypatch.setattr(os, function, failing(code))
    with pytest.warns(CacheWarning, match=f"cannot be read: {os.strerror(code)}"):
        assert store.get(KEY) is None
    assert store.get(KEY) is None
    assert store.info().entries == store.clear() == 0
    monkeypatch.undo()
    assert store.get(KEY) == PARTS


def test_a_read_only_file_system_can_be_read(
    store: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, PARTS)
    for function in ("utime", "unlink", "mkdir", "replace"):
        monkeypatch.setattr(os, function, failing(errno.EROFS))
    assert store.get(KEY) == PARTS
    assert store.clear() == 0


def test_garbage_that_cannot_be_removed(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(folder, b"garbage")
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS))
    assert store.get(KEY) is None
    assert path.exists()


@pytest.mark.parametrize("at", ["plans", "plans/v1", "", "plans/deeper/still"])
def test_a_file_where_a_folder_should_be(tmp_path: Path, at: str) -> None:
    top = tmp_path / "top"
    path = top / at
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    path.write_text("in the way")
    store = PlanCache(path / "under" if at.endswith("still") else top / "plans")
    with pytest.warns(CacheWarning, match="Not a directory"):
        assert store.get(KEY) is None
    store.put(KEY, PARTS)
    assert store.info() == module.CacheContents(store.folder, 0, 0)
    assert path.read_text() == "in the way"


def test_a_folder_that_is_a_broken_link(tmp_path: Path, store: PlanCache, folder: Path) -> None:
    folder.symlink_to(tmp_path / "gone")
    assert store.get(KEY) is None
    with pytest.warns(CacheWarning, match="No such file"):
        store.put(KEY, PARTS)


def test_a_folder_that_is_removed_is_made_again(store: PlanCache, folder: Path) -> None:
    store.put(KEY, PARTS)
    shutil.rmtree(folder)
    assert store.get(KEY) is None
    store.put(KEY, PARTS)
    assert store.get(KEY) == PARTS


def test_a_folder_that_is_removed_while_written(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def remove_and_replace(*given: Any, **options: Any) -> None:
        shutil.rmtree(folder)
        replace(*given, **options)

    monkeypatch.setattr(os, "replace", remove_and_replace)
    store.put(KEY, PARTS)
    assert not folder.exists()


def test_an_interrupted_write_leaves_nothing(
    store: PlanCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(KEY, PARTS)
    assert files(folder) == []


def test_one_warning_for_everything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one, other = (PlanCache(tmp_path / "file" / name) for name in ("a", "b"))
    with pytest.warns(CacheWarning):
        one.put(KEY, PARTS)
    # Warnings are errors here: nothing more is said.
    assert one.get(KEY) is None
    other.put(KEY, PARTS)
    assert other.get(KEY) is None
    assert plan_cache({}) is None
    PlanCache(tmp_path / "good", limit=10).put(KEY, PARTS)


# Real users, limits and deaths: other processes

PRELUDE = """
import os, sys, warnings
from pathlib import Path
from treadle.runtime import cache
from treadle.runtime.cache import PlanCache, fingerprint
folder = Path(sys.argv[1])
store = PlanCache(folder)
"""


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    run = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    return subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A place that any user can reach; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


AS_ANOTHER = """
if os.geteuid() == 0:
    os.setuid(65534)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(store.get("key"))
    store.put("other", {"plan": b"x"})
    store.put("other", {"plan": b"x"})
    print(*[w.message for w in said], sep="; ")
"""


def test_a_read_only_folder(open_place: Path) -> None:
    folder = open_place / "plans"
    PlanCache(folder).put("key", {"plan": b"kept"})
    for path in (*folder.rglob("*"), folder):
        if os.geteuid() == 0:
            os.chown(path, 65534, -1)
        path.chmod(0o500 if path.is_dir() else 0o400)
    found, said = output(child(AS_ANOTHER, folder)).splitlines()
    (folder / "v1").chmod(0o700)  # so that it can be removed
    folder.chmod(0o700)
    assert found == "{'plan': b'kept'}"
    assert said.startswith(f"plan cache: {folder} cannot be written: Permission denied.")
    assert ";" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("is_made", [True, False])
def test_a_folder_of_roots(open_place: Path, is_made: bool) -> None:
    folder = open_place / "plans"
    if is_made:
        PlanCache(folder).put("key", {"plan": b"x"})
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    found, said = output(child(AS_ANOTHER, folder)).splitlines()
    assert found == "None"
    cause = "belongs to user 0, this process is 65534" if is_made else "Permission denied"
    assert cause in said
    assert ";" not in said


def test_a_file_that_grows_too_large(folder: Path) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    store.put("large", {"object": bytes(100_000)})
    store.put("small", {"object": bytes(100)})
    print(*[w.message for w in said], sep="; ")
print(store.get("large"), len(store.get("small")["object"]), len(os.listdir(folder / "v1")))
"""
    said, found = output(child(script, folder)).splitlines()
    assert f"cannot be written: {os.strerror(errno.EFBIG)}" in said
    assert found == "None 100 1"


# Each entry's parts belong together: the number, and bytes that follow from it. Sizes differ, so
# that a mixture of two writers shows.
HAMMER = """
import random
draw = random.Random(int(sys.argv[2]))
keys = [fingerprint([str(n)]) for n in range(4)]
hits = 0
for turn in range(300):
    key = draw.choice(keys)
    if draw.random() < 0.5:
        n = draw.randrange(256)
        store.put(key, {"n": bytes([n]), "key": key.encode(), "object": bytes([n]) * (n * 100)})
    elif (found := store.get(key)) is not None:
        n = found["n"][0]
        assert found == {"n": bytes([n]), "key": key.encode(), "object": bytes([n]) * (n * 100)}
        hits += 1
    if draw.random() < 0.02:
        store.clear()
print(hits)
"""


def test_many_processes_on_the_same_keys(store: PlanCache, folder: Path) -> None:
    children = [child("warnings.simplefilter('error')\n" + HAMMER, folder, n) for n in range(4)]
    hits = [int(output(c)) for c in children]
    assert min(hits) > 10
    assert len(files(folder)) <= 4
    assert all(name.endswith(".plan") for name in files(folder))


def test_many_processes_over_the_limit(folder: Path) -> None:
    """All of them remove what the others write: no one may stumble."""
    small = "warnings.simplefilter('error')\nstore = PlanCache(folder, 40_000)\n"
    children = [child(small + HAMMER, folder, n) for n in range(3)]
    assert sum(int(output(c)) for c in children) > 10
    store = PlanCache(folder, 40_000)
    store.put(KEY, PARTS)
    assert store.info().bytes <= 40_000


def test_many_threads_on_the_same_keys(store: PlanCache, folder: Path) -> None:
    wrong: list[object] = []
    hits = [0] * 6

    def work(me: int) -> None:
        draw = random.Random(me)
        for _ in range(150):
            name = key(draw.randrange(3))
            n = draw.randrange(256)
            store.put(name, {"n": bytes([n]), "object": bytes([n]) * (n * 50)})
            found = store.get(key(draw.randrange(3)))
            if found is not None:
                hits[me] += 1
                if found["object"] != found["n"] * (found["n"][0] * 50):
                    wrong.append(found)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(hits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(hits) > 0
    assert store.info().entries == len(files(folder)) == 3


MID_WRITE = """
def stop(*given, **options):
    print("written aside", flush=True)
    sys.stdin.read()
os.replace = stop
store.put("key", {"object": bytes(5000)})
"""


def test_a_writer_killed_before_the_rename(store: PlanCache, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + MID_WRITE, folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written aside\n"
        process.kill()
    (aside,) = files(folder)
    assert aside.startswith(".aside-")
    assert store.get("key") is None
    assert store.info().entries == 0
    assert store.info().bytes > 5000
    store.put("key", PARTS)  # it may still be someone's, who is only slow
    assert store.clear() == 1
    assert files(folder) == [aside]
    age(folder / "v1" / aside, STALE / 1e9 + 60)
    store.put("key", PARTS)
    assert aside not in files(folder)
    assert store.get("key") == PARTS


KILLED = """
n = 0
while True:
    n = (n + 1) % 256
    store.put("key", {"n": bytes([n]), "object": bytes([n]) * 300_000})
    print(n, flush=True)
"""


def test_a_writer_killed_at_any_moment(store: PlanCache, folder: Path) -> None:
    draw = random.Random(0)
    for _ in range(8):
        with child(KILLED, folder) as process:
            assert process.stdout is not None
            for _ in range(draw.randint(1, 20)):
                process.stdout.readline()
            time.sleep(draw.random() * 0.002)
            process.kill()
        found = store.get("key")
        assert found is not None
        assert found["object"] == found["n"] * 300_000
    for name in files(folder):
        if name.startswith("."):
            age(folder / "v1" / name, STALE / 1e9 + 60)
    store.put("key", PARTS)
    assert len(files(folder)) == 1


def test_a_file_aside_from_the_future_is_removed(store: PlanCache, folder: Path) -> None:
    """A clock that went back: otherwise it would stay until then."""
    store.put(KEY, PARTS)
    aside = folder / "v1" / f".aside-{'0' * 32}"
    aside.write_bytes(b"x")
    age(aside, -STALE / 1e9 - 60)
    store.put(KEY, PARTS)
    assert not aside.exists()
