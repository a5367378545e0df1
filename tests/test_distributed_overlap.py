"""Exchanges that programs begin themselves: where in a plan, and that nothing else changes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import distributed_cases as cases
import treadle as td
from test_distributed import launched
from test_distributed_gpu import TwoRanks
from treadle import losses, nn, optim
from treadle.kernel.plan import Point, last_uses, points_after
from treadle.runtime.chain import (
    LOOKS,
    RESULTS,
    Chain,
    Gather,
    Place,
    Run,
    Swap,
    input_name,
)
from treadle.runtime.cpu.chain import NativeChain
from treadle.runtime.cpu.fetching import fetching_of
from treadle.runtime.cpu.program import NativeProgram
from treadle.runtime.cpu.script import WORDS, with_calls
from treadle.runtime.cpu.threads import Pool
from treadle.step import compile as compiling

# A kernel's arguments: first and last iteration, scratch, a table, the iteration of a repeat.
FUNCTION = ctypes.CFUNCTYPE(
    None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)


def several(model: Any, batch: Any) -> Any:
    """A few phases, a loop, and calls that threads share."""
    x = batch["x"]
    carry, rows = td.scan(lambda c, row: (td.tanh(c + row), c * row), x[0] * 0, x)
    return x @ x.T, carry, td.softmax(rows, -1), (x * x).sum(0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_is_called_at_every_point_of_a_plan(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_THREADS", str(threads))
    x = np.random.default_rng(0).standard_normal((96, 64), np.float32)
    forward = td.compile_forward({}, several, {"x": x}, device="cpu")
    wanted = forward({"x": x})
    program = forward._programs.built(forward.inputs).program
    assert isinstance(program, NativeProgram)
    assert program.threads == threads
    called: list[int] = []
    function = FUNCTION(lambda begin, end, scratch, table, iteration: called.append(table or 0))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    points = points_after(program.plan, Point(0, 0))
    assert len(points) > len(program.plan.steps) > 1, "points in the middle of a step"
    calls = {point: (address, 1 + i) for i, point in enumerate(points)}
    words = with_calls(program._script[WORDS:], program.script().script.ends, calls)
    script = np.concatenate([program._script[:WORDS], words])
    with monkeypatch.context() as patch:
        patch.setattr(program, "_address", script.ctypes.data)
        found = forward({"x": x})
    assert called == list(range(1, len(points) + 1)), "in the order of the plan, once each"
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    forward({"x": x})
    assert len(called) == len(points), "not outside"


class WithCalls(TwoRanks):
    """A rank whose exchanges are functions, which nobody calls here."""

    request_bytes = 4

    def calls(self) -> WithCalls:  # type: ignore[override]
        return self

    def waiting(self) -> int:
        return 1

    def begin(self, *given: int) -> tuple[int, ...]:
        return (8, *given)

    def test_all(self, *given: int) -> tuple[int, ...]:
        return (7, *given)

    def progress(self) -> tuple[int, ...]:
        return (9, 0, 0, 0)


@pytest.fixture(scope="module")
def gpt() -> td.TrainStep:
    return cases.compiled("gpt")


def test_gradients_are_sent_while_others_are_computed(gpt: td.TrainStep) -> None:
    """A message takes about six looks of both sides: most bytes are begun in time for them."""
    programs = gpt._programs.built(gpt._inputs).programs
    plan = programs.shard().plan
    begun, shared = last_uses(plan), last_uses(plan, threads=2)
    sizes = {programs.names.gradient(n): t.nbytes for n, t in programs.gradients.items()}
    looks = {n: LOOKS * (len(points_after(plan, begun[n])) - 1) for n in sizes}
    in_time = sum(nbytes for n, nbytes in sizes.items() if looks[n] >= 6)
    assert in_time >= 0.8 * sum(sizes.values())
    assert all(begun[n] <= shared[n] for n in sizes)
    assert any(begun[n] < shared[n] for n in sizes), "one thread need not wait for a step's end"


def test_a_step_of_two_ranks_is_one_native_call() -> None:
    """Batch norms over all shards, norms, the update and all exchanges are in it.

    One that waits too long in machine code is noticed, and who does not come is named.
    """
    done = launched(2, "distributed_calls.py")
    # Both ranks' lines may come as one.
    assert all(done.stdout.count(f"rank {rank}:") == 1 for rank in (0, 1)), done.stdout
    assert done.stdout.count("1 native of") == 6, done.stdout
    # What is left in Python is to agree that every rank's batch fits.
    assert done.stdout.count("'all_gather', 'run'") == 6, done.stdout
    assert "all_to_all" not in done.stdout
    assert done.returncode
    assert "rank 0 of 2 has waited 2 s for the others: rank 1 does not come" in done.stderr
    assert "in hang" in done.stderr


def test_a_step_of_one_process_is_one_native_call(
    gpt: td.TrainStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made = Pool.run, []
    monkeypatch.setattr(Pool, "run", lambda *given: (made.append(1), run(*given))[1])
    for batch in cases.rows("text", 6):
        gpt(batch)
    assert len(made) == 6


def test_a_step_that_is_interrupted_at_its_end_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives when the native call returns: the step is counted, and training goes on."""
    steps = [cases.compiled("mlp") for _ in range(2)]
    batches = list(cases.rows("rows", 3))
    for batch in batches:
        steps[0](batch)
    run = Pool.run

    def interrupted(*given: Any) -> None:
        run(*given)
        raise KeyboardInterrupt

    steps[1](batches[0])
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps[1](batches[1])
    assert steps[1].count == 2
    steps[1](batches[2])
    for name, value in steps[0].state_dict().items():
        np.testing.assert_array_equal(steps[1].state_dict()[name], value, err_msg=name)


def test_a_result_that_is_an_input_is_copied_from_where_it_is() -> None:
    x = np.arange(6, dtype=np.float32)
    forward = td.compile_forward({}, lambda model, batch: batch["x"], {"x": x}, device="cpu")
    program = forward._programs.built(forward.inputs).program
    ((leaf, _, type_),) = program.plan.leaves
    (output,) = program.plan.outputs
    run = Run(
        program,
        {leaf: Place(input_name(0, leaf))},
        {f"{output.kind.value}:{output.name}": Place(RESULTS)},
    )
    chain = Chain((run,), {leaf: type_}, 1, {RESULTS: x.nbytes}, {"y": (0, type_)})
    native = NativeChain(chain, 1, None)
    for i in range(3):
        found = native.run({}, 0, [{leaf: x + i}])["y"]
        np.testing.assert_array_equal(found, x + i)
    assert native.calls_made == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_program_gives_is_on_its_way_before_it_ends(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges of gradients begin in the last shard's script, at the points that a plan has."""
    monkeypatch.setenv("TREADLE_THREADS", str(threads))
    monkeypatch.setattr(compiling, "open_communicator", lambda *_: WithCalls())
    step = cases.compiled("gpt", shards=2, accumulate=1)
    (program,) = step._programs.built(step._inputs)._built.values()
    chain = program.running
    begun = [t for t in chain._tables.all if t.begun]
    inside = [t for t in begun if any(row[1:2] == [9] for row in t.rows)]
    swapped = [p for t in inside for _, p, _ in t.begun if isinstance(p, Swap)]
    assert len(swapped) == len(program.programs.gradients)
    gathered = [p for t in inside for _, p, _ in t.begun if isinstance(p, Gather)]
    assert bool(gathered) == (threads == 1), "several threads update in one long phase"
    requests = [request for t in begun for *_, request in t.begun]
    assert len(set(requests)) == len(requests)


# Parameters that are gathered before they are used


@pytest.mark.parametrize("seed", range(20))
def test_what_is_fetched_is_there_while_it_is_used(seed: int) -> None:
    """On random uses: whole at every use, and memory that is nobody else's meanwhile."""
    rng = np.random.default_rng(seed)
    sizes = {f"w{i}": int(rng.integers(1, 5000)) for i in range(rng.integers(1, 20))}
    uses = [
        set(rng.choice(list(sizes), rng.integers(0, min(4, len(sizes) + 1)), replace=False))
        for _ in range(rng.integers(1, 60))
    ]
    found = fetching_of(uses, sizes)
    for position, names in enumerate(uses):
        there = {f.buffer for f in found.fetches if f.first <= position <= f.last}
        assert names <= there
    for fetch in found.fetches:
        assert fetch.begin <= fetch.first <= fetch.last
        start = found.offsets[fetch.buffer]
        assert start + sizes[fetch.buffer] <= found.nbytes
        for other in found.fetches:
            is_later = fetch.last < other.begin or other.last < fetch.begin
            at = found.offsets[other.buffer]
            is_apart = start + sizes[fetch.buffer] <= at or at + sizes[other.buffer] <= start
            assert fetch is other or is_later or is_apart, (fetch, other)


def test_layers_take_turns_in_memory() -> None:
    """Forward and backward through twelve layers: a few of them are there at a time."""
    layers = [f"layer {i}" for i in range(12)]
    found = fetching_of([{n} for n in [*layers, *reversed(layers)]], dict.fromkeys(layers, 1 << 20))
    assert found.nbytes <= 5 << 20
    # The last ones are still there on the way back.
    assert len(found.fetches) <= 2 * len(layers) - 2


def test_sharded_parameters_are_fetched_inside_the_native_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TREADLE_THREADS", "1")
    monkeypatch.setattr(compiling, "open_communicator", lambda *_: WithCalls())
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    batch = {"x": td.Spec((8, 256)), "y": td.Spec((8, 256))}
    step = td.compile_step(
        nn.Sequential(*layers),
        lambda model, b: losses.mse(model(b["x"]), b["y"]),
        optim.adamw(1e-2),
        batch,
        device="cpu",
        parallel=td.DataParallel(shards=2, shard_parameters=True),
    )
    (program,) = step._programs.built(step._inputs)._built.values()
    chain = program.running
    whole = sum(2 * part.nbytes for part in chain.chain.fetched.values())
    assert 0 < chain._fetching.nbytes < 0.6 * whole
    requests = [request for t in chain._tables.all for *_, request in t.begun]
    assert len(set(requests)) == len(requests)
