"""The CUDA backend on a GPU: every op within its contract, training as exact as the ops promise."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import treadle as td
from backend import assert_within, draw, same_bits
from cuda_backend import JOINT, needs_gpu, on_gpu
from test_backend_ops import CASES, COMPUTED, SIZES, agreement, prepared, shaped
from test_backend_programs import prepared as random_program
from test_cuda_batched import APART, LAYERS, training
from treadle import losses, nn, optim
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.frontend.scopes import bind1
from treadle.ir import composites as c
from treadle.ir.op import Op, infer_types
from treadle.ir.types import TensorType
from treadle.runtime.cuda import batches
from treadle.runtime.cuda.conv import NoLibraryCallError
from treadle.runtime.cuda.device import device
from treadle.runtime.cuda.dnn import has_dnn
from treadle.runtime.cuda.launches import Runner
from treadle.schedule.schedule import GPU, Target

pytestmark = needs_gpu


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_every_op_in_every_dtype(op: Op, dtype: DType) -> None:
    graph, arrays = prepared(op, dtype, seed=4)
    program = on_gpu(graph)
    found = program.run(arrays)
    assert_within(graph, arrays, found, agreement(op))
    assert same_bits(program.run(arrays), found)


@pytest.mark.parametrize("op", COMPUTED, ids=lambda op: op.name)
def test_every_op_kept_in_memory(op: Op) -> None:
    graph, arrays = prepared(op, dtypes.float32, seed=5)
    assert_within(graph, arrays, on_gpu(graph, fuse=False).run(arrays), agreement(op))


@given(SIZES, SIZES, st.sampled_from(dtypes.FLOATS))
@settings(max_examples=20, deadline=None)
def test_odd_and_empty_sizes(rows: int, columns: int, dtype: DType) -> None:
    type_ = TensorType((rows, columns), dtype)
    graph = td.trace(shaped, type_, type_)
    arrays = draw(graph, rows * 100 + columns)
    assert_within(graph, arrays, on_gpu(graph).run(arrays))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_products_of_all_layouts(dtype: DType, library: bool) -> None:
    def products(x, y):
        return [x @ y.T, x.T @ y, td.einsum("ij,kj->ki", x, y), x[:, :64] @ y[:64, :]]

    graph = td.trace(products, TensorType((96, 160), dtype), TensorType((96, 160), dtype))
    arrays = draw(graph, 3)
    assert_within(graph, arrays, on_gpu(graph, library=library).run(arrays))


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 900), st.booleans())
@settings(max_examples=25, deadline=None)
def test_small_products_of_any_size(m: int, n: int, k: int, turned: bool) -> None:
    def products(x, y):
        right = y.T if turned else y
        return [td.relu(x @ right + 1.0), td.softmax(x @ right), (x @ x.T).sum(0), x @ right]

    types = (
        TensorType((m, k), dtypes.float32),
        TensorType((n, k) if turned else (k, n), dtypes.float32),
    )
    graph = td.trace(products, *types)
    arrays = draw(graph, m * n + k)
    program = on_gpu(graph)
    found = program.run(arrays)
    assert_within(graph, arrays, found)
    assert same_bits(program.run(arrays), found)


@pytest.mark.parametrize("library", [True, False])
def test_batched_products(library: bool) -> None:
    def products(x, y):
        return [td.einsum("bhid,bhjd->bhij", x, y), td.einsum("bhid,bhjd->bihj", x, y)]

    type_ = TensorType((3, 4, 40, 32), dtypes.bfloat16)
    graph = td.trace(products, type_, type_)
    arrays = draw(graph, 4)
    assert_within(graph, arrays, on_gpu(graph, library=library).run(arrays))


WITH_DNN = dataclasses.replace(GPU, has_conv=has_dnn(), has_attention=has_dnn())
# x, w, stride, padding, dilation, groups
CONVOLUTIONS = [
    ((4, 16, 14, 14), (32, 16, 3, 3), 1, 1, 1, 1),
    ((4, 16, 15, 14), (32, 16, 3, 3), 2, 1, 1, 1),
    ((2, 3, 32, 32), (16, 3, 7, 7), 2, 3, 1, 1),
    ((4, 1, 28, 28), (32, 1, 3, 3), 1, 1, 1, 1),
    ((4, 16, 14, 14), (32, 16, 1, 1), 2, 0, 1, 1),
    ((4, 16, 14, 14), (16, 4, 3, 3), 1, 1, 1, 4),
    ((4, 16, 14, 14), (16, 1, 3, 3), 1, 1, 1, 16),
    ((4, 16, 14, 14), (32, 16, 3, 3), 1, 2, 2, 1),
    ((3, 5, 9, 11), (7, 5, 3, 2), 1, 1, 1, 1),
]


@pytest.mark.skipif(not has_dnn(), reason="cuDNN's frontend is not installed")
@pytest.mark.parametrize("op", [c.CONV, c.CONV_GRAD_X, c.CONV_GRAD_W], ids=str)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16, dtypes.float32], ids=str)
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_convolutions_of_the_library(shape, dtype: DType, op: Op) -> None:
    xs, ws, s, p, d, g = shape
    conv = c.Conv((s, s), ((p, p), (p, p)), (d, d), g)
    x, w = TensorType(xs, dtype), TensorType(ws, dtype)
    (y,) = infer_types(c.CONV, conv, (x, w))
    types = {c.CONV: (x, w), c.CONV_GRAD_X: (y, w), c.CONV_GRAD_W: (y, x)}[op]
    made = {c.CONV_GRAD_X: c.ConvGrad(conv, xs), c.CONV_GRAD_W: c.ConvGrad(conv, ws)}
    graph = td.trace(lambda a, b: [bind1(op, made.get(op, conv), a, b)], *types)
    arrays = draw(graph, 3)
    try:
        program = on_gpu(graph, target=WITH_DNN)
    except NoLibraryCallError as error:
        pytest.skip(f"cuDNN has no plan: {error}")  # a step falls back to the definition
    assert_within(graph, arrays, program.run(arrays))


def convolved(device: str, precision: str, steps: int = 6) -> list[float]:
    """Losses of a small residual network with batch norms and a pool."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.Conv2d(32, 8, 1, groups=4), nn.Flatten(), nn.Linear(8 * 16, 5),
    )  # fmt: skip
    specs = {"x": td.Spec((8, 3, 16, 16)), "y": td.Spec((8,), td.int32)}

    def loss(m, batch):
        return losses.cross_entropy(m(batch["x"]), batch["y"])

    step = td.compile_step(
        model, loss, optim.adamw(1e-2), specs, device=device, precision=precision
    )
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(8, 3, 16, 16)).astype(np.float32),
        "y": rng.integers(0, 5, 8).astype(np.int32),
    }
    return [step(batch).loss for _ in range(steps)]


@pytest.mark.parametrize(("precision", "error"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_convolutional_network_follows_the_oracle(precision: str, error: float) -> None:
    ours, exact = convolved("cuda", precision), convolved("oracle", precision)
    np.testing.assert_allclose(ours, exact, rtol=error, atol=error)


@pytest.mark.skipif(not has_dnn(), reason="cuDNN is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_convolutions_repeat_if_asked_to(dtype: str) -> None:
    def gradients() -> list[bytes]:
        program = td.compile(
            td.grad(lambda x, w: (td.conv(x, w, padding=1) ** 2).mean(), (0, 1)),
            td.Spec((16, 32, 28, 28), dtype),
            td.Spec((64, 32, 3, 3), dtype),
            device="cuda",
            options=td.CompileOptions(deterministic=True),
        )
        rng = np.random.default_rng(0)
        given = [rng.normal(size=s) for s in ((16, 32, 28, 28), (64, 32, 3, 3))]
        arrays = [a.astype(getattr(td, dtype).numpy) for a in given]
        return [np.asarray(g).tobytes() for _ in range(4) for g in program(*arrays)]

    found = gradients() + gradients()
    assert len(set(found[::2])) == len(set(found[1::2])) == 1


def test_programs_that_are_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver ends a capture beside which it is asked to free."""
    enqueue, left = Runner.enqueue, list[object]()

    def collecting(runner: Runner, table: list[int], stream: object) -> int:
        count = enqueue(runner, table, stream)
        assert gc.collect() > 0
        return count + enqueue(runner, table, stream)

    refused, again = device().releases.refused.total(), device().captured_again
    for n in range(3, 7):
        program = td.compile(lambda x: td.softmax(x @ x.T), td.Spec((n, n)), device="cuda")
        program(np.eye(n, dtype=np.float32))
        left = [program, left]
        left.append(left)  # a cycle
        program = td.compile(lambda x: (x * 2).sum(0), td.Spec((n, 3)), device="cuda")
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "enqueue", collecting)
            left = []
            np.testing.assert_array_equal(program(np.ones((n, 3), np.float32)), [2.0 * n] * 3)
    assert device().releases.refused.total() == refused
    assert device().captured_again == again
    assert device().releases.waiting == 0


class Attended(nn.Module):
    """What cuDNN has: a convolution, and attention over its places."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(8, 64, 3, padding=1)
        self.attention = nn.MultiHeadAttention(64, 2, batch_first=True)

    def forward(self, x: td.Tensor) -> td.Tensor:
        places = self.conv(x).reshape(8, 64, 64).transpose(1, 2)
        return self.attention(places, causal=True)


@pytest.mark.skipif(not has_dnn(), reason="cuDNN is not installed")
def test_plans_of_the_library_come_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "plans"))
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 8)).astype(np.float32)

    def losses_of() -> tuple[list[float], int]:
        step = td.compile_step(
            Attended(),
            lambda m, x: (m(x) ** 2).mean(),
            optim.adamw(1e-2),
            td.Spec(x.shape),
            device="cuda",
            precision="bfloat16",
            options=td.CompileOptions(deterministic=True),
        )
        return [step(x).loss for _ in range(4)], step.report.cache_hits

    first, hits = losses_of()
    assert hits == 0

    def planned(*_: object) -> None:
        raise AssertionError("planned once more")

    for name in ("planned_attention", "PlannedConvolutions"):
        monkeypatch.setattr(f"treadle.runtime.cuda.calls.{name}", planned)
    assert losses_of() == (first, 1)


@pytest.mark.parametrize("columns", [64, 256, 768, 1000])
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16, dtypes.int32], ids=str)
def test_sums_of_columns_that_rows_of_threads_share(columns: int, dtype: DType) -> None:
    def sums(x, y):
        kept = td.where(x < y, 0, x)
        return [
            kept * 2,
            kept.sum(0),
            (kept * y).sum(0),
            td.max(x, 0),
            x.reshape(64, 64, -1).sum(1),
        ]

    type_ = TensorType((4096, columns), dtype)
    graph = td.trace(sums, type_, type_)
    arrays = draw(graph, columns)
    program = on_gpu(graph)
    found = program.run(arrays)
    assert_within(graph, arrays, found)
    assert same_bits(program.run(arrays), found)


def big(x, y):
    """Shapes that take whole blocks, packs and parts."""
    return [
        td.softmax(x),
        td.layer_norm(x, y[0], y[1]),
        x.sum(0),
        x.sum(1),
        x.sum(),
        td.gelu(x) * y,
        td.max(x, 0),
        (x * y).sum((0, 1)),
        x.T.reshape(-1),
        td.mean(x.reshape(64, 32, -1), (0, 2)),
        td.cumsum(x[:64], 1),
    ]


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [768, 1000, 33])
def test_large_reductions(dtype: DType, columns: int) -> None:
    type_ = TensorType((2048, columns), dtype)
    graph = td.trace(big, type_, type_)
    arrays = draw(graph, columns)
    program = on_gpu(graph)
    found = program.run(arrays)
    assert_within(graph, arrays, found)
    assert same_bits(program.run(arrays), found)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [(256, 128), (768, 512), (50, 30)], ids=str)
def test_kernels_of_a_phase_are_one_launch(columns: tuple[int, int], dtype: DType) -> None:
    def sums(x, y):
        centred = [t - t.mean(0) for t in (x, y)]
        return [x.sum(0), (y * y).sum(0), *(t * td.rsqrt((t * t).mean(0) + 1e-3) for t in centred)]

    types = TensorType((64, columns[0]), dtype), TensorType((96, columns[1]), dtype)
    graph = td.trace(sums, *types)
    arrays = draw(graph, 8)
    assert_within(graph, arrays, on_gpu(graph, target=JOINT).run(arrays), 8.0)


@pytest.mark.parametrize("target", [GPU, JOINT], ids=["cooperative", "joint"])
@given(st.integers(0, 2**40))
@settings(
    max_examples=100,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_random_training_programs(target: Target, seed: int) -> None:
    training, values, bounds = random_program(seed)
    found = on_gpu(training.graph, in_place=True, target=target).run(values)
    assert_within(training.graph, values, found, bounds=bounds)


def trained(device: str, precision: str = "float32", steps: int = 12) -> list[float]:
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5))
    specs = {"x": td.Spec((32, 20)), "y": td.Spec((32,), td.int32)}

    def loss(m, batch):
        return losses.cross_entropy(m(batch["x"]), batch["y"])

    step = td.compile_step(
        model, loss, optim.adamw(1e-2), specs, device=device, precision=precision, clip_norm=1.0
    )
    rng = np.random.default_rng(0)
    given = [
        {
            "x": rng.normal(size=(32, 20)).astype(np.float32),
            "y": rng.integers(0, 5, 32).astype(np.int32),
        }
        for _ in range(steps)
    ]
    results = [step(b) for b in given]  # none is looked at before all are on their way
    return [r.loss for r in results]


def test_batches_of_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are faster or not, they are what the products are one by one."""
    monkeypatch.setattr(batches, "timed", lambda *turns: [float(len(t)) for t in turns])
    graph, values = training(rows=256, d=128)
    apart = on_gpu(graph, in_place=True, target=APART).run(values)
    program = on_gpu(graph, in_place=True)
    together = program.run(values)
    assert [n for _, n, _ in program._runner.batches].count(LAYERS) == 2
    for output, ours, theirs in zip(graph.outputs, together, apart, strict=True):
        assert np.isfinite(ours).all(), output.name
        size = np.linalg.norm(theirs) or 1.0
        assert np.linalg.norm(ours - theirs) <= 0.02 * size, output.name


def test_training_follows_the_oracle() -> None:
    np.testing.assert_allclose(trained("cuda"), trained("oracle"), rtol=2e-5)


def test_training_in_bfloat16_follows_the_oracle() -> None:
    ours, exact = trained("cuda", "bfloat16"), trained("oracle", "bfloat16")
    np.testing.assert_allclose(ours, exact, rtol=0.05)


def test_training_is_the_same_every_time() -> None:
    assert trained("cuda") == trained("cuda")


def test_steps_together_are_single_steps() -> None:
    def losses_of(together: bool) -> list[float]:
        step = td.compile_step(
            nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)),
            lambda m, b: losses.cross_entropy(m(b["x"]), b["y"]),
            optim.adamw(1e-2),
            {"x": td.Spec((32, 20)), "y": td.Spec((32,), td.int32)},
            device="cuda",
        )
        rng = np.random.default_rng(0)
        given = [
            {
                "x": rng.normal(size=(32, 20)).astype(np.float32),
                "y": rng.integers(0, 5, 32).astype(np.int32),
            }
            for _ in range(35)
        ]
        return list(step.run(given).losses) if together else [step(b).loss for b in given]

    assert losses_of(True) == losses_of(False)


def test_state_goes_in_and_out() -> None:
    model = nn.Linear(6, 3)

    def loss(m, batch):
        return (m(batch) ** 2).mean()

    step = td.compile_step(model, loss, optim.adam(1e-2), td.Spec((4, 6)), device="cuda")
    forward = step.attach(lambda m, x: m(x), td.Spec((4, 6)))
    x = np.ones((4, 6), np.float32)
    before = step.params
    step(x)
    state = step.state_dict()
    after = forward(x)
    np.testing.assert_allclose(
        after, x @ step.params["weight"].T + step.params["bias"], rtol=1e-5, atol=1e-6
    )
    step.load_params(before)
    assert same_bits([step.params["weight"]], [before["weight"]])
    step.load_state_dict(state)
    np.testing.assert_array_equal(forward(x), after)
    assert step.count == 1
