"""Training on several ranks: launched, resumed under another number, ended when one of them ends."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import distributed_training as training
import treadle as td
from test_distributed import HERE, mpiexec
from treadle.cli.launch import THREADS, command_of, environment_of
from treadle.cli.train import UsageError
from treadle.distributed.environment import launched_rank, launched_size, refuse_srun_without_mpi
from treadle.train.world import World

STEPS = 8
SCRIPT = str(HERE / "distributed_training.py")
LIMIT = 120  # seconds for a job on a busy machine


def job(
    ranks: int, folder: Path, *arguments: object, by_launch: bool = True
) -> subprocess.CompletedProcess[str]:
    """The script on some ranks, a thread each."""
    given = [SCRIPT, str(folder), *map(str, arguments)]
    command = [mpiexec(), "-n", str(ranks), sys.executable, *given]
    if by_launch:
        command = [sys.executable, "-m", "treadle", "launch", "-n", str(ranks), *given]
    environment = {**os.environ, THREADS: "1", "PYTHONPATH": str(HERE.parent / "src")}
    if ranks == 1:
        command = [sys.executable, *given]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT, cwd=HERE
    )


def digest(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"^digest (\w+)", done.stdout, re.M)
    return found


def trained_here(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
) -> str:
    """By this process alone."""
    given = ["", str(folder), "--steps", str(STEPS), "--every", "1", *more]
    monkeypatch.setattr(sys, "argv", given)
    training.main()
    (found,) = re.findall(r"^digest (\w+)", capsys.readouterr().out, re.M)
    return found


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "run").iterdir() if p.is_dir())


# The same bits, whatever happens


def test_a_run_goes_on_under_other_numbers_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted alone, killed on two ranks, a full disk there, then alone: the same bits.

    The third writes its parameters in chunks, which the last reads.
    """
    wanted = trained_here(tmp_path / "whole", capsys, monkeypatch)
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        trained_here(folder, capsys, monkeypatch, "--trouble", "interrupt", "0", "2")
    killed = job(2, folder, "--steps", STEPS, "--every", 1, "--trouble", "kill", 1, 5)
    assert killed.returncode == 137, killed.stdout + killed.stderr
    assert killed.stderr.count("treadle: ") == 1, killed.stderr
    assert "treadle: rank 1 of 2 has died (process" in killed.stderr
    assert "resumed at step 2" in killed.stdout
    assert entries(folder)[-1] == "000004-step-4"
    trouble = ["--trouble", "full disk", 1, 6]
    full = job(2, folder, "--steps", STEPS, "--every", 1, "--sharded", *trouble)
    assert digest(full) == wanted
    assert full.stderr.count("no checkpoint at step 6") == 1  # once, and not on every rank
    assert "rank 1 of 2: No space left on device" in full.stderr
    assert entries(folder)[-1] == "000005-step-5", "nothing half-written"
    assert len(re.findall(rf"^epoch .* step {STEPS}/{STEPS}", full.stdout, re.M)) == 1
    assert trained_here(folder, capsys, monkeypatch) == wanted


def test_an_error_on_one_rank_is_shown_once_and_ends_all(tmp_path: Path) -> None:
    done = job(2, tmp_path, "--trouble", "raise", 1, 2)
    assert done.returncode == 1
    assert done.stderr.count("CallbackError: fit") == 1, done.stderr
    assert "treadle: rank 1 of 2 failed:" in done.stderr
    assert "row 7 is no number" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--local"], ["--sharded"]])
def test_a_run_of_fifty_steps_on_one_two_and_four_ranks(more: list[str], tmp_path: Path) -> None:
    wanted = digest(job(1, tmp_path / "whole", "--steps", 50, *more))
    folder = tmp_path / "cut"
    for ranks, step in ((1, 13), (2, 31)):
        cut = ["--trouble", "kill", ranks - 1, step]
        assert job(ranks, folder, "--steps", 50, "--every", 5, *more, *cut).returncode != 0
        assert entries(folder)[-1].endswith(f"step-{(step - 1) // 5 * 5}")
    assert digest(job(4, folder, "--steps", 50, "--every", 5, *more)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "code", "told"),
    [
        ("hang", 1, r"rank 1 does not come \(process .* in happens\)"),
        ("rate", 1, "ranks 0 and 1 differ in the lr_scale of step: 1 and 0.5"),
        ("interrupt", 130, "stopped after step 3"),
    ],
)
def test_what_one_rank_does_ends_all(trouble: str, code: int, told: str, tmp_path: Path) -> None:
    start = time.monotonic()
    done = job(2, tmp_path, "--timeout", 8, "--every", 1, "--trouble", trouble, 1, 3)
    assert done.returncode == code, done.stdout + done.stderr
    assert len(re.findall(told, done.stderr)) == 1, done.stderr
    assert time.monotonic() - start < LIMIT / 2
    if trouble == "interrupt":
        assert entries(tmp_path)[-1] == "000003-step-3"


@pytest.mark.slow
def test_one_rank_that_stops_stops_all(tmp_path: Path) -> None:
    done = job(2, tmp_path, "--trouble", "stop", 1, 3)
    digest(done)
    assert done.stdout.count("stopped after step 3: enough (rank 1)") == 1


@pytest.mark.slow
def test_a_rank_that_does_not_join_is_not_awaited_for_ever(tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "import os, time\nfrom treadle.distributed.launched import open_communicator\n"
        "time.sleep(300 * int(os.environ['PMI_RANK']))\nopen_communicator('auto', 3.0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
    command = [mpiexec(), "-n", "2", sys.executable, str(late)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode != 0
    assert "rank 0 of 2 has waited 3 s for MPI to start" in done.stderr


@pytest.mark.slow
def test_a_signal_to_the_launcher_is_every_ranks(tmp_path: Path) -> None:
    mpiexec()
    command = [sys.executable, "-m", "treadle", "launch", "-n", "2", SCRIPT, str(tmp_path)]
    environment = {**os.environ, THREADS: "1", "PYTHONPATH": str(HERE.parent / "src")}
    more = ["--steps", "100000", "--every", "100000"]
    with subprocess.Popen([*command, *more], env=environment) as launcher:
        end = time.monotonic() + 60
        while not (tmp_path / "log.csv").exists() and time.monotonic() < end:
            time.sleep(0.2)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(LIMIT) == 143
    assert len(entries(tmp_path)) == 1


TRIALS = int(os.environ.get("TREADLE_KILL_TRIALS", "10"))


@pytest.mark.slow
def test_ranks_that_are_killed_at_random_are_named(tmp_path: Path) -> None:
    """A process that is killed from outside, at any time of a job; then on to the same bits.

    Every other job holds its parameters in rows, and goes on from one that does not.
    docs/from-one-to-many.md tells of runs with more trials.
    """
    mpiexec()
    steps, rng, named, resumed = 400, random.Random(TRIALS), 0, 0
    wanted = digest(job(1, tmp_path / "whole", "--steps", steps, "--every", 20))
    folder = tmp_path / "cut"
    for trial in range(TRIALS):
        found = killed_at_random(folder, steps, rng, ["--sharded"] if trial % 2 else [])
        if found is None:  # it was over before: begin again
            assert digest(job(2, folder, "--steps", steps, "--every", 20)) == wanted
            resumed += 1
            folder = tmp_path / f"cut {trial}"
            continue
        rank, told, seconds = found
        assert re.findall(r"rank (\d) of 2 has died", told) == [str(rank)], told
        assert seconds < 30, f"trial {trial}: {seconds:.0f} s"
        named += 1
    assert digest(job(2, folder, "--steps", steps, "--every", 20)) == wanted
    print(f"{named} of {TRIALS} ranks killed and named, {resumed + 1} runs with the same bits")
    assert named > TRIALS // 2


def killed_at_random(
    folder: Path, steps: int, rng: random.Random, more: list[str]
) -> tuple[int, str, float] | None:
    """Kill a rank of a job some time after its first step: which, what was said, seconds then."""
    command = [mpiexec(), "-n", "2", sys.executable, SCRIPT, str(folder)]
    environment = {**os.environ, THREADS: "1", "PYTHONPATH": str(HERE.parent / "src")}
    log = folder / "log.csv"
    before = log.stat().st_mtime_ns if log.exists() else 0
    arguments = ["--steps", str(steps), "--every", "20", *more]
    process = subprocess.Popen(
        [*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True, stdout=-3
    )
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        if log.exists() and log.stat().st_mtime_ns != before:
            break
        time.sleep(0.05)
    time.sleep(rng.random() * 0.8)
    ranks = ranks_of(process.pid)
    rank = rng.randrange(2)
    is_over = process.poll() is not None or rank not in ranks
    if not is_over:
        os.kill(ranks[rank], signal.SIGKILL)
    start = time.monotonic()
    _, told = process.communicate(timeout=LIMIT)
    # All is trained and saved, and the rank has said that it leaves: there is nothing to say.
    has_left = not told and entries(folder)[-1:] == [f"{steps // 20:06}-step-{steps}"]
    died = process.returncode != 0 and not is_over and not has_left
    return (rank, told, time.monotonic() - start) if died else None


def ranks_of(launcher: int) -> dict[int, int]:
    """Processes of ranks below a launcher, as the system lists them."""
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().split(") ")[1].split()[1]
                )
            except OSError:
                continue
    for process in parents:
        above = process
        while above in parents and above != launcher:
            above = parents[above]
        if above != launcher:
            continue
        try:
            words = (Path("/proc") / str(process) / "environ").read_bytes().split(b"\0")
            command = (Path("/proc") / str(process) / "cmdline").read_bytes()
        except OSError:
            continue
        rank = [int(w[9:]) for w in words if w.startswith(b"PMI_RANK=")]
        if rank and b"distributed_training" in command:
            found[rank[0]] = process
    return found


# What launchers say, and what is passed on to them


def test_the_command_and_the_environment_of_ranks(tmp_path: Path) -> None:
    mpiexec()
    command = command_of(4, SCRIPT, ["--steps", "3"])
    assert Path(command[0]).name.startswith("mpiexec")
    assert command[1:] == ["-n", "4", sys.executable, SCRIPT, "--steps", "3"]
    train = command_of(2, "train", ["net.py", "--set", "lr=1"], "a,b")
    assert train[1:5] == ["-n", "2", "-hosts", "a,b"]
    assert train[6:] == ["-m", "treadle", "train", "net.py", "--set", "lr=1"]
    shared = environment_of(10**6, tmp_path / "status", {"A": "b"})
    assert (shared[THREADS], shared["A"]) == ("1", "b")
    assert environment_of(2, tmp_path / "status", {THREADS: "7"})[THREADS] == "7"
    for ranks, program, told in ((0, SCRIPT, "-n 0"), (2, "no.py", "there is no file no.py")):
        with pytest.raises(UsageError, match=told):
            command_of(ranks, program, [])


def test_a_missing_mpi_is_named_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.distributed.mpiexec.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"mpi4py is not installed.*treadle\[distributed\]"):
        command_of(2, SCRIPT, [])


def test_what_launchers_say() -> None:
    assert (launched_rank({}), launched_size({})) == (0, 1)
    mpich = {"PMI_RANK": "3", "PMI_SIZE": "4"}
    assert (launched_rank(mpich), launched_size(mpich)) == (3, 4)
    pmix = {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert (launched_rank(pmix), launched_size(pmix)) == (1, 2)


def test_tasks_of_srun_without_mpi_are_refused() -> None:
    tasks = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    with pytest.raises(td.TreadleError, match="4 tasks without MPI.*--mpi=pmi2"):
        refuse_srun_without_mpi(tasks)
    refuse_srun_without_mpi(tasks | {"PMI_RANK": "1"})
    refuse_srun_without_mpi({"SLURM_STEP_NUM_TASKS": "1"})


# Rows of a rank


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", str(ranks))


def test_ranks_have_the_rows_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(26)
    whole = td.data.ArrayLoader(rows, 8, shuffle=True, seed=4)
    wanted = list(whole)
    for ranks in (2, 4):
        parts = []
        for rank in range(ranks):
            as_rank(monkeypatch, rank, ranks)
            loader = td.data.ArrayLoader(rows, 8, shuffle=True, seed=4, local=True)
            loader.load_state_dict({**whole.state_dict(), "epoch": 0, "batch": 1})
            parts.append(list(loader))
        for i, batch in enumerate(wanted[1:]):
            np.testing.assert_array_equal(np.concatenate([p[i] for p in parts]), batch)


@pytest.mark.parametrize(("size", "given"), [(9, {}), (8, {"drop_last": False})])
def test_rows_that_cannot_be_shared_out_are_refused(
    size: int, given: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 0, 4)
    with pytest.raises(td.TreadleError, match="cannot be shared out to 4 ranks"):
        td.data.ArrayLoader(np.arange(26), size, local=True, **given)


# Files that ranks wrote


def chunked(tmp_path: Path) -> tuple[td.TrainStep, Path]:
    """A checkpoint as two ranks write it, by hand."""
    from treadle.train.manifest import MANIFEST, checksum
    from treadle.train.packing import pack

    step = training.compiled(False, 10)
    with td.CheckpointManager(tmp_path) as folder:
        path = folder.save(step).path
    body = json.loads((path / MANIFEST).read_text())
    state = step.state_dict()
    names = [n for n, a in state.items() if n.startswith("step:") and a.ndim == 2]
    assert names
    cut = {n: np.ascontiguousarray(state[n]).reshape(-1) for n in names}
    length = {n: -(-a.size // 4) for n, a in cut.items()}
    rows = {n: np.pad(a, (0, 4 * length[n] - a.size)).reshape(4, -1) for n, a in cut.items()}
    files = {"step": {n: a for n, a in state.items() if n not in names}}
    for rank in range(2):
        part = {n: np.ascontiguousarray(a[2 * rank : 2 * rank + 2]) for n, a in rows.items()}
        files[f"step.chunk-{rank:05d}-of-00002"] = part
    import hashlib

    body["files"] = {}
    for name, arrays in files.items():
        data = pack(name, arrays, False)
        (path / f"{name}.safetensors").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        body["files"][f"{name}.safetensors"] = {"bytes": len(data), "sha256": digest}
    shapes = {n: list(state[n].shape) for n in names}
    body |= {"schema": 2, "chunks": {"step": {"ranks": 2, "shards": 4, "shapes": shapes}}}
    body["checksum"] = checksum(body)
    (path / MANIFEST).write_text(json.dumps(body))
    return step, path


def test_chunks_are_glued_and_what_is_no_chunk_is_damage(tmp_path: Path) -> None:
    from treadle.train.manifest import MANIFEST, checksum

    step, path = chunked(tmp_path)
    wanted = step.state_dict()
    with td.CheckpointManager(tmp_path) as folder:
        assert folder.restore(step) is not None
        for name, value in step.state_dict().items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)
    good = json.loads((path / MANIFEST).read_text())
    for chunks in ({"ranks": 2, "shards": 5}, {"ranks": 1}, {"ranks": 0}, {"ranks": -1}):
        body = json.loads(json.dumps(good))
        body["chunks"]["step"] |= chunks
        body["checksum"] = checksum(body)
        (path / MANIFEST).write_text(json.dumps(body))
        with (
            td.CheckpointManager(tmp_path) as folder,
            pytest.raises(td.CheckpointError, match="chunks|damaged"),
        ):
            folder.restore(step)


def test_a_process_by_itself_is_a_world() -> None:
    world = World()
    assert (world.rank, world.size, world.is_alone, world.writes) == (0, 1, True, True)
    np.testing.assert_array_equal(world.gathered(3, 4), [[3, 4]])
    assert world.first({"a": 1}) == {"a": 1}
    with pytest.raises(OSError, match="full"):
        world.agreed("save", lambda: _raise(OSError("full")))


def _raise(error: Exception) -> None:
    raise error
