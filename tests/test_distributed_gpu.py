"""Data-parallel steps that a device makes by itself: the chain, NCCL in the graph, and staging."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distributed_cases as cases
import treadle as td
from emulated_chain import EmulatedChain, emulated
from fake_cuda import FakeDriver, fake_gpu
from fake_nccl import FakeNccl, fake_nccl
from test_distributed import launched, small
from treadle.base.errors import DeviceError, DistributedError
from treadle.runtime.chain import Exchange, Gather, Run, Swap
from treadle.runtime.cuda.chain import CudaChain
from treadle.runtime.cuda.device import device
from treadle.step import compile as compiling

FEW = ["mlp", "mlp, whole updates", "cnn", "gpt", "gpt, bfloat16", "float16"]
STEPS = 8  # with an overflow of float16 among them


# The same bits: chains of the processor's programs


def test_chains_on_two_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    done = launched(2, "emulated_chain.py", str(path), str(STEPS), *FEW, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    together = json.loads(path.read_text())
    for name in FEW:
        with emulated():
            alone = cases.trained(name, STEPS)
        for what in ("digest", "middle", "loss", "skipped"):
            assert together[name][what] == alone[what], (name, what)
    assert together["float16"]["skipped"]


@pytest.mark.slow
def test_chains_on_four_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    names = [*FEW, "cnn, per shard"]
    found = []
    for ranks in (1, 4):
        path = tmp_path / f"{ranks}.json"
        done = launched(ranks, "emulated_chain.py", str(path), "30", *names, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(path.read_text()))
    for name in names:
        assert found[0][name]["digest"] == found[1][name]["digest"], name


@pytest.mark.parametrize("name", ["mlp", "cnn, per shard"])
def test_a_chain_is_what_the_host_does_step_by_step(name: str) -> None:
    usual = cases.trained(name, 6)
    with emulated():
        step = cases.compiled(name)
        for batch in cases.rows(cases.CASES[name][2], 6):
            out = step(batch)
    assert out.loss == pytest.approx(usual["loss"], rel=1e-6)


def test_one_rank_that_exchanges_has_the_bits_of_one_that_does_not() -> None:
    made = []
    with emulated(why_not=None):
        for transport in ("auto", "nccl", "host"):
            step = small(parallel=td.DataParallel(shards=4, transport=transport))
            for i in range(3):
                step({"x": np.full((8, 3), i, np.float32), "y": np.ones((8, 2), np.float32)})
            made.append((step.state_dict(), chain_of(step)))
    (first, alone), *others = made
    assert not [link for link in alone.links if isinstance(link, Exchange)]
    for state, chain in others:
        names = [link.name for link in chain.links if isinstance(link, Exchange)]
        assert names == ["gradients", "norms"]
        for key, value in first.items():
            np.testing.assert_array_equal(state[key], value, err_msg=key)


def program_of(step: td.TrainStep) -> Any:
    (program,) = step._programs.built(step._inputs)._built.values()
    return program


def programs_of(step: td.TrainStep) -> Any:
    return step._programs.built(step._inputs).programs


def chain_of(step: td.TrainStep) -> Any:
    return program_of(step).chain


def test_norms_of_each_gradient_come_of_a_chain_too() -> None:
    with emulated():
        step = small()
        batch = {"x": np.ones((8, 3), np.float32), "y": np.ones((8, 2), np.float32)}
        wanted = small()  # a step of its own, which has made none
        gradients = wanted.gradients(batch)
        out = step(batch, grad_norms=True)
    for name, found in out.grad_norms.items():
        assert found == pytest.approx(np.linalg.norm(gradients[name]), rel=1e-5)


def test_what_the_host_must_look_at_is_no_chain() -> None:
    with emulated():
        step = small(options=td.CompileOptions(detect_anomaly=True))
        assert not hasattr(program_of(step), "chain")
        assert isinstance(program_of(small()).running, EmulatedChain)


# Two ranks on a driver that runs no kernels


class TwoRanks:
    """The first of two ranks; the other says the same, and gives 7 wherever it is asked."""

    name, rank, size, waited = "mpi", 0, 2, 0.0

    def __init__(self, other: str = "elsewhere", cause: str | None = None):
        self.other, self.cause = other, cause
        self.exchanged: list[tuple[str, int, int]] = []

    def texts(self, text: str) -> list[str]:
        if text.startswith("["):  # where a device is, and why it cannot exchange
            where, _ = json.loads(text)
            return [text, json.dumps([self.other or where, self.cause])]
        return [text, text]

    def all_to_all(self, given: np.ndarray, taken: np.ndarray) -> None:
        self.exchanged.append(("swap", given.size, taken.size))
        half = taken.size // 2
        taken[:half], taken[half:] = given[:half], 7

    def all_gather(self, given: np.ndarray, taken: np.ndarray) -> None:
        flat = taken.reshape(-1)
        if given.dtype == np.uint32:  # checksums of batches
            flat[:] = given[0]
            return
        self.exchanged.append(("gather", given.size, taken.size))
        flat[: given.size], flat[given.size :] = given.reshape(-1), 7

    def wait(self, pending: Sequence[object]) -> None:
        """All of it was there at once."""

    def calls(self) -> None:
        """Nobody is to be called."""

    def waiting(self) -> int:
        return 0


@contextmanager
def two_ranks(
    monkeypatch: pytest.MonkeyPatch, comm: TwoRanks, version: int = 22703
) -> Iterator[tuple[FakeDriver, FakeNccl]]:
    monkeypatch.setattr(compiling, "open_communicator", lambda *_: comm)
    with fake_gpu() as driver, fake_nccl(driver, version) as nccl:
        yield driver, nccl


def on_gpu(transport: str = "auto", case: str = "mlp") -> td.TrainStep:
    return cases.compiled(case, "cuda", transport=transport)


def steps_on(step: td.TrainStep, case: str, count: int) -> None:
    for batch in cases.rows(cases.CASES[case][2], count):
        step(batch)


@pytest.mark.parametrize("case", ["mlp", "mlp, whole updates", "cnn", "float16"])
def test_nccl_is_in_the_graph_that_a_step_is(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(monkeypatch, TwoRanks()) as (driver, nccl):
        step = on_gpu(case=case)
        assert "NCCL 2.27.3, in the step's graph" in step.report.transport
        assert "NCCL 2.27.3" in str(step.report)
        assert nccl.calls == [("init", 0, 2)]
        steps_on(step, case, 4)
        driver.calls.clear()
        steps_on(step, case, 1)
        once = {"cuCtxSetCurrent", "cuEventSynchronize", "cuGraphLaunch", "cuEventRecord"}
        assert driver.calls == dict.fromkeys(once, 1)
        links = [k for k in chain_of(step).links if isinstance(k, Exchange)]
        groups = " ".join(c[0] for c in nccl.calls[1:]).split("group")[1:]
        assert len(groups) == 3 * len(links), "a graph for each slot, a group for each exchange"


def test_every_row_goes_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(monkeypatch, TwoRanks()) as (_, nccl):
        step = on_gpu(case="gpt")
        steps_on(step, "gpt", 3)  # micro-steps of one update
        programs, values = programs_of(step), step.session.values
        for name in programs.gradients:
            chunk = programs.own_type(name).nbytes
            given = values.place(programs.names.gradient(name)).address
            taken = values.place(programs.names.received(name)).address
            for rank in (0, 1):
                at = rank * chunk
                assert ("send", rank, given + at, 0, chunk) in nccl.calls
                assert ("receive", rank, 0, taken + at, chunk) in nccl.calls
        # A parameter's rows are updated in it and gathered in place, if nothing is filled up.
        gathers = {c[3]: c for c in nccl.calls if c[0] == "gather"}
        whole = [n for n in programs.arrays if not programs.pieces[n].filling]
        in_place = [n for n in whole if programs.own_type(n).nbytes % 16 == 0]
        assert in_place
        for name in in_place:
            address = values.place(name).address
            assert gathers[address][2] == address, "this is the first rank"
        filled = [n for n in programs.arrays if programs.pieces[n].filling]
        assert filled
        for name in filled:
            assert values.place(name).address not in gathers


def test_graphs_go_when_the_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(monkeypatch, TwoRanks()) as (driver, _):
        step = on_gpu()
        steps_on(step, "mlp", 4)
        assert len(driver.graphs) == 3
        step.load_params(step.params)  # in place: the graphs stay
        steps_on(step, "mlp", 1)
        assert len(driver.graphs) == 3
        del step
        device().reclaim()
        assert not driver.graphs
        assert not driver.modules


@pytest.mark.parametrize(
    ("comm", "version", "told"),
    [
        (TwoRanks(other=""), 22703, "ranks 0 and 1 have the same GPU"),
        (TwoRanks(cause="NCCL is not installed"), 22703, "rank 1: NCCL is not installed"),
        (TwoRanks(), 20900, r"rank 0: NCCL is 2\.9\.0, from before CUDA 12"),
    ],
)
def test_where_nccl_cannot_be_used_the_report_says_why(
    comm: TwoRanks, version: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(monkeypatch, comm, version):
        with pytest.raises(DistributedError, match=f'transport="nccl": {told}'):
            on_gpu("nccl")
        step = on_gpu()
        plain = told.replace("\\", "")
        assert f"the host's memory and MPI ({plain})" in step.report.transport


def test_staging_goes_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = TwoRanks()
    with two_ranks(monkeypatch, comm) as (driver, nccl):
        step = on_gpu("host")
        assert 'transport="host"' in step.report.transport
        assert not nccl.calls
        steps_on(step, "mlp", 4)
        comm.exchanged.clear()
        driver.calls.clear()
        steps_on(step, "mlp", 1)
        links = [k for k in chain_of(step).links if isinstance(k, Exchange)]
        assert [k.name for k in links] == ["gradients", "norms", "sums", "parameters"]
        assert driver.calls["cuGraphLaunch"] == len(links) + 1
        wanted = [
            ("gather", p.nbytes, 2 * p.nbytes)
            if isinstance(p, Gather)
            else ("swap", 2 * p.nbytes, 2 * p.nbytes)
            for link in links
            for p in link.parts
        ]
        assert comm.exchanged == wanted
        programs = program_of(step).programs
        for name in programs.gradients:
            received = step.session.values[programs.names.received(name)]
            assert (received[1].view(np.uint8) == 7).all(), "what the other rank gave"
            given = step.session.values[programs.names.gradient(name)]
            np.testing.assert_array_equal(received[0], given[: len(given) // 2])
        assert {"exchange of gradients", "exchange of parameters"} <= step.report.exchange.keys()


@pytest.mark.parametrize(("shards", "part"), [(2, 0.5), (4, 1.0)])
def test_narrow_gradients_are_sent_as_they_are(
    shards: int, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with one shard sends what the shard has stored, one with several their sum."""
    with two_ranks(monkeypatch, TwoRanks()):
        step = cases.compiled("gpt, bfloat16", "cuda", shards=shards)
        programs, chain = programs_of(step), chain_of(step)
        assert len(programs.narrow) >= 8
        swaps = {p.given.buffer: p for k in chain.links if isinstance(k, Exchange)
                 for p in k.parts if isinstance(p, Swap)}  # fmt: skip
        for name in programs.narrow:
            swap = swaps[programs.sum_name(name)]
            assert swap.nbytes == part * programs.own_type(name).nbytes
            stored = step.session.types[programs.names.gradient(name)]
            assert stored.dtype is td.bfloat16
        (shard, *_) = [k.program for k in chain.links if isinstance(k, Run)]
        kernels = [k.name for k in shard.plan.kernels]
        assert not [k for k in kernels if k.startswith(("copy", "reshape"))], "nothing is copied"


def test_the_gluing_check_takes_narrow_gradients() -> None:
    with emulated():
        step = td.compile_step(
            td.nn.Linear(6, 5),
            cases.weighted,
            td.optim.sgd(0.1),
            next(cases.rows("rows", 1)),
            device="cpu",
            precision="bfloat16",
            parallel=td.DataParallel(shards=2),
            options=td.CompileOptions(verify="full"),
        )
    assert programs_of(step).narrow
    (claim,) = [c for c in step.report.claims if c.kind == "gluing"]
    assert claim.is_established, claim


def test_gradients_are_swapped_and_numbers_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(monkeypatch, TwoRanks()):
        step = on_gpu(case="cnn")
        chain = chain_of(step)
        assert isinstance(program_of(step).running, CudaChain)
        exchanges = [k for k in chain.links if isinstance(k, Exchange)]
        assert [k.name for k in exchanges][:2] == ["statistics"] * 2, "of two batch norms"
        (gradients,) = [k for k in exchanges if k.name == "gradients"]
        assert {type(p) for p in gradients.parts} == {Swap, Gather}
        runs = [k.program.graph.name for k in chain.links if isinstance(k, Run)]
        assert runs.index("fold") > runs.index("numbers") > runs.index("sums")


def test_an_error_of_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(monkeypatch, TwoRanks()) as (driver, nccl):
        step = on_gpu()
        nccl.failing["send"] = 2
        with pytest.raises(DeviceError, match=r"NCCL says unhandled system error \(2\)"):
            steps_on(step, "mlp", 1)
        assert nccl.depth == 0, "the group is over"
        assert not driver.captures, "and the capture"
        nccl.failing.clear()
        steps_on(step, "mlp", 1)


def test_nccl_is_for_gpus() -> None:
    with pytest.raises(td.ArgumentError, match="transport=\"nccl\" on 'cpu'"):
        small(parallel=td.DataParallel(shards=4, transport="nccl"))


def test_steps_of_several_ranks_time_no_algorithms() -> None:
    """Ranks that chose different ones would have different bits."""
    with fake_gpu():
        assert on_gpu().recipe.options.deterministic
    assert not small().recipe.options.deterministic


def test_arrays_on_the_device_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_cuda_host import OnDevice

    with fake_gpu():
        step = small_on_gpu()
        batch = {"x": np.ones((8, 3), np.float32), "y": np.zeros((8, 2), np.float32)}
        step({n: OnDevice(a) for n, a in batch.items()})
        traffic = program_of(step).running._traffic
        held = traffic.block.read(np.empty(traffic.size, np.uint8))
        assert held[:24].view(np.float32).tolist() == [1.0] * 6


def small_on_gpu() -> td.TrainStep:
    return td.compile_step(
        td.nn.Linear(3, 2),
        lambda model, b: td.losses.mse(model(b["x"]), b["y"]),
        td.optim.adamw(1e-2),
        {"x": td.Spec((8, 3)), "y": td.Spec((8, 2))},
        device="cuda",
        parallel=td.DataParallel(shards=4),
    )


@pytest.mark.parametrize(("rank", "devices", "taken"), [(0, 1, 0), (3, 1, 0), (3, 8, 3), (9, 8, 1)])
def test_ranks_of_a_host_take_its_gpus_in_turn(
    rank: int, devices: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI_LOCALRANKID", str(rank))
    driver = FakeDriver()
    driver.devices = devices
    with fake_gpu(driver):
        assert device().handle == taken
