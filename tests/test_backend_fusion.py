"""What a graph becomes: which kernels, in which phases, and how a step shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import treadle as td
from backend import assert_within, build, draw
from trajectories import GPT
from treadle import losses, nn, optim
from treadle.autodiff.backward import differentiate
from treadle.ir.graph import Graph
from treadle.kernel.nodes import For, Kernel, Matmul, Role, Statement
from treadle.kernel.program import Phase, Program
from treadle.kernel.target import CPU
from treadle.kernel.text import to_text
from treadle.kernel.traverse import walk
from treadle.memory import assemble as assembling
from treadle.runtime.cpu.native import processor
from treadle.runtime.cpu.targets import named_target, target_of
from treadle.schedule.schedule import schedule

SHAPES = [(64, 128), (7, 13), (4, 2, 16, 17), (3, 1), (1, 9)]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", "0")


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)


def calls(graph: Graph) -> int:
    """How many kernels a graph runs, after checking what they compute."""
    arrays = draw(graph, 0)
    assert_within(graph, arrays, build(graph).on(1).run(arrays))
    return len(list(schedule(graph).calls()))


# Rows: reductions with what comes before and after


ROWS: dict[str, Callable] = {
    "softmax": td.softmax,
    "log_softmax": td.log_softmax,
    "layer_norm": td.layer_norm,
    "rms_norm": td.rms_norm,
    "a mean and its square": lambda x: (x - td.mean(x, -1, keepdims=True)) ** 2,
    "gelu before, exp after": lambda x: td.exp(td.softmax(td.gelu(x) * 2) - 1),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_one_kernel(name: str, shape: tuple[int, ...]) -> None:
    assert calls(td.trace(ROWS[name], td.Spec(shape))) == 1


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "rms_norm"])
def test_gradients_of_rows_are_one_kernel(name: str, shape: tuple[int, ...]) -> None:
    """From the operand and the cotangent to the gradient, the forward's values made again."""

    def gradient(x, ct):
        return td.vjp(ROWS[name], x)[1](ct)

    assert calls(td.trace(gradient, td.Spec(shape), td.Spec(shape))) == 1


def test_layer_norm_with_weights_has_two_sums_beside_its_rows() -> None:
    """Gradients of weight and bias sum over rows: their parts are in the rows' kernel."""
    row, matrix = td.Spec((96,)), td.Spec((256, 96))

    def gradient(x, w, b, ct):
        return td.vjp(td.layer_norm, x, w, b)[1](ct)

    program = schedule(td.trace(gradient, matrix, row, row, matrix))
    assert len(program.steps) <= 3
    assert len(list(program.calls())) <= 4


def test_cross_entropy_waits_for_its_rows_alone() -> None:
    """How many targets count is known before the rows are: the gradient is in the rows' kernel."""
    logits, labels = td.Spec((64, 10)), td.Spec((64,), td.int32)

    def value(x, y):
        return losses.cross_entropy(x, y)

    forward = td.trace(value, logits, labels)
    both = differentiate(forward, ["x"]).graph
    for graph, phases in ((forward, 2), (both, 3)):
        program = schedule(graph)
        assert len(program.steps) <= phases
        assert len(list(program.calls())) <= 3


def test_elementwise_work_of_any_size_is_one_kernel() -> None:
    """Long chains, several outputs, views between."""

    def chain(x, y):
        a = x
        for i in range(30):
            a = td.tanh(a * 0.5 + y) if i % 3 else a + x * y
        return a, (a * 2).T.reshape(-1), td.where(a > 0, a, y)

    assert calls(td.trace(chain, td.Spec((24, 36)), td.Spec((24, 36)))) <= 2


def test_what_surrounds_a_product_is_in_its_kernel() -> None:
    """Bias, activation, norm and residual: rows of the product stay where they are."""

    def layer(x, w, b):
        return x + td.layer_norm(td.gelu(td.tanh(x) @ w + b))

    program = schedule(td.trace(layer, td.Spec((64, 96)), td.Spec((96, 96)), td.Spec((96,))))
    kernels = [c.kernel for c in program.calls()]
    products = [k for k in kernels if has_product(k.body)]
    assert len(products) == 1
    assert "erf" in to_text(products[0]), "the activation follows in the same rows"
    assert "rsqrt" in to_text(products[0]), "and the norm"
    assert len(kernels) <= 2, "the right operand may be packed before"


def has_product(body: tuple[Statement, ...]) -> bool:
    return any(isinstance(s, Matmul) or (isinstance(s, For) and has_product(s.body)) for s in body)


@pytest.mark.parametrize("size", [16, 17, 64])
def test_expressions_do_not_explode(size: int) -> None:
    """The gradient of a product of many factors is a tree of choices inside choices."""
    graph = td.trace(lambda x: td.prod(x, 1).sum(), td.Spec((size, size)))
    program = schedule(differentiate(graph, ["x"]).graph)
    assert sum(len(to_text(k)) for k in program.distinct()) < 40_000


# Updates


def phases(program: Program) -> Iterator[Phase]:
    assert all(isinstance(s, Phase) for s in program.steps)
    yield from program.steps  # type: ignore[misc]


def writers(program: Program) -> dict[str, list[tuple[int, int]]]:
    """By updated leaf: the phases and calls that write it."""
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in program.updated}
    for i, phase in enumerate(phases(program)):
        for j, call in enumerate(phase.calls):
            count = len(call.kernel.outputs)
            for argument in call.arguments[-count:]:
                if argument.buffer in found:
                    found[argument.buffer].append((i, j))
    return found


def gpt_graph(layers: int, clip: float | None = 1.0) -> Graph:
    step = td.compile_step(
        GPT(65, 96, 32, layers),
        loss,
        optim.adamw(1e-3),
        {k: td.Spec((2, 32), td.int32) for k in "xy"},
        clip_norm=clip,
        device="oracle",
    )
    return step.graph


def test_all_large_parameters_are_updated_in_one_phase() -> None:
    """After the gradient's norm is known; moments and parameter in one pass over their memory."""
    graph = gpt_graph(2)
    program = schedule(graph, in_place=True)
    sizes = {n: graph.nodes[i].types[0].size for n, i in graph.leaves.items()}
    found = writers(program)
    assert all(len(places) == 1 for places in found.values()), "each is written once"
    large = {n: places[0] for n, places in found.items() if sizes[n] >= CPU.small}
    assert len(large) > 20
    assert len({phase for phase, _ in large.values()}) == 1
    for name in [n for n in large if ":" not in n]:
        moments = [large[f"step0:optimizer:{m}.{name}"] for m in "mv"]
        assert moments == [large[name]] * 2, name


def test_updates_are_written_over_what_they_replace() -> None:
    graph = gpt_graph(1)
    program = schedule(graph, in_place=True)
    updates = {o.name for o in graph.outputs if o.kind.value == "update"}
    assert updates == set(program.updated)
    copies = [c for c in program.calls() if c.kernel.name == "copy"]
    assert not copies, "nothing is copied at the end"


# Equal kernels


def test_equal_layers_have_equal_kernels() -> None:
    """Compile time is that of the distinct kernels: more layers, no more of them."""
    few, many = (schedule(gpt_graph(n), in_place=True) for n in (6, 24))
    ours, theirs = (
        {k for k in p.distinct() if not is_about_all_parameters(k)} for p in (few, many)
    )
    assert ours == theirs
    assert len(many.distinct()) <= len(few.distinct()) + 5, "sums of the norm are cut into pieces"
    assert len(list(many.calls())) > 3 * len(list(few.calls()))


def is_about_all_parameters(kernel: Kernel) -> bool:
    """The gradient's norm, and the updates of what is small: several of many at a time."""
    return not has_product(kernel.body) and len(kernel.buffers) >= 12


# What a step shows


@pytest.fixture(scope="module")
def step() -> td.TrainStep:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREADLE_CACHE", "0")
        return td.compile_step(
            nn.Sequential(nn.Linear(20, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 5)),
            loss,
            optim.adamw(1e-3),
            {"x": td.Spec((40, 20)), "y": td.Spec((40,), td.int32)},
            device="cpu",
        )


def test_the_square_of_a_gradient_is_not_kept(step: td.TrainStep) -> None:
    """Its norm and a moment need it: one multiplication each, and the gradient is there."""
    updates = [k.text for k in step.kernels if "(sqrt(" in k.text and " · " in k.text]
    assert updates, "products that update their weights"
    for text in updates:
        assert text.count("scratch") == 1, text


@pytest.mark.parametrize(
    ("turns", "work", "expected"),
    [
        (196, 100_352, 4),  # three tasks would be two for one thread
        (400, 204_800, 8),
        (5, 409_600, 5),
        (1, 1 << 30, 1),
        (7, 100, 1),
        (1000, 17 << 15, 32),
        (1000, 1 << 30, 128),
    ],
)
def test_tasks_are_equal_shares(turns: int, work: int, expected: int) -> None:
    assert assembling.tasks_of(turns, work, CPU.tasks) == expected


def test_kernels_can_be_looked_at(step: td.TrainStep) -> None:
    assert len({k.name for k in step.kernels}) == len(step.kernels)
    for kernel in step.kernels:
        assert kernel.text.startswith(f"kernel {kernel.name}(")
        assert f"define  void @{kernel.name}(" in kernel.llvm
        assert kernel.calls >= 1
        assert repr(kernel).startswith(f"Kernel({kernel.name}, ")
    names = (k for k in step.kernels if k.name.startswith("contract"))
    product = next(k for k in names if not k.name.endswith("_pack"))
    assert "vfmadd" in product.assembly or "fmla" in product.assembly, "fused multiply-adds"
    lines = [line for k in step.kernels for line in k.lines]
    assert any("test_backend_fusion.py" in line and "in loss" in line for line in lines), (
        "the user's own"
    )


def test_the_report_counts_what_was_built(step: td.TrainStep) -> None:
    report = step.report
    assert [k.name for k in report.kernels] == [k.name for k in step.kernels]
    products = 2 * 40 * (20 * 48 + 48 * 5)  # the forward's
    backward = 2 * 40 * 20 * 48 + 2 * (2 * 40 * 48 * 5)  # the first layer's input has no gradient
    assert products + backward <= report.flops < 3 * (products + backward)
    state = sum(v.nbytes for v in step.session.values.values())
    assert report.state_bytes == state
    assert report.peak_bytes > state
    assert report.bytes >= sum(p.nbytes for p in step.params.values())
    stages = ["trace", "differentiate", "append_updates", "schedule", "plan_buffers", "render"]
    assert set(stages) | {"compile", "load"} <= set(report.seconds)
    assert all(seconds >= 0 for seconds in report.seconds.values())


def test_the_report_is_a_table(step: td.TrainStep) -> None:
    lines = str(step.report).splitlines()
    name = named_target("native")
    used = target_of(name, processor())
    target = f"{name} ({used.cpu}, {used.width} lanes)"
    about = "device cpu, precision float32, 1,349 parameters, 1 program"
    assert lines[0] == f"{about}, target {target}"
    assert lines[1].startswith("trains all ")
    assert lines[2].split() == ["stage", "seconds", "nodes"]
    head = next(i for i, line in enumerate(lines) if line.startswith("program"))
    assert lines[head].split()[:4] == ["program", "calls", "kernels", "GFLOP"]
    row = lines[head + 1].split()
    assert row[0] == "step"
    assert int(row[1]) == sum(k.calls for k in step.kernels)
    assert int(row[2]) == len(step.kernels)
    assert row[-1] == "no", "not from the cache"
    assert lines[-1].startswith("memory forecast ")
    assert len({len(lines[i].rstrip()) for i in (head, head + 1)}) <= 2


def test_without_optimizing_every_tensor_has_its_kernel(step: td.TrainStep) -> None:
    plain = td.compile_step(
        step.recipe.model,
        loss,
        optim.adamw(1e-3),
        {"x": td.Spec((40, 20)), "y": td.Spec((40,), td.int32)},
        device="cpu",
        options=td.CompileOptions(optimize=False),
    )
    count = sum(k.calls for k in plain.kernels)
    assert count > 5 * sum(k.calls for k in step.kernels)
    assert plain.report.peak_bytes > step.report.peak_bytes
    step.reset()
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = {"x": rng.normal(size=(40, 20)), "y": rng.integers(0, 5, 40)}
        assert plain(batch).loss == pytest.approx(step(batch).loss, rel=1e-6)


def test_the_oracle_has_no_kernels() -> None:
    step = td.compile_step(
        nn.Linear(2, 2),
        lambda m, x: (m(x) ** 2).mean(),
        optim.sgd(0.1),
        td.Spec((3, 2)),
        device="oracle",
    )
    assert step.kernels == ()
    assert step.report.flops == step.report.peak_bytes - step.report.state_bytes == 0


@pytest.mark.parametrize(("columns", "is_by_rows"), [(3, True), (24, True), (25, False)])
def test_rows_of_few_columns_are_lanes(columns: int, is_by_rows: bool) -> None:
    """Each lane takes a row; lanes along three columns would be mostly empty."""
    graph = td.trace(lambda x: td.softmax(x) * x, td.Spec((1000, columns)))
    (kernel,) = schedule(graph).distinct()
    (rows,) = (s for s in kernel.body if isinstance(s, For))
    inner = [s for s in walk(rows.body) if isinstance(s, For)]
    assert (rows.role is Role.VECTOR) == is_by_rows
    assert any(s.role is Role.VECTOR for s in inner) != is_by_rows
    arrays = draw(graph, 0)
    for width in (4, 8, 16):
        assert_within(graph, arrays, build(graph, width=width, shared=True).on(2).run(arrays))
