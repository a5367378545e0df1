"""Compiled steps and the plan cache: found again, never where it does not fit, never in the way."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treadle as td
from plans import failing
from treadle import nn, optim
from treadle.backends import stored
from treadle.backends.cpu import backend as cpu
from treadle.base.errors import CacheWarning
from treadle.kernel.plan import Plan
from treadle.runtime import cache as caching
from treadle.runtime.cache import PlanCache
from treadle.runtime.cpu.native import compile_object, host
from treadle.runtime.cpu.targets import Target

TABLE = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


class Net(nn.Module):
    """A product, a table of numbers in two dtypes, and tokens that point into it."""

    def __init__(self, width: int = 4) -> None:
        self.fc = nn.Linear(3, width)

    def forward(self, x, y):
        narrow = td.cast(td.tensor(TABLE.astype(ml_dtypes.bfloat16)), td.float32)
        narrow = narrow * td.cast(td.tensor(np.array(1.5, ml_dtypes.bfloat16)), td.float32)
        rows = td.embedding(y, td.tensor(TABLE)) + td.embedding(y, narrow)
        return td.tanh(self.fc(x)) * rows.mean()


SPECS = {"x": td.Spec((5, 3)), "y": td.Spec((5,), td.int32)}
BATCH = {"x": np.arange(15.0).reshape(5, 3) / 10, "y": np.array([0, 2, 1, 2, 0])}


def make(width: int = 4, rate: float = 0.1, **options: Any) -> td.TrainStep:
    return td.compile_step(
        Net(width),
        lambda model, b: (model(b["x"], b["y"]) ** 2).mean(),
        optim.sgd(rate, momentum=0.9),
        SPECS,
        device="cpu",
        options=td.CompileOptions(**options),
    )


def trained(step: td.TrainStep) -> list[bytes]:
    losses = np.array([step(BATCH).loss for _ in range(3)])
    return [losses.tobytes(), *(v.tobytes() for v in step.state_dict().values())]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "plans"))
    monkeypatch.setattr(caching, "_warned", False)
    return tmp_path / "plans"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("v1/*.plan"))


# Found again


def test_what_was_compiled_is_found_again(folder: Path) -> None:
    first = make()
    expected = trained(first)
    assert first.report.cache_hits == 0
    assert len(entries(folder)) == 1
    second = make()
    assert second.report.cache_hits == 1
    assert not {"schedule", "plan_buffers", "render", "compile"} & set(second.report.seconds)
    assert trained(second) == expected
    assert "yes" in str(second.report).splitlines()[-2]
    assert [k.text for k in second.kernels] == [k.text for k in first.kernels]
    assert second.report.peak_bytes == first.report.peak_bytes


def test_every_program_of_a_step_is_found_again(folder: Path) -> None:
    def all_of_them(step: td.TrainStep) -> list[bytes]:
        forward = step.attach(lambda m, b: m(b["x"], b["y"]), SPECS)
        found = [forward(BATCH), *step.gradients(BATCH).values()]
        found += [
            np.float64(step.evaluate(BATCH).loss),
            *step(BATCH, grad_norms=True).grad_norms.values(),
        ]
        assert forward.report.cache_hits == is_warm
        return [np.asarray(a).tobytes() for a in found]

    is_warm = False
    expected = all_of_them(make())
    count = len(entries(folder))
    is_warm = True
    step = make()
    assert all_of_them(step) == expected
    assert step.report.cache_hits == len(step.report.programs) == 4
    assert len(entries(folder)) == count


FRESH = """
import json, sys
sys.path.insert(0, {tests!r})
from treadle.backends.cpu import backend as cpu
from test_backend_cache import make, trained

def refuse(*_):
    raise AssertionError("nothing is compiled")

if {is_warm}:
    cpu.compile_object = cpu.render_program = cpu.schedule = refuse
step = make()
print(json.dumps([step.report.cache_hits, [t.hex() for t in trained(step)]]))
"""


def in_a_fresh_process(is_warm: bool) -> subprocess.Popen[str]:
    script = FRESH.format(tests=str(Path(__file__).parent), is_warm=is_warm)
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> tuple[int, list[bytes]]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    hits, found = json.loads(output)
    return hits, [bytes.fromhex(f) for f in found]


def test_another_process_compiles_nothing() -> None:
    expected = trained(make())
    assert result(in_a_fresh_process(is_warm=True)) == (1, expected)


def test_processes_that_compile_at_one_time_do_not_disturb_each_other(folder: Path) -> None:
    running = [in_a_fresh_process(is_warm=False) for _ in range(3)]
    found = [result(process)[1] for process in running]
    assert found[0] == found[1] == found[2]
    assert len(entries(folder)) == 1
    assert make().report.cache_hits == 1


def test_without_a_cache_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "off", ""):
        monkeypatch.setenv("TREADLE_CACHE", value)
        step = make()
        assert step.report.cache_hits == 0
        assert "cache" not in step.report.seconds
    assert not folder.exists()


# Never where it does not fit


def test_another_graph_or_other_options_have_their_own_plan(folder: Path) -> None:
    for i, changed in enumerate(
        [{}, {"width": 5}, {"optimize": False}, {"debug": True}, {"optimize": False, "debug": True}]
    ):
        assert make(**changed).report.cache_hits == 0, changed
        assert len(entries(folder)) == i + 1
    assert make(rate=0.3).report.cache_hits == 1, "numbers of the optimizer are state"


TARGETS: dict[str, Callable[[Target], Target]] = {
    "another processor": lambda t: replace(t, cpu="x86-64-v3"),
    "fewer features": lambda t: replace(t, features=t.features.replace("+avx2", "-avx2")),
    "more features": lambda t: replace(t, features=t.features + ",+amx-tile"),
    "narrower vectors": lambda t: replace(t, machine=replace(t.machine, width=4)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_plan_of_another_machine_is_not_used(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    other = TARGETS[name](host())
    assert other != host()
    monkeypatch.setattr(cpu, "chosen_target", lambda _: other)
    step = make()
    assert step.report.cache_hits == 0
    assert len(entries(folder)) == 2
    assert np.isfinite(step(BATCH).loss)
    assert make().report.cache_hits == 1, "but its own"


def test_another_compiler_has_its_own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    for module, name in ((cpu, "compiler_version"), (stored, "own_sources")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda: "another")
            assert make().report.cache_hits == 0
    monkeypatch.setattr(stored, "__version__", "0.0.0")
    assert make().report.cache_hits == 0


# Entries that are not what was written


def spoilt(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "empty": b"",
        "garbage": bytes(range(256)) * 20,
        "half": content[:middle],
        "a bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b"\0" * 100,
        "text": b"TREADLE\x1a" + b"hello",
    }[how]


@pytest.mark.parametrize("how", ["empty", "garbage", "half", "a bit", "longer", "text"])
def test_a_spoilt_entry_is_built_again(how: str, folder: Path) -> None:
    expected = trained(make())
    (entry,) = entries(folder)
    entry.write_bytes(spoilt(entry.read_bytes(), how))
    step = make()
    assert step.report.cache_hits == 0
    assert trained(step) == expected
    assert make().report.cache_hits == 1, "the entry is whole again"


Parts = dict[str, bytes]


def with_plan(change: Callable[[dict[str, Any]], object]) -> Callable[[Parts], Parts]:
    """Parts with a plan whose numbers are changed."""

    def changed(parts: Parts) -> Parts:
        names = [f.name for f in fields(Plan)]
        plan = dict(zip(names, json.loads(parts["plan"]), strict=True))
        change(plan)
        return parts | {"plan": json.dumps(list(plan.values())).encode()}

    return changed


def first_call(plan: dict[str, Any]) -> list[Any]:
    return plan["steps"][0][0][0]


def set_at(target: list[Any], place: int, value: object) -> None:
    target[place] = value


def without(parts: Parts, prefix: str) -> Parts:
    return {n: p for n, p in parts.items() if not n.startswith(prefix)}


def with_constants(data: bytes) -> Callable[[Parts], Parts]:
    return lambda parts: {n: data if n.startswith("constant") else p for n, p in parts.items()}


FOREIGN = compile_object("define void @something() { ret void }")
WRONG: dict[str, Callable[[Parts], Parts]] = {
    "no plan": lambda p: without(p, "plan"),
    "a plan that is no JSON": lambda p: p | {"plan": b"{"},
    "a plan that is no text": lambda p: p | {"plan": b"\xff\xfe"},
    "a plan of another kind": lambda p: p | {"plan": b"[1, 2]"},
    "an empty plan": lambda p: p | {"plan": b"{}"},
    "a deep plan": lambda p: p | {"plan": b"[" * 100_000},
    "no leaves": with_plan(lambda p: p.update(leaves=[])),
    "leaves of another type": with_plan(lambda p: set_at(p["leaves"][0], 2, [[9], "float32"])),
    "an unknown dtype": with_plan(lambda p: set_at(p["leaves"][0], 2, [[3], "float3"])),
    "other outputs": with_plan(lambda p: p["outputs"].pop()),
    "an output somewhere": with_plan(lambda p: set_at(p["outputs"][0], 2, 10**6)),
    "a negative slot": with_plan(lambda p: set_at(p["outputs"][0], 2, -1)),
    "an arena too small": with_plan(lambda p: p.update(arena=-64)),
    "a buffer far away": with_plan(lambda p: set_at(p["slots"][-1], 2, 10**12)),
    "a call of nothing": with_plan(lambda p: set_at(first_call(p), 0, 999)),
    "a call on nothing": with_plan(lambda p: set_at(first_call(p)[2], 0, 10**6)),
    "a call without tasks": with_plan(lambda p: set_at(first_call(p), 1, 0)),
    "words for numbers": with_plan(lambda p: set_at(first_call(p), 1, "many")),
    "another symbol": with_plan(lambda p: set_at(p["entries"][0], 0, "nothing")),
    "no code": lambda p: without(p, "object"),
    "empty code": lambda p: p | {"object 0": b""},
    "garbage for code": lambda p: p | {"object 0": bytes(range(256)) * 9},
    "half of the code": lambda p: p | {"object 0": p["object 0"][: len(p["object 0"]) // 2]},
    "code of something else": lambda p: p | {"object 0": FOREIGN},
    "no constants": lambda p: without(p, "constant"),
    "empty constants": with_constants(b""),
    "short constants": with_constants(b"\0"),
    "long constants": with_constants(b"\0" * 1000),
    "constants of a wider dtype": with_plan(lambda p: set_at(p["constants"][0][2], 1, "float64")),
    "constants of an unknown dtype": with_plan(lambda p: set_at(p["constants"][0][2], 1, "float3")),
    "constants of another shape": with_plan(lambda p: set_at(p["constants"][0][2], 0, [7])),
    "constants of a negative shape": with_plan(lambda p: set_at(p["constants"][0][2], 0, [-1])),
    "a constant somewhere": with_plan(lambda p: set_at(p["constants"][0], 0, 10**6)),
    "a constant that is not there": with_plan(lambda p: set_at(p["constants"][0], 1, "none")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_sealed_entry_with_wrong_parts_is_built_again(name: str, folder: Path) -> None:
    expected = trained(make())
    (entry,) = entries(folder)
    store = PlanCache(folder)
    parts = store.get(entry.stem)
    assert parts is not None
    changed = WRONG[name](parts)
    assert changed != parts
    store.put(entry.stem, changed)
    step = make()
    assert step.report.cache_hits == 0
    assert trained(step) == expected
    assert store.get(entry.stem) == parts, "what is right is stored again"


# Never in the way


def test_a_folder_that_is_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", failing(errno.EROFS))
    with pytest.warns(CacheWarning, match="cannot be written: Read-only file system"):
        step = make()
    assert np.isfinite(step(BATCH).loss)
    assert not folder.exists()


def test_reading_from_a_read_only_folder_works(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(make())
    for name in ("mkdir", "utime", "replace", "unlink"):
        monkeypatch.setattr(os, name, failing(errno.EROFS))
    step = make()
    assert step.report.cache_hits == 1
    assert trained(step) == expected


def test_a_disk_that_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "_write", failing(errno.ENOSPC))
    with pytest.warns(CacheWarning, match="No space left on device"):
        step = make()
    assert np.isfinite(step(BATCH).loss)
    assert make().report.cache_hits == 0, "said once, and then no more"
    assert entries(folder) == []


def test_a_folder_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(make())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(CacheWarning, match="belongs to user"):
        step = make()
    assert step.report.cache_hits == 0, "what another may have written is not run"
    assert trained(step) == expected


def test_a_folder_that_others_can_write_to(folder: Path) -> None:
    make()
    folder.chmod(0o777)
    with pytest.warns(CacheWarning, match="others can write"):
        step = make()
    assert step.report.cache_hits == 0
    assert np.isfinite(step(BATCH).loss)


def test_a_file_in_place_of_the_folder(folder: Path) -> None:
    folder.write_text("not a folder")
    with pytest.warns(CacheWarning, match="Not a directory"):
        step = make()
    assert np.isfinite(step(BATCH).loss)
    assert folder.read_text() == "not a folder"


def test_a_plan_larger_than_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE_MB", "0.001")
    with pytest.warns(CacheWarning, match="larger than the limit"):
        step = make()
    assert np.isfinite(step(BATCH).loss)
    assert entries(folder) == []
