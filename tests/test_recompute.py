"""What waits for the backward pass: its values stay the same, and its bytes are counted.

Memory is that of the schedule for a GPU, by the lives of its buffers; nothing is timed or run there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from test_kernels import run
from treadle import nn, optim
from treadle.backends.cuda.backend import CudaToolchain
from treadle.domains.float64 import evaluate_float64
from treadle.ir.graph import Graph
from treadle.kernel import cost
from treadle.kernel.program import Program
from treadle.kernel.target import GPU, Materialization, Target
from treadle.memory.peak import memory_view
from treadle.memory.plan import padded, plan_buffers
from treadle.nn.tracing import Inputs
from treadle.optim.append import Mode
from treadle.pipeline import CompileReport, StepRecipe, build_step
from treadle.schedule.recompute import recomputed
from treadle.schedule.schedule import schedule

LIBRARIES = replace(GPU, has_attention=True, has_conv=True)
# Everything is worth a thought, and nothing so small that it is one launch.
EAGER = replace(
    GPU,
    materialization=Materialization(waiting_bytes=0, least_recomputed=0),
    matmuls=replace(GPU.matmuls, launch_flops=0, launch_flops_of_graph=0),
)
NEVER = replace(EAGER, materialization=Materialization(waiting_bytes=1 << 60))


def step_of(model: nn.Module, specs: dict[str, td.Spec], precision: td.DType) -> Graph:
    recipe = StepRecipe(
        model, lambda m, b: m(b["x"]).square().mean(), optim.sgd(0.1), "step0:", 1, None, precision,
        td.CompileOptions(),
    )  # fmt: skip
    report = CompileReport("cuda", precision.name)
    return build_step(recipe, recipe.plan(), Inputs.of(specs), report)[Mode.UPDATE]


class Gated(nn.Module):
    def __init__(self, d: int) -> None:
        self.norm = nn.RMSNorm(d)
        self.gate, self.up, self.down = (
            nn.Linear(d, 2 * d),
            nn.Linear(d, 2 * d),
            nn.Linear(2 * d, d),
        )

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(td.silu(self.gate(y)) * self.up(y))


class Feed(nn.Module):
    def __init__(self, d: int) -> None:
        self.norm, self.fc, self.out = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.out(td.gelu(self.fc(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (p.reshape(b, t, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        mixed = td.attention(q, k, v, causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, d))


def image_block(channels: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU6())


def relu_block(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())


class Residual(nn.Module):
    """A choice of the wide sum, whose narrow copy is what waits."""

    def __init__(self, channels: int) -> None:
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        return td.relu(x + self.norm(self.conv(x)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gelu": (lambda: nn.Sequential(Feed(8), Feed(8)), (6, 8)),
    "gated": (lambda: nn.Sequential(Gated(8), Gated(8)), (6, 8)),
    "attention": (lambda: nn.Sequential(Attention(8, 2), Feed(8)), (2, 5, 8)),
    "images": (lambda: nn.Sequential(image_block(2), image_block(2)), (2, 2, 3, 3)),
    "relu": (lambda: nn.Sequential(relu_block(2), relu_block(2), relu_block(2)), (1, 2, 3, 3)),
    "residual": (lambda: nn.Sequential(Residual(2), Residual(2)), (1, 2, 3, 3)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), Feed(8)),
        (6, 8),
    ),
    "one row": (lambda: nn.Sequential(Feed(8), Gated(8)), (1, 8)),
    "tanh of tanh": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
        (6, 8),
    ),
}


def arrays_of(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    types = {n: graph.nodes[i].types[0] for n, i in graph.leaves.items()}
    return {
        n: (rng.standard_normal(t.shape) / 2 if t.dtype.is_float else rng.integers(0, 9, t.shape))
        .astype(t.dtype.numpy)
        for n, t in types.items()
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_a_step_that_keeps_everything(name: str) -> None:
    make, shape = MODELS[name]
    graph = step_of(make(), {"x": td.Spec(shape)}, td.float32)
    arrays = arrays_of(graph)
    every, some = (schedule(graph, in_place=True, target=t) for t in (NEVER, EAGER))
    assert live_bytes(some, EAGER) <= live_bytes(every, NEVER)
    assert some != every, "something is computed anew"
    expected = evaluate_float64(graph, arrays)
    for ours, other, right in zip(run(some, arrays), run(every, arrays), expected, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(ours, right, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["relu", "residual", "gelu"])
def test_narrow_values_are_those_of_a_step_that_keeps_everything(name: str) -> None:
    make, shape = MODELS[name]
    graph = step_of(make(), {"x": td.Spec(shape)}, td.bfloat16)
    arrays = arrays_of(graph)
    every, some = (run(schedule(graph, in_place=True, target=t), arrays) for t in (NEVER, EAGER))
    for ours, other in zip(some, every, strict=True):
        # Only where a wide value was rounded in memory is there a difference.
        np.testing.assert_allclose(ours, other, rtol=2e-2, atol=2e-3)


def test_a_graph_without_anything_to_compute_anew_stays_as_it_is() -> None:
    graph = td.trace(lambda x, w: (x @ w).sum(), td.Spec((512, 512)), td.Spec((512, 512)))
    assert recomputed(graph, EAGER).graph is graph


def live_bytes(program: Program, target: Target) -> int:
    """The most bytes of temporary buffers that live at one time."""
    plan, sizes = plan_buffers(program, target), {b.name: padded(b) for b in program.buffers}
    change = np.zeros(len(program.steps) + 1, np.int64)
    for name in plan.offsets:
        change[plan.spans[name].first] += sizes[name]
        change[plan.spans[name].last + 1] -= sizes[name]
    return int(change.cumsum().max())


def test_what_lives_at_the_peak_is_shown() -> None:
    graph = step_of(nn.Sequential(Feed(256), Feed(256)), {"x": td.Spec((8192, 256))}, td.bfloat16)
    program = schedule(graph, in_place=True, target=LIBRARIES)
    plan = plan_buffers(program, LIBRARIES)
    view = memory_view(program, plan)
    assert view.live == live_bytes(program, LIBRARIES) <= view.arena == plan.size
    assert sum(b.nbytes for b in view.buffers) <= view.live
    assert all(b.first <= view.step <= b.last for b in view.buffers)
    hidden = [b for b in view.buffers if b.elements == 8192 * 1024]
    assert {b.dtype for b in hidden} == {"bfloat16"}
    assert all("test_recompute.py" in b.lines[0] and "in forward" in b.lines[0] for b in hidden)
    head, _, *rows = str(view).splitlines()
    assert f"{view.live / 1e6:,.1f} MB alive" in head
    assert f"{sum(b.nbytes for b in hidden[:1]) / 1e6:.2f}"[:4] in "".join(rows)


def test_a_step_shows_its_memory() -> None:
    specs, model = {"x": td.Spec((64, 8))}, nn.Sequential(Feed(8), Feed(8))
    step, oracle = (
        td.compile_step(model, lambda m, b: m(b["x"]).mean(), optim.sgd(0.1), specs, device=device)
        for device in ("cpu", "oracle")
    )
    assert step.memory.arena == step.report.programs[0].arena
    assert 0 < step.memory.live <= step.memory.arena
    assert oracle.memory is None


def test_everything_is_kept_where_that_is_asked_for() -> None:
    graph = step_of(nn.Sequential(Feed(256), Feed(256)), {"x": td.Spec((8192, 256))}, td.bfloat16)
    tools = CudaToolchain()
    sizes = [
        live_bytes(tools.schedule(graph, td.CompileOptions(recompute=r)), tools.target)
        for r in (True, False)
    ]
    assert sizes[1] >= sizes[0] + 2 * 8192 * 1024, "an activation of one layer at least"


def test_operands_are_kept_if_that_takes_little_memory() -> None:
    """An activation that a matmul of the backward pass reads, where the peak may grow enough."""
    graph = step_of(nn.Sequential(Feed(256), Feed(256)), {"x": td.Spec((8192, 256))}, td.bfloat16)

    def of_part(part: int) -> tuple[int, int]:
        sizes = replace(LIBRARIES.materialization, least_kept=1 << 20, kept_part=part)
        target = replace(LIBRARIES, materialization=sizes)
        program = schedule(graph, in_place=True, target=target)
        return live_bytes(program, target), sum(cost.traffic(c.kernel) for c in program.calls())

    (least, more_moved), (most, moved) = of_part(10**9), of_part(1)
    assert least + 2 * 8192 * 1024 <= most <= 2 * least
    assert moved <= more_moved - 2 * 8192 * 1024, "it is not written once more"


def bytes_of_a_layer(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], target: Target = LIBRARIES
) -> float:
    """By how much each further layer raises the peak."""
    sizes = []
    for count in (4, 8):
        # The first matmul makes the residuals narrow.
        first = [nn.Linear(shape[-1], shape[-1])] if len(shape) < 4 else []
        model = nn.Sequential(*first, *(layer() for _ in range(count)))
        graph = step_of(model, {"x": td.Spec(shape)}, td.bfloat16)
        program = schedule(graph, in_place=True, target=target)
        sizes.append(live_bytes(program, target))
    return (sizes[1] - sizes[0]) / 4


# Batches of weight gradients may raise the peak a little: they are left out.
APART = replace(LIBRARIES, matmuls=replace(LIBRARIES.matmuls, busy_tiles=0))


def test_bytes_of_a_transformer_layer() -> None:
    b, t, d, heads = 16, 256, 256, 4
    tokens = b * t
    # The residual before attention and after it, queries, keys and values, what attention gives,
    # and the hidden layer before its gelu: no normalised tensor, no activation.
    narrow = tokens * (d + 3 * d + d + d + 4 * d)
    wide = tokens * (2 + 2 + heads)  # means, deviations, logarithms of attention's sums
    weights = 12 * d * d + 9 * d  # as narrow floats, too
    expected = 2 * (narrow + weights) + 4 * wide
    found = bytes_of_a_layer(lambda: nn.Sequential(Attention(d, heads), Feed(d)), (b, t, d), APART)
    assert found <= 1.01 * expected


class Checkpointed(nn.Module):
    def __init__(self, d: int) -> None:
        self.inner = Feed(d)

    def forward(self, x):
        return td.checkpoint(lambda x: self.inner(x))(x)


def test_bytes_of_a_checkpointed_layer() -> None:
    """Its input, and its weights as narrow floats; not what is computed again inside it."""
    rows, d = 16384, 256
    found = bytes_of_a_layer(lambda: Checkpointed(d), (rows, d), APART)
    assert found <= 1.1 * (4 * rows * d + 2 * 8 * d * d)


def test_bytes_of_a_gated_layer() -> None:
    rows, d = 8192, 256
    narrow = rows * (d + 2 * d + 2 * d) + 6 * d * d  # the residual, both hidden layers; weights
    assert bytes_of_a_layer(lambda: Gated(d), (rows, d), APART) <= 1.01 * 2 * narrow + 8 * rows


def test_bytes_of_a_convolution_with_its_norm_and_activation() -> None:
    n, c, side = 16, 32, 64
    pixels = n * c * side * side  # what the convolution gives, and no mask and no activation
    assert bytes_of_a_layer(lambda: image_block(c), (n, c, side, side)) <= 1.02 * 2 * pixels


def test_bytes_of_a_convolution_with_its_relu() -> None:
    n, c, side = 64, 32, 64
    pixels = n * c * side * side  # what the next convolution reads; it tells where x was above 0
    assert bytes_of_a_layer(lambda: relu_block(c), (n, c, side, side)) <= 1.02 * 2 * pixels
