"""What every backend gives, the path that all compiled ones share, and the key of the plan cache."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from cuda_backend import needs_gpu
from fake_cuda import FakeDriver, fake_gpu
from interpreted_backend import InterpretedBackend
from refusals import refused
from treadle import losses, nn, optim, pipeline
from treadle.backends import compiled, registry, stored, views
from treadle.backends.cpu.backend import CPU, CpuToolchain
from treadle.backends.cuda.backend import CudaToolchain
from treadle.backends.cuda.stored import packed_code, unpacked_code
from treadle.backends.protocol import RescheduleError
from treadle.backends.registry import DEVICES, FASTEST, REFERENCE, backend
from treadle.backends.stored import SHAPELESS, UNRELATED, fingerprint_of, key_of
from treadle.base.errors import DeviceError, IndexRangeError
from treadle.compile_report import CompileOptions, CompileReport
from treadle.kernel.launch import CooperativeLaunch, Launch, LibraryLaunch
from treadle.kernel.plan import Entry, Plan
from treadle.runtime.cuda.code import CudaCode
from treadle.runtime.cuda.compiler import CUBIN
from treadle.runtime.cuda.conv import NoLibraryCallError, every_planned
from treadle.runtime.cuda.launches import Code
from treadle.runtime.executable import Ceilings
from treadle.step import looking

SPECS = {"x": td.Spec((8, 20)), "y": td.Spec((8,), td.int32)}
BATCH = {"x": np.ones((8, 20), np.float32), "y": np.arange(8, dtype=np.int32) % 4}


def step_on(device: str, **options: Any) -> td.TrainStep:
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    return td.compile_step(
        model,
        lambda m, b: losses.cross_entropy(m(b["x"]), b["y"]),
        optim.adam(1e-3),
        SPECS,
        device=device,
        options=td.CompileOptions(**options),
    )


# What every backend gives


@pytest.mark.parametrize("name", DEVICES)
def test_a_backend_has_its_device_s_name_and_memory(name: str) -> None:
    found = backend(name)
    assert found.name == found.memory.device == name
    assert (found.toolchain(CompileOptions()) is None) == (name == REFERENCE)


def test_an_unknown_device_is_named_with_those_there_are() -> None:
    with pytest.raises(DeviceError, match="'tpu' is not available. Use .*oracle, cpu, cuda"):
        backend("tpu")


def test_auto_ends_with_a_device_that_is_always_there() -> None:
    assert backend(FASTEST[-1]).why_not() is None


def test_a_device_that_is_not_there_says_why_and_what_helps() -> None:
    found = backend("cuda")
    cause = found.why_not()
    if cause is None:
        found.require()
    else:
        with pytest.raises(DeviceError) as error:
            found.require()
        assert error.value.cause == cause


# Profiles


def test_a_profile_of_the_oracle_is_by_op() -> None:
    step = step_on("oracle")
    before = step.state_dict()
    profile = step.profile(BATCH)
    ops = {row.kernel.name: row for row in profile.kernels}
    assert ops["contract"].kernel.calls == 5, "two layers forwards, three gradients"
    assert all(row.seconds > 0 and row.kernel.nbytes > 0 for row in profile.kernels)
    assert profile.seconds == pytest.approx(sum(r.seconds for r in profile.kernels))
    assert all(np.array_equal(v, before[n]) for n, v in step.state_dict().items())
    assert "contract" in str(profile)


def test_a_profile_of_the_cpu_has_every_kernel() -> None:
    step = step_on("cpu")
    assert {r.kernel for r in step.profile(BATCH).kernels} == set(step.report.kernels)
    kernel = step.kernels[0]
    assert "define" in kernel.llvm
    refused(lambda: kernel.cuda, DeviceError, "kernel.cuda", "llvm, assembly")


@pytest.mark.parametrize("debug", [False, True])
def test_a_profile_of_a_gpu_times_each_launch(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A real library, where there is one, must not multiply in the memory of a fake.
    monkeypatch.setattr("treadle.backends.cuda.backend.ceilings", lambda: Ceilings(math.inf, 1e12))
    with fake_gpu() as driver:  # on which everything takes a millisecond
        step = step_on("cuda", debug=debug)
        graphs = len(driver.graphs)
        profile = step.profile(BATCH)
        assert len(driver.graphs) == graphs, "the graph that was timed is given back"
    calls = sum(facts.calls for facts in step.report.kernels)
    assert 0 < len(profile.kernels) <= calls
    assert profile.seconds * 1e3 == pytest.approx(round(profile.seconds * 1e3))
    assert {line for row in profile.kernels for line in row.lines}, "lines of the model"


@needs_gpu
@pytest.mark.parametrize("wide", [16, 4096])
def test_a_profile_of_a_real_gpu_adds_up_to_about_a_step(wide: int) -> None:
    """It is longer, as launches do not overlap, and an event stands between two of them."""
    model = nn.Sequential(nn.Linear(1024, wide), nn.ReLU(), nn.Linear(wide, 1024))
    step = td.compile_step(
        model, lambda m, b: (m(b) ** 2).mean(), optim.adam(1e-3), td.Spec((1024, 1024))
    )
    rows = np.ones((1024, 1024), np.float32)
    before = step.params
    profile = step.profile(rows)
    assert all(np.array_equal(v, before[n]) for n, v in step.params.items())
    assert all(0 <= row.ceiling < 3 for row in profile.kernels), str(profile)
    assert 1e-6 < profile.seconds < 0.1, str(profile)


# Shared memory


def test_a_kernel_with_too_much_shared_memory_is_refused_by_name() -> None:
    driver = FakeDriver()
    driver.most_shared = 99 << 10  # compute capability 8.6 and 8.9
    with fake_gpu(driver):
        Code([CUBIN], [Launch("kernel_0", 1, 128, 99 << 10)])
        with pytest.raises(DeviceError, match="kernel_1 needs 112,640 bytes .* at most 101,376 on"):
            Code([CUBIN], [Launch("kernel_1", 1, 128, 110 << 10)])


# The path that compiled backends share


@dataclasses.dataclass(frozen=True)
class Lacking(CpuToolchain):
    """A toolchain whose library lacks a call, which shows when a program is loaded."""

    lacks: bool = True

    def load(self, graph: Any, built: Any) -> Any:
        if self.lacks:
            lacking = dataclasses.replace(self, lacks=False)
            raise RescheduleError(lacking, "conv: no plan runs, of float32[1, 2]")
        return CpuToolchain.load(self, graph, built)


def test_a_program_is_scheduled_once_more_if_a_library_lacks_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduled: list[bool] = []
    usual = CpuToolchain.schedule

    def noted(self: Lacking, graph: Any, options: Any) -> Any:
        scheduled.append(self.lacks)
        return usual(self, graph, options)

    monkeypatch.setattr(Lacking, "schedule", noted, raising=False)
    monkeypatch.setattr(compiled, "plan_cache", lambda: None)
    toolchain = Lacking(CPU.toolchain(CompileOptions()).processor)
    graph = td.trace(lambda x: x + 1, td.Spec((2,)))
    report = CompileReport("cpu", "float32")
    program = compiled.load(toolchain, graph, report, CompileOptions(), "forward")
    assert scheduled == [True, False]
    assert len(report.programs) == 1
    assert "not by a library: conv: no plan runs, of float32[1, 2]" in str(report)
    (found,) = program.run({name: np.array([1.0, 2.0]) for name in graph.leaves})
    assert found.tolist() == [2.0, 3.0]


def test_a_report_says_that_there_is_no_library_for_attention() -> None:
    def attention(q, k, v):
        return [td.attention(q, k, v)]

    report = CompileReport("cuda", "float32")
    with fake_gpu():
        for function, count in ((attention, 3), (attention, 3), (lambda x: [x + 1], 1)):
            graph = td.trace(function, *[td.Spec((1, 2, 40, 8), td.bfloat16)] * count)
            backend("cuda").load(graph, report, CompileOptions(), "forward")
    assert str(report).count("not by a library: attention, convolutions: cuDNN or its") == 1


def test_all_calls_that_a_library_lacks_are_found_at_once() -> None:
    calls = {i: LibraryLaunch(f"call{i}", (), (), ()) for i in range(4)}

    def plan(i: int, call: LibraryLaunch) -> str:
        if i % 2:
            raise NoLibraryCallError(call, f"no plan for {i}")
        return call.name

    with pytest.raises(NoLibraryCallError) as caught:
        every_planned(calls, plan)
    toolchain = CudaToolchain()
    again = toolchain._after(caught.value)
    assert isinstance(again, RescheduleError)
    assert again.causes == ("call1: no plan for 1, of ", "call3: no plan for 3, of ")
    assert again.toolchain.without == {("call1", (), ()), ("call3", (), ())}
    assert again.toolchain._after(caught.value) is caught.value, "once more would not end"
    assert every_planned({0: calls[0]}, plan) == {0: "call0"}


# A GPU's code in the plan cache

CODE = CudaCode(
    (Launch("kernel_0", 1, 32, 64),),
    (CooperativeLaunch("cooperative_0", (0,), 1, (((0, 2),),), 3, 128, 0),),
    (CUBIN + b"code",),
    {"a matmul": list(range(8))},
    {0: b"a plan"},
    frozenset([("conv", (((1, 2), "float32"),), (("stride0", 1.0),))]),
)
PLAN = Plan((Entry("kernel.0", 1, False, 0),), (), (), (), (), (), (), 0)


def test_a_gpu_s_code_is_read_as_it_was_stored() -> None:
    assert unpacked_code(packed_code(CODE), PLAN) == CODE


@pytest.mark.parametrize(
    "change",
    [
        {"object 0": b"something else"},
        {"algorithms": b'{"a matmul": [1, 2]}'},
        {"launches": b"[]"},
    ],
)
def test_a_gpu_s_code_that_is_something_else_is_not_read(change: dict[str, bytes]) -> None:
    assert unpacked_code(packed_code(CODE) | change, PLAN) is None


# The key of the plan cache


def copied(folder: Path) -> Path:
    skipped = shutil.ignore_patterns("__pycache__", *UNRELATED - {"cli"})
    return Path(shutil.copytree(stored.ROOT, folder / "treadle", ignore=skipped))


def test_a_change_of_any_file_that_shapes_programs_is_another_key(tmp_path: Path) -> None:
    root = copied(tmp_path)
    known = fingerprint_of(root)
    for part in (
        "base/dtypes.py",
        "base/memory.py",
        "backends/compiled.py",
        "backends/cuda/stored.py",
        "domains/philox.py",
        "autodiff/backward.py",
        "compile_report.py",
        "kernel/target.py",
    ):
        path = root / part
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        found = fingerprint_of(root)
        assert found != known, part
        known = found
    (root / "backends" / "another.py").write_text("")
    assert fingerprint_of(root) != known, "a new file"


def test_a_change_of_the_command_line_is_not(tmp_path: Path) -> None:
    root = copied(tmp_path)
    known = fingerprint_of(root)
    os.utime(root / "cli" / "main.py", ns=(1, 1))
    assert fingerprint_of(root) == known


def test_every_folder_that_is_left_out_is_one() -> None:
    assert all((stored.ROOT / name).is_dir() for name in UNRELATED - {"__pycache__"})


CHANGES: dict[str, object] = {
    "on_new_shape": "specialise",
    "max_shapes": 3,
    "verify": "full",
    "detect_anomaly": True,
    "optimize": False,
    "rewrite": False,
    "memory_budget": 0.5,
    "numerics": "strict",
    "debug": True,
    "deterministic": True,
    "target": "x86-64-v2",
    "check_indices": False,
    "search": "measured",
    "recompute": False,
    "seconds": 1.0,
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(CompileOptions)])
def test_options_are_in_the_key_unless_they_shape_nothing(name: str) -> None:
    """An option that is new is in the key until somebody says that it need not be."""
    graph = td.trace(lambda x: x + 1, td.Spec((2,)))
    toolchain = CPU.toolchain(CompileOptions())
    usual, other = CompileOptions(), CompileOptions(**{name: CHANGES[name]})
    is_same = key_of(graph, usual, toolchain) == key_of(graph, other, toolchain)
    assert is_same == (name in SHAPELESS)


def test_another_target_is_another_key() -> None:
    graph = td.trace(lambda x: x + 1, td.Spec((2,)))
    usual = CPU.toolchain(CompileOptions())
    tuned = usual.tuned((("small", 1),))
    assert tuned.target.small == 1
    keys = {key_of(graph, CompileOptions(), t) for t in (usual, tuned)}
    assert len(keys) == 2


# A backend of the tests alone


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fourth device, whose kernels run through the interpreter of the loop IR."""
    usual, other = registry.backend, InterpretedBackend()

    def found(name: str) -> Any:
        return other if name == other.name else usual(name)

    for module in (registry, pipeline, looking, views):
        monkeypatch.setattr(module, "backend", found)
    return other.name


def test_a_step_trains_on_another_backend(interpreter: str) -> None:
    ours, theirs = step_on(interpreter), step_on("cpu")
    assert ours.report.device == interpreter
    for _ in range(2):
        assert ours(BATCH).loss == pytest.approx(theirs(BATCH).loss, rel=1e-5)
    several = [step.run([BATCH] * 3).losses for step in (ours, theirs)]
    assert np.allclose(*several, rtol=1e-5)
    assert ours.evaluate(BATCH).loss == pytest.approx(theirs.evaluate(BATCH).loss, rel=1e-4)
    assert ours.count == 5
    for name, value in ours.params.items():
        assert np.allclose(value, theirs.params[name], atol=1e-5), name


def test_another_backend_has_all_that_a_step_has(interpreter: str) -> None:
    step = step_on(interpreter)
    before = step.state_dict()
    assert {r.kernel for r in step.profile(BATCH).kernels} == set(step.report.kernels)
    assert step.report.target == "the loop IR"
    assert all("kernel " in kernel.text and kernel.lines for kernel in step.kernels[:1])
    assert "kernel" in step.kernels[0].text
    forward = step.attach(lambda m, x: m(x), SPECS["x"])
    first = forward(BATCH["x"])
    step(BATCH)
    assert not np.array_equal(forward(BATCH["x"]), first), "the same values, never stale"
    step.load_state_dict(before)
    assert np.array_equal(forward(BATCH["x"]), first)
    with pytest.raises(DeviceError, match="the values are on 'interpreter'"):
        td.compile_forward(nn.Linear(2, 2), lambda m, x: m(x), td.Spec((1, 2)), share=step)


def test_another_backend_checks_indices(interpreter: str) -> None:
    step = step_on(interpreter, debug=True)
    assert np.isfinite(step(BATCH).loss)
    with pytest.raises(IndexRangeError):
        step(BATCH | {"y": np.full(8, 4, np.int32)})
