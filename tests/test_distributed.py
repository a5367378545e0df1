"""Data-parallel steps: the same bits for any number of ranks, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distributed_cases as cases
import treadle as td
from treadle import losses, nn, optim
from treadle.base.errors import DistributedError, GraphError
from treadle.distributed.communicator import SelfCommunicator
from treadle.distributed.mpi import _refuse_alone
from treadle.distributed.shards import Pieces, Share, merges
from treadle.runtime.held import Pages
from treadle.runtime.memory import HostMemory
from treadle.runtime.session import Session
from treadle.step.parallel import gluing, run
from treadle.step.parallel.gluing import Layout, Part
from treadle.step.parallel.ranks import _refuse_parameters

HERE = Path(__file__).resolve().parent
STEPS = 50
FEW = ["mlp", "mlp, whole updates", "cnn", "gpt", "float16"]


def mpiexec() -> str:
    pytest.importorskip("mpi4py", reason="pip install 'treadle[distributed]'")
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("there is no mpiexec: pip install 'treadle[distributed]'")
    return found


def launched(
    ranks: int, *arguments: str, timeout: float = 120, threads: int = 1
) -> subprocess.CompletedProcess[str]:
    """A script of this folder on several ranks, a thread each or some."""
    source = str(HERE.parent / "src")
    environment = {**os.environ, "TREADLE_THREADS": str(threads), "PYTHONPATH": source}
    command = [mpiexec(), "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=HERE
    )


def trained(ranks: int, names: list[str], path: Path, threads: int = 1) -> dict[str, Any]:
    given = ["distributed_cases.py", str(path), str(STEPS), *names]
    done = launched(ranks, *given, timeout=500, threads=threads)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


# The same bits


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: cases.trained(name, STEPS) for name in FEW}


def test_two_ranks_give_the_bits_of_one(alone: dict[str, Any], tmp_path: Path) -> None:
    sharded = [n + cases.SHARDED for n in ("gpt", "float16")]
    together = trained(2, FEW + sharded, tmp_path / "found.json")
    for name in FEW + sharded:
        for what in ("digest", "middle", "loss", "skipped"):
            wanted = alone[name.removesuffix(cases.SHARDED)][what]
            assert together[name][what] == wanted, (name, what)
    # Half of the parameters each, filled up to a multiple of the shards
    assert together["gpt, sharded"]["parameters"] <= 0.52 * alone["gpt"]["parameters"]
    assert alone["float16"]["skipped"] >= 5
    for name in ("cnn", "gpt"):  # the optimizer's state: half of it each
        assert together[name]["held"] <= 0.55 * alone[name]["held"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_give_the_bits_of_one(ranks: int, alone: dict[str, Any], tmp_path: Path) -> None:
    sharded = [n + cases.SHARDED for n in ("mlp", "cnn", "gpt", "float16")]
    together = trained(ranks, FEW + sharded, tmp_path / "found.json")
    for name, found in together.items():
        assert found["digest"] == alone[name.removesuffix(cases.SHARDED)]["digest"], name
    held = together["gpt, sharded"]["parameters"] / alone["gpt"]["parameters"]
    assert held <= 1.05 / ranks


@pytest.mark.slow
def test_runs_go_on_under_other_numbers_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    """Fifty steps on 2, 8, 1 and 4 ranks in turn, cut in the middle of an accumulation too."""
    names = ["mlp", "cnn", "gpt", "float16", "gpt, sharded"]
    (tmp_path / "cut").mkdir()
    runs: list[dict[str, Any]] = []
    for ranks, steps in ((2, "0-13"), (8, "13-26"), (1, "26-37"), (4, "37-50")):
        path = tmp_path / "cut" / f"{steps}.json"
        done = launched(ranks, "distributed_cases.py", str(path), steps, *names, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(json.loads(path.read_text()))
    for name in names:
        whole = cases.part(name, range(50), tmp_path / "whole.safetensors")
        assert [row for run in runs for row in run[name]["told"]] == whole["told"], name
        assert runs[-1][name]["state"] == whole["state"], name
        assert runs[-1][name]["skipped"] == whole["skipped"], name


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 8])
def test_ranks_of_two_threads_give_the_bits_of_one(shards: int, tmp_path: Path) -> None:
    """They update in parts, and send after phases: with one shard each, inside programs."""
    names = [f"{n}, {shards} shards" for n in ("mlp", "cnn", "gpt", "float16")]
    sharded = [n + cases.SHARDED for n in names]
    together = trained(2, [*names, *sharded], tmp_path / "found.json", threads=2)
    for name in names:
        wanted = cases.trained(name, STEPS)["digest"]
        assert together[name]["digest"] == wanted, name
        assert together[name + cases.SHARDED]["digest"] == wanted, name


SLOW = [pytest.param(first, 50, marks=pytest.mark.slow) for first in range(0, 300, 50)]


@pytest.mark.parametrize(("first", "count"), [(0, 4), *SLOW])
def test_random_programs_give_the_bits_of_one_rank(first: int, count: int) -> None:
    done = launched(2, "distributed_random.py", str(first), str(count), timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert int(done.stdout.split(" same")[0]) >= 0.8 * count, done.stdout


def test_sharded_parameters_are_gathered_for_whoever_uses_them(tmp_path: Path) -> None:
    done = launched(2, "distributed_sharded.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as without sharding") == 2, done.stdout


def test_a_process_by_itself_has_all_rows() -> None:
    batch = {"x": np.ones((8, 3), np.float32), "y": np.zeros((8, 2), np.float32)}
    steps = [small(parallel=td.DataParallel(shards=4, shard_parameters=s)) for s in (False, True)]
    first, second = (s(batch).loss for s in steps)
    assert first == second
    np.testing.assert_array_equal(steps[1].device_params["weight"], steps[0].params["weight"])


def test_parameters_on_a_device_are_not_sharded() -> None:
    session = Session(HostMemory("cuda", is_host=False))
    with pytest.raises(td.ArgumentError, match="shard_parameters=True on 'cuda'"):
        _refuse_parameters(session)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux counts pages there")
def test_pages_go_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    nbytes = 64 << 20
    pages = Pages(nbytes)
    array = pages.array(0, nbytes)
    address = array.ctypes.data
    array[...] = 1
    before = resident()
    pages.give_back()
    assert before - resident() > 0.9 * nbytes
    assert not array[:100].any()
    array[...] = 2
    assert pages.array(0, nbytes).ctypes.data == address


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_a_step_by_shards_is_the_step_without(name: str) -> None:
    make, loss, kind, given = cases.CASES[name]
    sgd = optim.sgd(0.1, momentum=0.9)
    step = cases.compiled(name, seed=3, optimizer=sgd)
    first = next(cases.rows(kind, 1))
    plain = td.compile_step(make(), loss, sgd, first, device="cpu", seed=3, **given)
    for batch in cases.rows(kind, 6):
        found, wanted = step(batch), plain(batch)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        if wanted.grad_norm is not None:
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    state, expected = step.state_dict(), plain.state_dict()
    assert {n: a.shape for n, a in state.items()} == {n: a.shape for n, a in expected.items()}
    for key, value in expected.items():
        np.testing.assert_allclose(state[key], value, atol=2e-6, rtol=1e-5, err_msg=key)
    step.reset(4)
    assert step.count == 0
    step.load_state_dict(expected)  # of a step without shards
    assert step.count == plain.count
    np.testing.assert_array_equal(step.state_dict()[key], expected[key])


def test_gradients_are_those_of_the_whole_batch() -> None:
    step = cases.compiled("mlp")
    make, loss, kind, _ = cases.CASES["mlp"]
    batch = next(cases.rows(kind, 1))
    plain = td.compile_step(make(), loss, optim.adamw(1e-2), batch, device="cpu")
    before = step.state_dict()
    found = step.gradients(batch)
    for name, wanted in plain.gradients(batch).items():
        np.testing.assert_allclose(found[name], wanted, atol=1e-6)
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_numbers_drawn_are_those_of_the_whole_batch() -> None:
    """Along the first axis, along another, and the same for all rows."""

    def loss(model: Any, batch: Any) -> Any:
        x = model(batch["x"])  # (rows, 3)
        first, second = td.random.uniform(x.shape), td.random.uniform((3, x.shape[0]))
        return (x * first * td.random.uniform((3,)) + x * second.T).mean()

    batch = {"x": np.ones((8, 2), np.float32)}
    steps = [
        td.compile_step(
            nn.Linear(2, 3), loss, optim.sgd(0.1), batch, device="cpu", seed=1, parallel=parallel
        )
        for parallel in (None, td.DataParallel(shards=4))
    ]
    for _ in range(3):
        first, second = (s(batch).loss for s in steps)
        assert first == pytest.approx(second, rel=1e-6)


# The tree, and who holds what


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 8, 16])
def test_every_shard_is_added_once(count: int) -> None:
    parts = np.eye(count)
    np.testing.assert_array_equal(run.tree_sum(parts), np.ones(count))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_make_branches_of_one_tree(ranks: int) -> None:
    parts = np.random.default_rng(0).standard_normal((8, 50)).astype(np.float32)
    each = 8 // ranks
    branches = [run.tree_sum(parts[r * each : (r + 1) * each]) for r in range(ranks)]
    np.testing.assert_array_equal(run.tree_sum(np.stack(branches)), run.tree_sum(parts))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (16,), (7, 3)])
def test_rows_are_the_array(shape: tuple[int, ...]) -> None:
    array, pieces = np.random.default_rng(0).standard_normal(shape), Pieces(shape, 4)
    np.testing.assert_array_equal(pieces.glue(pieces.cut(array)), array)
    flat = np.concatenate([array.reshape(-1)[pieces.part(i)] for i in range(4)])
    np.testing.assert_array_equal(flat, array.reshape(-1))


def test_a_layout_has_every_element_once() -> None:
    layout = Layout.of("w", (3, 5), 4, 2)
    layout.check()
    first, last = layout.parts
    for parts, told in (
        ((first,), "element 8 .* held by no rank"),
        ((first, replace(last, start=first.stop - 1)), r"element 7 .* held by ranks \[0, 1\]"),
        ((first, Part(1, last.start, last.stop - 1)), "element 14 .* held by no rank"),
    ):
        with pytest.raises(GraphError, match=f"w: {told}"):
            Layout("w", (3, 5), parts).check()


def full(parallel: td.DataParallel, loss: Any = cases.weighted) -> td.TrainStep:
    batch = next(cases.rows("rows", 1))
    return td.compile_step(
        nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 5)),
        loss,
        optim.adamw(1e-2),
        batch,
        device="cpu",
        clip_norm=1.0,
        parallel=parallel,
        options=td.CompileOptions(verify="full"),
    )


def test_the_gluing_check_is_part_of_verification() -> None:
    step = full(td.DataParallel(shards=4))
    (claim,) = [c for c in step.report.claims if c.kind == "gluing"]
    assert claim.is_established, claim
    assert "0.weight" in claim.buffers
    whole = full(td.DataParallel(shards=4, shard_optimizer=False))
    (claim,) = [c for c in whole.report.claims if c.kind == "gluing"]
    assert "every rank updates everything" in str(claim)


def defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something wrong with what shards and ranks are put together by."""
    own = Share.own
    if name == "wrong slice":

        def moved(share: Share) -> range:
            right = own.__get__(share)
            return range(right.start - bool(share.rank), right.stop - bool(share.rank))

        monkeypatch.setattr(Share, "own", property(moved))
    elif name == "missing shard":
        lost = [replace(m, levels=m.levels[:-1]) if m.waits_at is None else m for m in merges(4)]
        monkeypatch.setattr(gluing, "merges", lambda count: lost)
    elif name == "double count":
        twice = [replace(m, levels=m.levels * 2) if m.waits_at is None else m for m in merges(4)]
        monkeypatch.setattr(gluing, "merges", lambda count: twice)


@pytest.mark.parametrize("name", ["wrong slice", "missing shard", "double count", "wrong weight"])
def test_a_defect_is_refused_by_the_name_of_a_value_and_a_rank(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(name, monkeypatch)
    loss = cases.weighted if name != "wrong weight" else _unweighted
    with pytest.raises(GraphError, match=r"0\.weight.*rank"):
        full(td.DataParallel(shards=4), loss)


def _unweighted(model: Any, batch: Any) -> Any:
    """A weight that is counted once for each shard, rather than for each row."""
    mean = cases.weighted(model, batch)
    return td.Mean(mean.total, mean.weight + 1)


# What is refused


def small(**given: Any) -> td.TrainStep:
    arguments = {"optimizer": optim.adamw(1e-2), "parallel": td.DataParallel(shards=4), **given}
    optimizer, batch = arguments.pop("optimizer"), {"x": td.Spec((8, 3)), "y": td.Spec((8, 2))}
    batch = arguments.pop("batch", batch)
    return td.compile_step(
        nn.Linear(3, 2),
        lambda model, b: losses.mse(model(b["x"]), b["y"]),
        optimizer,
        batch,
        device="cpu",
        **arguments,
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"parallel": 4}, "parallel = 4. Pass td.DataParallel"),
        ({"accumulation": "sum"}, 'accumulation="sum" with parallel'),
        ({"optimizer": optim.lamb(1e-2)}, "lamb computes .* needs whole parameters"),
        (
            {"optimizer": optim.muon(1e-2, others=optim.sgd(0.1))},
            "muon.*computes .* needs whole parameters",
        ),
        ({"optimizer": optim.sam(optim.sgd(0.1))}, "sam.*asks for further gradients"),
        ({"precision": "float8"}, "float8 with parallel"),
        ({"batch": {"x": td.Spec((6, 3)), "y": td.Spec((6, 2))}}, "6 rows.*multiple of 4"),
        ({"parallel": td.DataParallel(shards=4, whole=("z",))}, "whole names z, which the batch"),
    ],
)
def test_what_cannot_be_sharded_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(td.TreadleError, match=told):
        small(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"shards": 0}, "shards = 0"),
        ({"batch_norm": "none"}, "batch_norm"),
        ({"timeout": -1}, "timeout"),
        ({"transport": "tcp"}, "transport"),
        ({"shard_parameters": True, "shard_optimizer": False}, "updates the rows that it holds"),
    ],
)
def test_arguments_of_parallel_are_checked(given: dict[str, Any], told: str) -> None:
    with pytest.raises(td.TreadleError, match=told):
        td.DataParallel(**given)


@pytest.mark.parametrize(("shards", "ranks"), [(8, 3), (6, 2), (2, 4)])
def test_ranks_that_cannot_share_the_shards(shards: int, ranks: int) -> None:
    with pytest.raises(td.TreadleError, match=f"{shards} shards .*{ranks} ranks"):
        Share(shards, ranks)


def test_a_missing_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DistributedError, match=r"MPI cannot be used.*treadle\[distributed\]"):
        small(parallel=td.DataParallel(shards=4, transport="mpi"))


def test_an_anomaly_names_the_shard_and_changes_nothing() -> None:
    step = small(options=td.CompileOptions(detect_anomaly=True))
    batch = {"x": np.ones((8, 3), np.float32), "y": np.zeros((8, 2), np.float32)}
    step(batch)
    before = step.state_dict()
    batch["x"][5] = np.nan
    with pytest.raises(td.NotFiniteError, match="shard 2, on rank 0, is nan"):
        step(batch)
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_an_mpi_of_another_abi_is_named_on_every_rank(tmp_path: Path) -> None:
    """The launcher is there, and mpi4py does not find the library that it was built for."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass\n")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library: libmpi.so.12')")
    program = tmp_path / "refused.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport treadle as td\n"
        "from treadle.distributed.launched import open_communicator\n"
        "try:\n    open_communicator('auto', 5.0)\n"
        "except td.DistributedError as error:\n    print(error, flush=True)\n"
    )
    done = launched(2, str(program))
    told = "MPI cannot be used: cannot load MPI library: libmpi.so.12"
    assert done.stdout.count(told) == 2, done.stdout + done.stderr
    assert done.stdout.count("it was built for another MPI") == 2


def test_a_launcher_of_another_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process is then alone, and says so."""
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(DistributedError, match="has started 4 processes, and MPI sees one"):
        _refuse_alone(1)
    _refuse_alone(4)


def test_bad_input_is_refused_on_every_rank(tmp_path: Path) -> None:
    done = launched(2, "distributed_refusals.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused as expected") == 2, done.stdout


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    start = time.monotonic()
    done = launched(2, "distributed_refusals.py", "late", timeout=200)
    told = done.stdout + done.stderr
    assert "rank 0 of 2 has waited 1 s for the others" in told, told
    assert done.returncode != 0
    assert time.monotonic() - start < 150  # and not when the other rank ends, after 300 s


def test_an_ensemble_is_of_steps_without_shards() -> None:
    with pytest.raises(td.TreadleError, match="the step was compiled with parallel="):
        td.ensemble(small(), 2)


def test_a_trainer_takes_it() -> None:
    step = small()
    batch = {"x": np.ones((8, 3), np.float32), "y": np.zeros((8, 2), np.float32)}
    history = td.Trainer(step).fit([batch] * 3, epochs=2, validation=[batch])
    assert step.count == 6
    assert step.evaluate(batch).loss < 1e3
    assert history is not None
    assert step.profile(batch).kernels


def test_a_process_by_itself_asks_nobody() -> None:
    comm = SelfCommunicator()
    given, taken = np.arange(3.0), np.zeros((1, 3))
    comm.wait([comm.all_gather(given, taken)])
    np.testing.assert_array_equal(taken[0], given)
    assert comm.texts("a") == ["a"]


def test_there_is_no_certificate_of_a_cut_graph() -> None:
    """It would say nothing of what is exchanged between its parts."""
    step = td.compile_step(
        nn.Linear(4, 2),
        lambda model, b: losses.mse(model(b["x"]), b["y"]),
        optim.sgd(0.1),
        {"x": td.Spec((4, 4)), "y": td.Spec((4, 2))},
        device="cpu",
        parallel=td.DataParallel(shards=2),
    )
    with pytest.raises(td.ArgumentError, match="data-parallel"):
        _ = step.certificate
