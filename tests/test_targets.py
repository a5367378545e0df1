"""Targets: their names, what they need, and the op table on each that this machine can run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import numpy as np
import pytest

import treadle as td
from backend import assert_within, build
from op_samples import COMPUTED, agreement, prepared, samples_in
from trajectories import TRAJECTORIES
from treadle import losses, nn, optim
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, DeviceError
from treadle.codegen.llvm.driver import render_program
from treadle.ir.op import Op
from treadle.ir.types import TensorType
from treadle.kernel.machine import (
    ARM64,
    LEVELS,
    NATIVE,
    SHORT,
    WIDTHS,
    Machine,
    features_of,
    target_name,
)
from treadle.runtime.cpu import native
from treadle.runtime.cpu.native import LibraryCall, compile_object, host, processor
from treadle.runtime.cpu.objects import missing_names
from treadle.runtime.cpu.targets import Processor, named_target, target_of
from treadle.schedule.schedule import schedule

IS_X86 = platform.machine() in ("x86_64", "AMD64")
needs_x86 = pytest.mark.skipif(not IS_X86, reason="levels of x86-64")


def runs(name: str) -> bool:
    try:
        return target_of(name, processor()) is not None
    except DeviceError:
        return False


def x86(*features: str, cpu: str = "some") -> Processor:
    return Processor("x86_64-unknown-linux-gnu", cpu, dict.fromkeys(features, True))


ALL_OF_V4 = features_of("x86-64-v4")
ARM = Processor("aarch64-unknown-linux-gnu", "cortex-a72", {"neon": True})


# Names


@pytest.mark.parametrize("given", [NATIVE, ARM64, *LEVELS, *WIDTHS, *map(str, WIDTHS)])
def test_targets_by_name_or_width(given: str | int) -> None:
    assert target_name(given) == str(given)
    assert td.CompileOptions(target=given).target == given


@pytest.mark.parametrize(
    "given", ["", "avx2", "x86-64", "x86-64-v5", 3, 0, -8, 128, True, None, 8.0]
)
def test_what_is_no_target(given: object) -> None:
    with pytest.raises(ArgumentError) as found:
        td.CompileOptions(target=given)  # type: ignore[arg-type]
    assert repr(given) in str(found.value)
    for name in (NATIVE, *LEVELS, *SHORT, ARM64, "8", "16"):
        assert name in str(found.value), "what is accepted"


def test_short_names_of_levels() -> None:
    assert [target_name(short) for short in ("v2", "v3", "v4")] == list(LEVELS)


def test_the_option_wins_over_the_environment_unless_it_is_the_default() -> None:
    assert named_target(NATIVE, {}) == NATIVE
    assert named_target(NATIVE, {"TREADLE_TARGET": " 8 "}) == "8"
    assert named_target("x86-64-v2", {"TREADLE_TARGET": "8"}) == "x86-64-v2"
    assert named_target(16, {"TREADLE_TARGET": "wrong"}) == "16", "it is not read"
    with pytest.raises(ArgumentError, match="TREADLE_TARGET: 'wrong' is no target"):
        named_target(NATIVE, {"TREADLE_TARGET": "wrong"})


# What a processor can run


def test_a_level_that_the_processor_cannot_run_is_refused_with_what_is_missing() -> None:
    old = x86(*features_of("x86-64-v2"), cpu="nehalem")
    assert target_of("x86-64-v2", old).width == 4
    with pytest.raises(DeviceError, match=r"nehalem\) cannot run x86-64-v3: .*avx2, .*f16c, fma"):
        target_of("x86-64-v3", old)
    without = x86(*(f for f in ALL_OF_V4 if f != "avx512bw"))
    with pytest.raises(DeviceError, match=r"it has no avx512bw\. Use \"native\""):
        target_of("x86-64-v4", without)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_x86_are_refused_elsewhere(level: str) -> None:
    with pytest.raises(DeviceError, match=f"{level} is a level of x86-64, .* aarch64"):
        target_of(level, ARM)


def test_arm64_is_refused_elsewhere() -> None:
    assert target_of(ARM64, ARM).machine == Machine(4, registers=32)
    with pytest.raises(DeviceError, match="this machine is x86_64"):
        target_of(ARM64, x86(*ALL_OF_V4))


def test_what_code_may_use() -> None:
    everything = x86(*ALL_OF_V4)
    wide = Machine(16, permutes=16, registers=32)
    assert target_of("x86-64-v2", everything).machine == Machine(4, 0, False, False)
    assert target_of("x86-64-v3", everything).machine == Machine(8, permutes=8)
    assert target_of("x86-64-v4", everything).machine == wide
    assert target_of(NATIVE, everything).machine == wide
    assert target_of("8", everything).machine == Machine(8, permutes=8, registers=32)
    assert target_of("32", everything).machine == Machine(32, permutes=8)
    assert target_of(NATIVE, ARM).machine == Machine(4, registers=32)
    old = x86(*features_of("x86-64-v2"))
    assert target_of(NATIVE, old).machine == Machine(4, has_fma=False, has_half=False)
    narrow = Machine(16, has_fma=False, has_half=False, registers=4)
    assert target_of("16", old).machine == narrow


def test_tiles_of_matmuls_leave_registers_for_what_is_beside_them() -> None:
    for width, registers, has_fma in [(8, 16, True), (4, 16, False), (16, 32, True), (64, 8, True)]:
        machine = Machine(width, has_fma=has_fma, registers=registers)
        sums = machine.tile_rows * machine.tile_vectors
        assert sums + machine.tile_vectors + 1 <= registers
    assert Machine(8).tile_rows == 6
    assert Machine(4, has_fma=False).tile_rows == 5
    assert Machine(16, registers=32).tile_rows == 8


@needs_x86
def test_a_level_has_no_instructions_of_the_next() -> None:
    def matmul(x, w):
        return td.cast(td.tanh(x @ w), td.float16)

    program = schedule(td.trace(matmul, td.Spec((8, 8)), td.Spec((8, 8))), True, 8)
    target = target_of("x86-64-v2", x86(*ALL_OF_V4))
    text = native.assembly(render_program(program, target.machine), target)
    names = {line.split()[0] for line in text.splitlines() if line.startswith("\tv")}
    assert not names, "what starts with v is AVX"
    assert "mulps" in text
    assert "xmm" in text


# Where it is used


def make(**options: object) -> td.TrainStep:
    def loss(model, batch):
        return losses.mse(model(batch["x"]), batch["y"])

    spec = {"x": td.Spec((4, 20)), "y": td.Spec((4, 3))}
    model = nn.Sequential(nn.Linear(20, 17), nn.Tanh(), nn.Linear(17, 3))
    return td.compile_step(
        model, loss, optim.adam(0.1), spec, device="cpu", options=td.CompileOptions(**options)
    )


BATCH = {"x": np.ones((4, 20), np.float32), "y": np.zeros((4, 3), np.float32)}


@pytest.mark.parametrize("target", [4, "8"])
def test_every_program_of_a_step_is_for_its_target(target: str | int) -> None:
    step = make(target=target)
    step(BATCH)
    step.evaluate(BATCH)
    forward = step.attach(lambda model, batch: model(batch["x"]), {"x": td.Spec((4, 20))})
    forward({"x": BATCH["x"]})
    for report in (step.report, forward.report):
        assert report.target == f"{target} ({host().cpu}, {target} lanes)"
        assert f"target {target} (" in str(report)
    texts = [k.llvm for k in step.kernels]
    assert any(f"<{target} x float>" in t for t in texts)
    lanes = [int(n) for t in texts for n in re.findall(r"<(\d+) x float>", t)]
    assert max(lanes) <= Machine(1).accumulating_vectors * int(target)


def test_functions_and_forwards_take_a_target() -> None:
    options = td.CompileOptions(target=4)
    function = td.compile(lambda x: td.exp(x) + 1, td.Spec((40,)), device="cpu", options=options)
    function(np.zeros(40, np.float32))
    assert function.report.target.startswith("4 (")
    forward = td.compile_forward(
        nn.Linear(3, 2),
        lambda model, batch: model(batch["x"]),
        {"x": td.Spec((5, 3))},
        device="cpu",
        options=options,
    )
    forward({"x": np.zeros((5, 3), np.float32)})
    assert forward.report.target.startswith("4 (")


def test_predictions_of_a_trainer_are_for_the_step_s_target() -> None:
    step = make(target=4)
    trainer = td.Trainer(step, progress="off")
    trainer.predict([BATCH], forward=lambda model, batch: model(batch["x"]))
    (attached,) = trainer._predictor._attached.values()
    assert attached.report.target.startswith("4 (")


def test_the_environment_chooses_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_TARGET", "4")
    step = make()
    step(BATCH)
    assert step.report.target.startswith("4 (")
    monkeypatch.setenv("TREADLE_TARGET", "sse")
    with pytest.raises(ArgumentError, match="TREADLE_TARGET: 'sse' is no target"):
        make()(BATCH)


def test_each_target_has_its_own_plan(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    for target in (4, 8):
        step = make(target=target)
        step(BATCH)
        assert step.report.cache_hits == 0, target
    again = make(target=4)
    again(BATCH)
    assert again.report.cache_hits == 1


def test_a_processor_that_is_not_this_one_is_refused_at_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "processor", lambda: ARM)
    with pytest.raises(DeviceError, match="x86-64-v3 is a level of x86-64"):
        make(target="x86-64-v3")(BATCH)


# float16


def halves_of(target: str, x: np.ndarray) -> np.ndarray:
    """The bits of float16 that floats are rounded to."""
    graph = td.trace(lambda x: td.cast(x, td.float16), TensorType(x.shape, dtypes.float32))
    (found,) = build(graph, target=target).on(1).run({"x": x})
    return found.view(np.uint16)


def floats_of(target: str, bits: np.ndarray) -> np.ndarray:
    """The bits of the floats that halves are, each in a vector and alone."""
    graph = td.trace(lambda x: td.cast(x, td.float32), TensorType(bits.shape, dtypes.float16))
    (found,) = build(graph, target=target).on(1).run({"x": bits.view(np.float16)})
    return found.view(np.uint32)


@needs_x86
def test_every_half_is_the_same_float_without_an_instruction() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    ours = floats_of("x86-64-v2", np.append(bits, bits[:3]))
    finite = np.isfinite(bits.view(np.float16))
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(ours[: 1 << 16][finite], expected.view(np.uint32)[finite])
    assert np.array_equal(ours[1 << 16 :], ours[:3]), "what is left over, one by one"
    if runs("x86-64-v3"):
        assert np.array_equal(ours, floats_of("x86-64-v3", np.append(bits, bits[:3])))


@needs_x86
def test_floats_are_rounded_to_halves_correctly_without_an_instruction() -> None:
    """All exponents, ties and their neighbours, denormals, what overflows, NaN and infinities."""
    every = np.arange(1 << 15, dtype=np.uint16).view(np.float16).astype(np.float32)
    every = every[np.isfinite(every)]
    middles = (every[:-1].astype(np.float64) + every[1:]).astype(np.float32) / 2
    middles = np.append(middles, np.float32(65520))
    near = [np.nextafter(middles, np.float32(s)) for s in (0, np.inf)]
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 200_003, dtype=np.uint32)
    x = np.concatenate([every, middles, *near, drawn.view(np.float32)])
    x = np.concatenate([x, -x, np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)])
    ours = halves_of("x86-64-v2", x)
    is_nan = np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(ours[~is_nan], expected[~is_nan])
    assert np.isnan(ours[is_nan].view(np.float16)).all()
    if runs("x86-64-v3"):
        assert np.array_equal(ours, halves_of("x86-64-v3", x)), "NaN too"


@needs_x86
def test_training_in_float16_without_an_instruction() -> None:
    batch = {"x": np.ones((4, 20), np.float32), "y": np.zeros((4, 3), np.float32)}

    def loss(model, b):
        return losses.mse(model(b["x"]), b["y"])

    step = td.compile_step(
        nn.Linear(20, 3),
        loss,
        optim.sgd(0.01),
        batch,
        device="cpu",
        precision="float16",
        options=td.CompileOptions(target="x86-64-v2"),
    )
    found = [step(batch).loss for _ in range(5)]
    assert np.isfinite(found).all()
    assert found[-1] < found[0]


# What code calls must be there


CALLS = """
declare half @llvm.fma.f16(half, half, half)
declare float @{name}(float)
define float @run(float %x) {{
  %y = call float @{name}(float %x)
  ret float %y
}}
"""


def test_a_function_that_is_not_there_is_an_error_not_a_crash() -> None:
    code = compile_object(CALLS.format(name="treadle_has_no_such_function"))
    assert missing_names([code]) == ["treadle_has_no_such_function"]
    with pytest.raises(DeviceError, match="calls treadle_has_no_such_function, which this process"):
        LibraryCall([code])


def test_functions_of_one_object_are_there_for_another() -> None:
    other = "define float @in_another(float %x) {\n  ret float %x\n}"
    objects = [compile_object(CALLS.format(name="in_another")), compile_object(other)]
    assert missing_names(objects) == []
    assert LibraryCall(objects).address("run")


def test_names_are_found_in_objects_of_other_systems() -> None:
    llvm = native._llvm()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(CALLS.format(name="outside"))
    machine = llvm.Target.from_triple("arm64-apple-darwin").create_target_machine(reloc="pic")
    assert missing_names([machine.emit_object(module)]) == ["outside"]


def test_a_cut_object_has_no_names() -> None:
    code = compile_object(CALLS.format(name="sinf"))
    for end in (70, len(code) // 2, len(code) - 1):
        with pytest.raises(ValueError, match=r"cut off|no names"):
            missing_names([code[:end]])


def test_the_first_program_of_a_process_may_call_libm() -> None:
    """The process's own functions are known to LLVM only from its first engine on."""
    lines = (
        "import numpy as np, treadle as td",
        "f = td.compile(lambda x: td.cos(x), td.Spec((3,)), device='cpu')",
        "print(f(np.full(3, 1e6, np.float32))[0])",
    )
    environment = os.environ | {"TREADLE_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert float(done.stdout) == pytest.approx(np.cos(1e6), rel=1e-5)


# What kernels may call: libm in float64, fmod, and what LLVM makes of copies and fills.
KNOWN = {
    "exp",
    "log",
    "tanh",
    "erf",
    "sin",
    "cos",
    "pow",
    "atan2",
    "fmod",
    "fmodf",
    "memcpy",
    "memset",
}


# The op table


TABLE = [t for t in ("4", "8", "16", "x86-64-v2", "x86-64-v3") if runs(t)]
if host().width < 16:
    TABLE.remove("16")  # such vectors are taken apart: right, but not what is meant here
MOST = 5  # samples of an op


def check(target: str, op: Op, dtype: DType, most: int = 1 << 20) -> None:
    graph, arrays = prepared(op, dtype, seed=4, most=most)
    built = build(graph, target=target)
    assert set(missing_names(list(built.objects))) <= KNOWN
    assert_within(graph, arrays, built.on(1).run(arrays), agreement(op))


@pytest.mark.parametrize("op", COMPUTED, ids=lambda op: op.name)
@pytest.mark.parametrize("target", TABLE)
def test_every_op(target: str, op: Op) -> None:
    check(target, op, dtypes.float32, MOST)


# What float16 meets where it is converted by hand: arithmetic, sums, products, functions, moves.
NARROW = ("add", "exp", "where", "cast", "reduce_sum", "reduce_max", "contract", "softmax", "pad")


@needs_x86
@pytest.mark.parametrize("name", NARROW)
def test_ops_in_float16_without_an_instruction(name: str) -> None:
    (op,) = (op for op in COMPUTED if op.name == name)
    check("x86-64-v2", op, dtypes.float16, MOST)


@pytest.mark.slow
@pytest.mark.parametrize("op", COMPUTED, ids=lambda op: op.name)
@pytest.mark.parametrize("target", [*TABLE, "1", "2", "16", "32", "64"])
def test_every_op_in_every_dtype(target: str, op: Op) -> None:
    for dtype in dtypes.ALL:
        if dtype is not dtypes.int32 and samples_in(op, dtype):
            check(target, op, dtype)


@pytest.mark.parametrize("target", ["1", "2", "32", "64"])
def test_any_width_is_right(target: str) -> None:
    """Wider than the machine's vectors, or none."""
    type_ = TensorType((5, 70), dtypes.float32)

    def several(x, y):
        found = [td.tanh(x) * y, td.erf(x), x.sum(0), x.sum(1), td.max(x, 1), x @ y.T, x.T @ y]
        return [*found, td.pad(x, [(1, 0), (2, 3)]), td.cumsum(x, 1), td.softmax(x), x.T + 1]

    graph = td.trace(several, type_, type_)
    rng = np.random.default_rng(1)
    arrays = {n: rng.normal(size=(5, 70)).astype(np.float32) for n in graph.leaves}
    assert_within(graph, arrays, build(graph, target=target).on(1).run(arrays))


@needs_x86
def test_sums_round_products_where_nothing_multiplies_and_adds_at_once() -> None:
    program = schedule(td.trace(lambda x, w: x @ w, td.Spec((8, 8)), td.Spec((8, 8))), True, 8)
    assert "@llvm.fma" in render_program(program, Machine(4))
    text = render_program(program, Machine(4, has_fma=False))
    assert "@llvm.fma" not in text
    assert "fmul" in text


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_trajectories_without_fma(name: str) -> None:
    target = "x86-64-v2" if IS_X86 else "4"
    trajectory = TRAJECTORIES[name]
    ours, exact = trajectory.compiled("cpu", target=target), trajectory.compiled("oracle")
    exact.load_params(ours.params)
    for batch in trajectory.batches(5):
        assert ours(batch).loss == pytest.approx(exact(batch).loss, rel=1e-4)
