"""A memory budget: the same bits in fewer bytes, on both kinds of targets, or a clear refusal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from test_kernels import run
from test_recompute import EAGER, MODELS, arrays_of, step_of
from treadle import nn, optim
from treadle.backends.cpu.backend import CpuToolchain
from treadle.backends.protocol import Built
from treadle.backends.registry import backend
from treadle.backends.scheduling import scheduled
from treadle.backends.stored import key_of
from treadle.base.memory import bytes_in
from treadle.base.records import from_json, to_json
from treadle.ir.graph import Graph
from treadle.kernel.plan import Plan, fits
from treadle.kernel.program import Program, calls_in, check_phases
from treadle.kernel.target import CPU, GPU, Target
from treadle.memory.assemble import assemble
from treadle.memory.budget import reduced
from treadle.memory.peak import memory_view
from treadle.memory.plan import plan_buffers
from treadle.runtime.cpu.program import NativeProgram
from treadle.schedule.lower import lower
from treadle.schedule.schedule import mapped


def eager(target: Target) -> Target:
    """Everything is worth a thought."""
    return replace(target, recomputation=replace(target.recomputation, least_bytes=0))


TARGETS = {
    "cpu": eager(CPU),
    "gpu": eager(replace(EAGER, materialization=GPU.materialization)),
}


def live_bytes(program: Program, target: Target) -> int:
    return memory_view(program, plan_buffers(program, target)).live


def assert_same_bits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("name", "device"),
    [("attention", "cpu"), ("dropout", "cpu"), ("gelu", "gpu"), ("dropout", "gpu")],
)
def test_the_fewest_bytes_give_the_same_bits(name: str, device: str) -> None:
    make, shape = MODELS[name]
    graph = step_of(make(), {"x": td.Spec(shape)}, td.bfloat16)
    check_reduced(graph, TARGETS[device])


def check_reduced(graph: Graph, target: Target, must_cut: bool = True) -> None:
    """Some calls are made again, fewer bytes live, and all results have the same bits."""
    lowered = lower(graph, in_place=True, target=target, with_parts=target.mapping is None)
    whole = mapped(lowered, True, target)
    less = check_phases(mapped(reduced(lowered, 0, target), True, target))
    assert less.again or not must_cut
    assert live_bytes(less, target) < live_bytes(whole, target)
    arrays = arrays_of(graph)
    assert_same_bits(run(less, arrays), run(whole, arrays))


def test_steps_with_scans_and_checkpoints_give_the_same_bits() -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            self.up, self.lstm, self.down = nn.Linear(4, 6), nn.LSTM(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            y = td.checkpoint(lambda h: td.gelu(self.up(h)).sin())(x)
            return self.down(td.tanh(self.lstm(y)[0]).exp())

    graph = step_of(Cells(), {"x": td.Spec((5, 3, 4))}, td.float32)
    for target in TARGETS.values():
        check_reduced(graph, target, must_cut=False)


def test_only_kernels_that_were_there_run_on_a_gpu() -> None:
    """Parts of a kernel would round where the whole one does not."""
    make, shape = MODELS["attention"]
    graph, target = step_of(make(), {"x": td.Spec(shape)}, td.bfloat16), TARGETS["gpu"]
    lowered = lower(graph, in_place=True, target=target)
    known = {id(k) for k in lowered.distinct()}
    less = reduced(lowered, 0, target)
    assert less.again
    assert {id(k) for k in less.distinct()} <= known


def test_a_leaf_that_an_update_changes_is_not_read_again() -> None:
    """The weight is updated as soon as its gradient is there: what it made cannot be made then."""

    def step(w: td.Tensor, x: td.Tensor) -> tuple[td.Tensor, td.Tensor]:
        y = td.tanh(x @ w)  # is read at the end once more
        new = w - (y * y).sum(0)
        return new, (td.sin(x @ new) @ y.T).sum()

    graph = td.trace(step, td.Spec((8, 8)), td.Spec((8, 8)))
    output = replace(graph.outputs[0], kind=type(graph.outputs[0].kind).UPDATE, name="w")
    graph = Graph(graph.nodes, (output, *graph.outputs[1:]), graph.name)
    arrays = arrays_of(graph)
    for target in TARGETS.values():
        lowered = lower(graph, in_place=True, target=target, with_parts=target.mapping is None)
        assert "w" in lowered.updated
        less = mapped(reduced(lowered, 0, target), True, target)
        assert_same_bits(run(less, arrays), run(mapped(lowered, True, target), arrays))


class Block(nn.Module):
    def __init__(self, d: int):
        self.norm, self.fc, self.out = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.out(td.gelu(self.fc(self.norm(x)))))


def blocks(count: int = 4, d: int = 64) -> nn.Module:
    return nn.Sequential(*(Block(d) for _ in range(count)))


def loss(model, batch):
    return model(batch["x"]).square().mean()


SPECS = {"x": td.Spec((256, 64))}


def compiled(budget: object = None, **more: object) -> td.TrainStep:
    options = td.CompileOptions(memory_budget=budget)  # type: ignore[arg-type]
    return td.compile_step(
        blocks(), loss, optim.adamw(1e-2), SPECS, clip_norm=1.0, device="cpu", options=options,
        **more,
    )  # fmt: skip


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((256, 64)).astype(np.float32)} for _ in range(count)]


@pytest.fixture(scope="module")
def plain() -> td.TrainStep:
    return compiled()


@pytest.fixture(scope="module")
def cut() -> td.TrainStep:
    return compiled(0.7)


def test_a_step_under_a_budget_trains_bit_for_bit_the_same(
    plain: td.TrainStep, cut: td.TrainStep
) -> None:
    for batch in batches(3):
        assert plain(batch).loss == cut(batch).loss
    plain.run(batches(2))
    cut.run(batches(2))
    ours, theirs = cut.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[n], theirs[n]) for n in ours)


def test_the_forecast_is_what_the_program_has(plain: td.TrainStep, cut: td.TrainStep) -> None:
    whole, less = plain.report.programs[0], cut.report.programs[0]
    assert less.arena <= 0.7 * whole.arena == 0.7 * less.uncut
    memory = cut.memory
    assert memory is not None
    assert (memory.arena, memory.uncut) == (less.arena, whole.arena)
    assert max(memory.alive) == memory.live <= memory.arena
    assert whole.flops < less.flops == whole.flops + sum(k.calls * k.flops for k in less.again)
    assert len(memory.again) == sum(k.calls for k in less.again) > 0
    assert all("test_budget.py" in line for r in memory.again for line in r.lines)
    saved = whole.arena - less.arena
    assert plain.report.peak_bytes - cut.report.peak_bytes >= saved - 8 * 2**20  # scratch differs
    assert "within its budget" in str(cut.report)
    assert "budget" not in str(plain.report)


def test_what_libraries_work_in_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known when a program is loaded; the program is made once more for what it leaves."""
    room, times = 1 << 20, list[int]()
    load = CpuToolchain.load

    def loaded(self: CpuToolchain, graph: Graph, built: Built) -> NativeProgram:
        times.append(built.plan.held)
        return load(self, graph, built)

    monkeypatch.setattr(NativeProgram, "workspace", property(lambda self: room))
    monkeypatch.setattr(CpuToolchain, "load", loaded)
    monkeypatch.setenv("TREADLE_CACHE", "off")
    plain = compiled().report
    less = compiled(most := int(0.8 * plain.peak_bytes)).report
    assert less.peak_bytes <= most
    assert times == [0, less.state_bytes, less.state_bytes + room]
    assert compiled(plain.peak_bytes).report.programs[0].uncut == 0


def test_evaluation_and_attached_programs_have_no_budget(cut: td.TrainStep) -> None:
    batch = batches(1)[0]
    assert np.isfinite(cut.evaluate(batch).loss)
    forward = cut.attach(lambda m, b: m(b["x"]), SPECS)
    assert forward(batch).shape == (256, 64)


def test_accumulated_steps_keep_within_it() -> None:
    options = td.CompileOptions(memory_budget=0.8)
    steps = [
        td.compile_step(
            blocks(2), loss, optim.sgd(0.1), SPECS, device="cpu", accumulate=2, options=o
        )
        for o in (None, options)
    ]
    for batch in batches(4):
        ours, theirs = (step(batch).loss for step in steps)
        assert ours == theirs
    whole, less = ({p.name: p.arena for p in step.report.programs} for step in steps)
    assert all(less[n] <= 0.8 * whole[n] for n in whole)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return step_of(blocks(4), SPECS, td.float32)


@pytest.mark.parametrize("target", [CPU, replace(GPU, has_attention=True)], ids=["cpu", "gpu"])
def test_steps_are_within_their_budgets(graph: Graph, target: Target) -> None:
    target = eager(target) if target is CPU else replace(eager(target), is_small=False)
    whole = scheduled(graph, td.CompileOptions(), target)
    arena, held = plan_buffers(whole, target).size, 100_000
    results = sum(t.nbytes for o, _, t in whole.outputs if o.name not in whole.updated)
    beside = held + results + sum(a.nbytes for _, a in whole.constants)
    for budget in (1.0, arena + beside):
        same = scheduled(graph, td.CompileOptions(memory_budget=budget), target, held=held)
        assert texts(same) == texts(whole)
        assert (same.again, same.uncut) == ((), 0)
    costs = []
    for budget in (0.9, int(0.75 * (arena + beside))):
        less = scheduled(graph, td.CompileOptions(memory_budget=budget), target, held=held)
        most = budget if isinstance(budget, int) else budget * arena + beside
        assert plan_buffers(less, target).size + beside <= most
        assert less.uncut == arena
        costs.append(sum(r.flops for r in less.again))
    assert costs == sorted(costs)


def texts(program: Program) -> list[tuple[str, ...]]:
    return [
        (c.kernel.name, *(a.buffer for a in c.arguments))
        for s in program.steps
        for c in calls_in(s)
    ]


def test_what_cannot_be_reached_is_said_before_anything_runs(graph: Graph) -> None:
    with pytest.raises(td.OutOfMemoryError, match=r"memory_budget = 0.05 .* Give it at least") as e:
        scheduled(graph, td.CompileOptions(memory_budget=0.05), CPU)
    least = int(str(e.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    found = scheduled(graph, td.CompileOptions(memory_budget=least), CPU)
    assert plan_buffers(found, CPU).size <= least
    with pytest.raises(td.OutOfMemoryError, match="memory_budget"):
        compiled("1kB")


@pytest.mark.parametrize("given", [0, -1, 1.5, 0.0, float("nan"), True, "2", "2 giga", "-1GB", b""])
def test_what_is_no_budget_is_refused(given: object) -> None:
    with pytest.raises(td.ArgumentError, match="memory_budget"):
        td.CompileOptions(memory_budget=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GiB", 2 << 30), ("1.5 MB", 1_500_000), ("7B", 7), ("3KiB", 3072), ("3kB", 3000)],
)
def test_bytes_may_be_text(text: str, nbytes: int) -> None:
    assert bytes_in(text) == nbytes
    assert td.CompileOptions(memory_budget=text) == td.CompileOptions(memory_budget=nbytes)


def test_plans_can_be_stored(graph: Graph) -> None:
    """Every buffer of a plan is used: the cache does not trust any other."""
    less = scheduled(graph, td.CompileOptions(memory_budget=0.75), CPU)
    plan = assemble(less, plan_buffers(less))
    assert len(plan.again) > 0
    assert from_json(Plan, to_json(plan)) == plan
    assert fits(plan, graph, dict(less.constants))


def test_plans_of_other_budgets_have_other_keys(graph: Graph) -> None:
    options = [td.CompileOptions(memory_budget=b) for b in (None, 0.5, 0.6, 1, 1.0)]
    toolchain = backend("cpu").toolchain(options[0])
    assert toolchain is not None
    assert len({key_of(graph, o, toolchain) for o in options}) == len(options)


@pytest.mark.slow
@pytest.mark.parametrize("device", TARGETS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", [td.float32, td.bfloat16], ids=str)
def test_any_model_in_any_bytes_has_the_same_bits(
    name: str, device: str, precision: td.DType
) -> None:
    make, shape = MODELS[name]
    graph, target = step_of(make(), {"x": td.Spec(shape)}, precision), TARGETS[device]
    lowered = lower(graph, in_place=True, target=target, with_parts=target.mapping is None)
    whole, arrays = mapped(lowered, True, target), arrays_of(graph)
    live, expected = live_bytes(whole, target), run(whole, arrays)
    for part in (0.9, 0.7, 0.0):
        less = mapped(reduced(lowered, int(part * live), target), True, target)
        assert live_bytes(less, target) <= live
        assert_same_bits(run(less, arrays), expected)
