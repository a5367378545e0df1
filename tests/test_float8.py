"""float8 products: casts of every value, scales of past steps, training, and a GPU's programs."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import treadle as td
from cuda_backend import ALONE, scheduled, with_matmuls
from cuda_on_host import no_host_compiler, run_on_host
from fake_cuda import fake_gpu
from test_kernels import run as interpreted
from treadle import losses, nn, optim
from treadle.backends.cuda.backend import CudaToolchain
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, DeviceError, DTypeError, GradientError
from treadle.frontend.coerce import cast
from treadle.frontend.functions.linear import contract
from treadle.ir.graph import Graph
from treadle.ir.ops.elementwise import CAST
from treadle.ir.ops.linear import CONTRACT
from treadle.kernel.launch import LibraryLaunch, MatmulCall, MatrixFacts, matmul_call_of
from treadle.kernel.nodes import standalone_matmul
from treadle.kernel.target import Target
from treadle.precision import float8
from treadle.runtime.cuda import blas
from treadle.runtime.cuda.batches import matrices
from treadle.runtime.cuda.conv import NoLibraryCallError
from treadle.runtime.oracle import OracleProgram

E4M3, E5M2, BF16, F32 = dtypes.float8_e4m3, dtypes.float8_e5m2, dtypes.bfloat16, dtypes.float32
DEVICES = ("oracle", "cpu")
each = pytest.mark.parametrize("dtype", dtypes.FLOAT8, ids=str)
Arrays = dict[str, np.ndarray]


# Casts


def numbers(dtype: DType) -> np.ndarray:
    """Every pattern, what lies half-way between neighbours and next to it, and far outside."""
    every = np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)
    known = np.sort(every[np.isfinite(every)])
    halves = (known[1:] + known[:-1]) / 2
    up, down = (np.nextafter(halves, np.float32(way)) for way in (np.inf, -np.inf))
    far = [1e9, -1e9, np.inf, -np.inf, np.nan, 1e-30, 1.01 * dtype.largest]
    return np.concatenate([every, halves, up, down, far]).astype(np.float32)


def by_hand(x: float, dtype: DType) -> float:
    """To the nearest of the dtype's numbers, ties to an even pattern; NaN stays, the rest ends."""
    if np.isnan(x):
        return x
    patterns = np.arange(128, dtype=np.uint8)
    known = patterns.view(dtype.numpy).astype(np.float64)
    known, patterns = known[np.isfinite(known)], patterns[np.isfinite(known)]
    away = np.abs(known - min(abs(x), dtype.largest))
    nearest = np.flatnonzero(away == away.min())
    chosen = min(nearest, key=lambda i: patterns[i] % 2)
    return float(np.copysign(known[chosen], x))


@each
def test_a_cast_is_to_nearest_even_and_saturates(dtype: DType) -> None:
    x = numbers(dtype)
    expected = np.array([by_hand(float(v), dtype) for v in x], np.float32)
    np.testing.assert_array_equal(dtypes.narrowed(x, dtype).astype(np.float32), expected)


def both_ways(x: td.Tensor) -> tuple[td.Tensor, ...]:
    return tuple(cast(cast(x, d), F32) for d in dtypes.FLOAT8)


@pytest.mark.parametrize("optimize", [True, False], ids=["in registers", "in memory"])
@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_casts_of_every_value(device: str, optimize: bool) -> None:
    x = np.concatenate([numbers(d) for d in dtypes.FLOAT8])
    options = td.CompileOptions(optimize=optimize)
    found = td.compile(both_ways, td.Spec(x.shape), device=device, options=options)(x)
    for dtype, values in zip(dtypes.FLOAT8, found, strict=True):
        expected = dtypes.narrowed(x, dtype).astype(np.float32)
        np.testing.assert_array_equal(values, expected)
        signs = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(values)[signs], np.signbit(expected)[signs])


@pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")
def test_casts_of_every_value_in_cuda_text() -> None:
    """As older chips and other makers compute them; newer ones have an instruction."""
    x = np.concatenate([numbers(d) for d in dtypes.FLOAT8])
    program = scheduled(td.trace(both_ways, td.Spec(x.shape)), fuse=False)
    for dtype, values in zip(dtypes.FLOAT8, run_on_host(program, {"x": x}), strict=True):
        np.testing.assert_array_equal(values, dtypes.narrowed(x, dtype).astype(np.float32))


# Products in a graph


def test_a_product_of_floats_of_8_bits_gives_a_wider_one() -> None:
    def product(x: td.Tensor, dtype: DType) -> td.Tensor:
        return contract(cast(x, E4M3), cast(x, E5M2), ("ab", "cb", "ac"), dtype)

    graph = td.trace(lambda x: product(x, BF16), td.Spec((2, 3)))
    assert graph.output_types[0].dtype is BF16
    with pytest.raises(DTypeError, match="cannot give"):
        td.trace(lambda x: product(x, E4M3), td.Spec((2, 3)))
    with pytest.raises(DTypeError, match="differ"):
        td.trace(lambda x: contract(cast(x, E4M3), x, ("ab", "cb", "ac")), td.Spec((2, 3)))


def test_a_rounded_product_has_no_gradient_of_its_own() -> None:
    def total(x: td.Tensor) -> td.Tensor:
        return cast(contract(cast(x, E4M3), cast(x, E4M3), ("ab", "cb", "ac"), BF16), F32).sum()

    with pytest.raises(GradientError, match="8 bits"):
        td.grad(total)(np.ones((2, 3), np.float32))


# Scales


def test_scales_are_the_largest_powers_of_two_that_fit() -> None:
    columns = [E4M3, E5M2, E4M3, E4M3, E5M2]
    history = np.zeros((float8.HISTORY, len(columns)), np.float32)
    history[3] = [448, 1e-6, 0, 449, 1e30]
    history[7, 0] = 100

    def scales(x: td.Tensor) -> tuple[td.Tensor, td.Tensor]:
        found = float8._scales(x, columns)
        return found.scales, found.inverses

    for device in ("oracle", "cpu"):
        up, down = td.compile(scales, td.Spec(history.shape), device=device)(history)
        expected = [1, 2.0**35, float8.FIRST[E4M3], 0.5, 2.0**-float8.LIMIT]
        np.testing.assert_array_equal(up, expected)
        np.testing.assert_array_equal(down, 1 / np.array(expected))


# Training


class Net(nn.Module):
    """Two layers that are float8, one of odd features, and the last one."""

    def __init__(self) -> None:
        self.up, self.down, self.norm = nn.Linear(64, 80), nn.Linear(80, 64), nn.LayerNorm(64)
        self.odd, self.last = nn.Linear(64, 72), nn.Linear(72, 64)

    def forward(self, x: td.Tensor) -> td.Tensor:
        x = x + self.down(td.gelu(self.up(x)))
        return self.last(self.odd(self.norm(x)))


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def batch(seed: int = 0, rows: int = 32) -> Arrays:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 64)).astype(np.float32)
    return {"x": x, "y": np.argmax(x[:, :10], 1).astype(np.int32)}


def make(device: str = "oracle", precision: str = "float8", optimizer=None, **options):
    optimizer = optimizer or optim.adamw(3e-3)
    return td.compile_step(
        Net(), loss, optimizer, batch(), device=device, precision=precision, **options
    )


@pytest.fixture(scope="module")
def compiled() -> tuple[td.TrainStep, Arrays]:
    made = make("cpu")
    return made, made.state_dict()


@pytest.fixture
def step(compiled: tuple[td.TrainStep, Arrays]) -> td.TrainStep:
    """A step of native code, as it was at first."""
    made, first = compiled
    made.load_state_dict(first)
    return made


def products(graph: Graph) -> list[tuple[DType, ...]]:
    found = [n for n in graph.nodes if n.op is CONTRACT]
    return [tuple(graph.type_of(v).dtype for v in n.operands) for n in found]


def test_which_products_are_float8(step: td.TrainStep) -> None:
    """Forward, and both gradients but that of the input: of two layers of four."""
    kinds = products(step.graph)
    assert kinds.count((E4M3, E4M3)) == 2
    assert kinds.count((E5M2, E4M3)) == 3
    assert kinds.count((BF16, BF16)) == 6
    assert step.state_dict()["step:float8:largest"].shape == (float8.HISTORY, 6)
    assert step.report.precision == "float8_e4m3"
    casts = [n for n in step.graph.nodes if n.op is CAST and n.types[0].dtype in dtypes.FLOAT8]
    assert len(casts) == 6, "each tensor is rounded once"


def test_a_model_without_such_products_is_bfloat16() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    made = td.compile_step(
        model, lambda m, x: td.square(m(x)).mean(), optim.sgd(0.1), td.Spec((8, 64)),
        precision="float8", device="oracle",
    )  # fmt: skip
    assert products(made.graph) == [(BF16, BF16)] * 2
    assert not [n for n in made.state_dict() if "float8" in n]


def test_a_product_inside_of_a_scan_or_checkpoint_stays_bfloat16() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: td.Tensor) -> td.Tensor:
            inner = td.checkpoint(lambda x: td.tanh(self.a(x)))(x)
            return self.b(inner)

    made = td.compile_step(
        Deep(), lambda m, x: td.square(m(x)).mean(), optim.sgd(0.1), td.Spec((8, 64)),
        precision="float8", device="oracle",
    )  # fmt: skip
    assert (E4M3, E4M3) not in products(made.graph)


def changes(made: td.TrainStep, count: int) -> Arrays:
    """What some steps have changed."""
    before = {n: np.asarray(v, np.float64) for n, v in made.params.items()}
    for i in range(count):
        made(batch(i))
    return {n: np.asarray(v, np.float64) - before[n] for n, v in made.params.items()}


def distances(found: Arrays, expected: Arrays) -> dict[str, float]:
    return {n: np.linalg.norm(found[n] - v) / np.linalg.norm(v) for n, v in expected.items()}


def test_gradients_are_within_what_8_bits_tell_apart() -> None:
    """The third step has scales of the second: 3 bits of a fraction, 2 of a gradient's."""
    steps = [make(precision=p, optimizer=optim.sgd(0.1)) for p in ("float32", "bfloat16", "float8")]
    for made in steps:
        changes(made, 2)
    wide, narrow, eight = (changes(made, 1) for made in steps)
    found = distances(eight, wide)
    assert max(found.values()) < 0.12
    assert found["up.weight"] > 4 * distances(narrow, wide)["up.weight"], "it is narrower"


def test_the_devices_agree(step: td.TrainStep) -> None:
    """All round the same numbers to 8 bits; sums before a bfloat16 may differ in the last place."""
    oracle, cpu = changes(make(), 4), changes(step, 4)
    assert max(distances(cpu, oracle).values()) < 0.03


def test_training_follows_float32(step: td.TrainStep) -> None:
    wide = make(precision="float32")
    first = wide(batch()).loss
    step(batch())
    for i in range(1, 40):
        a, b = wide(batch(i)), step(batch(i))
    assert b.loss == pytest.approx(a.loss, rel=0.1)
    assert b.loss != a.loss
    assert b.loss < 0.8 * first


def test_the_history_is_of_the_last_steps(step: td.TrainStep) -> None:
    for i in range(float8.HISTORY + 1):
        step(batch(i))
    before = step.state_dict()["step:float8:largest"]
    step(batch(3))
    after = step.state_dict()["step:float8:largest"]
    np.testing.assert_array_equal(after[1:], before[:-1])
    assert (after > 0).all()
    assert after[0, 0] == np.abs(batch(3)["x"]).max().astype(BF16.numpy)


def test_what_is_not_finite_is_not_remembered() -> None:
    made = make(optimizer=optim.sgd(0.1))
    bad = batch()
    bad["x"][0, 0] = np.inf
    before = made.params
    made(bad)
    assert made.state_dict()["step:float8:largest"][0, 0] == 0
    made.load_params(before)
    assert np.isfinite(made(batch()).loss)


def test_it_continues_bit_for_bit(step: td.TrainStep, tmp_path: Path) -> None:
    for i in range(3):
        step(batch(i))
    step.save(tmp_path / "step.safetensors")
    expected = [step(batch(10 + i)).loss for i in range(3)]
    after = step.state_dict()
    other = make("cpu", seed=5)
    other.load(tmp_path / "step.safetensors")
    assert [other(batch(10 + i)).loss for i in range(3)] == expected
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, after[name])


def test_a_run_is_its_steps(step: td.TrainStep) -> None:
    state = step.state_dict()
    batches = [batch(i) for i in range(4)]
    expected = [step(b).loss for b in batches]
    step.load_state_dict(state)
    np.testing.assert_array_equal(step.run(batches).losses, expected)


def test_accumulation_and_a_clipped_norm() -> None:
    made = make(accumulate=2, clip_norm=0.5)
    for i in range(4):
        out = made(batch(i))
    assert out.updated
    assert made.count == 2
    history = made.state_dict()["step:float8:largest"]
    assert (history[:4, 0] > 0).all(), "every micro-batch is remembered"
    assert (history[4:] == 0).all()
    wide = make(precision="float32", accumulate=2, clip_norm=0.5)
    for i in range(4):
        expected = wide(batch(i))
    assert out.loss == pytest.approx(expected.loss, rel=0.02)
    assert out.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


def test_members_of_an_ensemble_have_scales_of_their_own() -> None:
    made = make()
    members = td.ensemble(made, 2)
    alone = members.member(1)
    for i in range(3):
        found = members(batch(i)).losses
        expected = alone(batch(i)).loss
    assert found[1] == pytest.approx(expected, rel=1e-2)
    assert members.state_dict()["step:float8:largest"].shape == (2, float8.HISTORY, 6)
    own = members.member_state(1)["step:float8:largest"]
    np.testing.assert_allclose(own, alone.state_dict()["step:float8:largest"], rtol=0.1)


def test_an_optimizer_that_asks_for_other_gradients() -> None:
    made = make(optimizer=optim.sam(optim.sgd(0.1)))
    assert all(np.isfinite(made(batch(i)).loss) for i in range(2))


def test_evaluation_and_forward_programs_are_bfloat16() -> None:
    eight, narrow = make(), make(precision="bfloat16")
    assert eight.evaluate(batch()).loss == narrow.evaluate(batch()).loss
    forward = td.compile_forward(
        Net(), lambda m, b: m(b["x"]), batch(), precision="float8", device="oracle"
    )
    assert (E4M3, E4M3) not in products(forward.graph)


def test_a_precision_that_there_is_not() -> None:
    with pytest.raises(ArgumentError, match="float4.*float8"):
        make(precision="float4")


# A GPU's programs


def with_float8(target: Target = ALONE) -> Target:
    """A chip whose library multiplies floats of 8 bits."""
    return replace(target, matmuls=replace(target.matmuls, has_float8=True))


def wide_batch() -> Arrays:
    return batch(rows=512)


@pytest.fixture(scope="module")
def large() -> td.TrainStep:
    """Enough rows that a library's matmuls pay."""
    return td.compile_step(
        Net(), loss, optim.sgd(0.5), wide_batch(), device="oracle", precision="float8"
    )


def given(large: td.TrainStep) -> Arrays:
    """Values of all leaves, with a history of a step or two."""
    values = {n: np.asarray(v) for n, v in large.session.values.items()}
    by_type = {a.dtype.kind: a for a in wide_batch().values()}
    inputs = [n for n in large.graph.leaves if n not in values]
    types = {n: large.graph.nodes[large.graph.leaves[n]].types[0] for n in inputs}
    return values | {n: by_type["f" if t.is_float else "i"] for n, t in types.items()}


def test_a_library_is_given_rows_along_the_depth(large: td.TrainStep) -> None:
    program = scheduled(large.graph, target=with_float8())
    calls = [c for k in program.distinct() if (c := matmul_call_of(k)) is not None]
    eight = [c for c in calls if "float8" in c.left.dtype]
    assert eight
    for call in eight:
        assert (call.left.columns, call.right.rows) == (1, 1)
        assert call.left.rows % 16 == call.right.columns % 16 == 0
        assert {call.left.dtype, call.right.dtype} != {"float8_e5m2"}
        assert call.target.dtype == "bfloat16"


def scaled(x: td.Tensor, weight: td.Tensor, bias: td.Tensor, numbers: td.Tensor) -> td.Tensor:
    given = float8._Scales(numbers, 1 / numbers)
    sides = [float8._Rounded.of(v, E4M3, i, given) for i, v in enumerate((x, weight))]
    return float8._product(sides[0], sides[1], ("ab", "cb", "ac")) + bias


def small_product() -> tuple[Graph, Arrays]:
    """A scaled product just large enough for a library, with a bias, and values for it."""
    square, rng = td.Spec((32, 32), BF16), np.random.default_rng(0)
    graph = td.trace(scaled, square, square, td.Spec((32,), BF16), td.Spec((2,)))
    drawn = {n: rng.normal(size=graph.nodes[i].types[0].shape) for n, i in graph.leaves.items()}
    values = {n: v.astype(BF16.numpy) for n, v in drawn.items()}
    return graph, values | {"numbers": np.array([4.0, 0.5], np.float32)}


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.linalg.norm(found.astype(np.float64) - expected) < 0.004 * np.linalg.norm(expected)


def test_scales_and_a_bias_are_the_librarys() -> None:
    graph, values = small_product()
    program = scheduled(graph, target=with_float8())
    (matmul,) = [m for k in program.distinct() if (m := standalone_matmul(k)) is not None]
    assert {at for _, at in matmul[1].scales} == {0, 1}
    assert matmul[1].bias is not None
    assert_close(interpreted(program, values)[0], OracleProgram(graph).run(values)[0])


@pytest.mark.slow
def test_scales_and_a_bias_in_kernels_of_our_own() -> None:
    graph, values = small_product()
    program = scheduled(graph, target=with_matmuls(with_float8(), False))
    assert_close(interpreted(program, values)[0], OracleProgram(graph).run(values)[0])


def test_a_chip_without_them_multiplies_in_bfloat16(large: td.TrainStep) -> None:
    calls = [matmul_call_of(k) for k in scheduled(large.graph).distinct()]
    assert not [c for c in calls if c is not None and "float8" in c.left.dtype]


@pytest.mark.slow
@pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")
@pytest.mark.parametrize("has_float8", [True, False])
def test_the_text_means_what_the_oracle_says(large: td.TrainStep, has_float8: bool) -> None:
    large(wide_batch())
    values, graph = given(large), large.graph
    program = scheduled(graph, target=with_float8() if has_float8 else ALONE)
    outputs = zip(
        graph.outputs, run_on_host(program, values), OracleProgram(graph).run(values), strict=True
    )
    for output, found, right in outputs:
        if right.ndim:  # a gradient next to a tie is 1/4 away where a sum differs in its last bit
            away = np.linalg.norm(found.astype(np.float64) - right)
            assert away <= 0.04 * np.linalg.norm(right), output.name


class Library:
    """cuBLASLt that notes what a matmul is told."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        self.layouts: list[tuple[int, int, int, int]] = []

    def __getattr__(self, name: str):
        return lambda *given: 0

    def cublasLtMatmulDescSetAttribute(self, handle, attribute, value, size) -> int:
        self.told[attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, into, kind, rows, columns, step) -> int:
        self.layouts.append((kind, rows.value, columns.value, step.value))
        return 0


@pytest.mark.parametrize("left", ["float8_e4m3", "float8_e5m2"])
def test_what_cublaslt_is_told(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Library()
    monkeypatch.setattr(blas, "library", lambda: told)
    monkeypatch.setattr(blas, "blas_handle", lambda: 0)
    monkeypatch.setattr(blas, "workspace", lambda: SimpleNamespace(address=0))
    call = MatmulCall(
        64, 32, 128, 1,
        MatrixFacts("bfloat16", 32, 1, 0, 0),
        MatrixFacts(left, 128, 1, 0, 0),
        MatrixFacts("float8_e4m3", 1, 128, 0, 0),
        bias=2, scales=((3, 1), (3, 4)),
    )  # fmt: skip
    matmul = blas.Matmul(call)
    transposes, kinds = (3, 4), {"float8_e4m3": 28, "float8_e5m2": 29}
    assert [told.told[t] for t in transposes] == [1, 0], "the one order that there is"
    assert told.layouts[0] == (28, 128, 32, 128), "the target's rows are computed as columns"
    assert told.layouts[1] == (kinds[left], 128, 64, 128)
    assert told.told.get(25) == (1 if left == "float8_e4m3" else None), "fast sums of values only"
    addresses = matrices(call, [100, 200, 300, 400, 500])
    assert addresses == (500, 100, 200, 300, 404, 416)
    assert matmul.run(*addresses, algorithm=ctypes.c_int(0), stream=0) == 0
    assert (told.told[17], told.told[18], told.told[8]) == (404, 416, 300)


def test_a_library_that_has_not_some_product_is_not_asked_again() -> None:
    with fake_gpu():
        toolchain = CudaToolchain()
        assert toolchain.target.matmuls.has_float8
        assert toolchain.target.matmuls.scales_float8
        missing = NoLibraryCallError(LibraryLaunch("float8 epilogue", (), (), ()), "no algorithm")
        again = toolchain._after(missing).toolchain
        assert again.target.matmuls.has_float8
        assert not again.target.matmuls.scales_float8
        missing = NoLibraryCallError(LibraryLaunch("float8", (), (), ()), "no algorithm")
        assert not again._after(missing).toolchain.target.matmuls.has_float8
    graph, target = small_product()[0], with_float8()
    without = replace(target, matmuls=replace(target.matmuls, scales_float8=False))
    calls = [matmul_call_of(k) for k in scheduled(graph, target=without).distinct()]
    assert [(c.of_float8, c.scales, c.bias) for c in calls if c] == [("float8", (), -1)]


@pytest.mark.parametrize("refused", ["", "float8 epilogue", "float8"])
def test_a_step_is_scheduled_again_without_what_a_library_refuses(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(matmul: blas.Matmul, *addresses: int) -> None:
        if refused and matmul.matmul.of_float8.startswith(refused):
            raise DeviceError("matmul", "no algorithm")
        matmul.use([0] * 8)

    monkeypatch.setattr(blas, "library", Library)
    monkeypatch.setattr(blas, "blas_handle", lambda: 0)
    monkeypatch.setattr(blas.Matmul, "choose", choose)
    square = nn.Linear(64, 64)
    with fake_gpu():
        made = td.compile_step(
            nn.Sequential(square, nn.Linear(64, 64), nn.Linear(64, 64)),
            lambda m, x: td.square(m(x)).mean(), optim.sgd(0.1), td.Spec((256, 64)),
            device="cuda", precision="float8",
        )  # fmt: skip
        (program,) = made._programs.built(made._inputs)._built.values()
        kinds = {m.of_float8 for launch in program.launches if (m := launch.matmul) is not None}
        assert refused or kinds == {"", "float8", "float8 epilogue"}
        assert not [k for k in kinds if refused and k.startswith(refused)]
        assert refused == "float8" or "float8" in kinds
