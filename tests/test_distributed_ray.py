"""Ranks on hosts that somebody else has chosen: MPI's proxies, and `td.distributed.ray`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import treadle as td
from test_distributed import HERE, mpiexec
from treadle.distributed.mpiexec import run_on_hosts
from treadle.distributed.placed import hosts_of

RANK = """
import sys
from treadle.distributed.launched import open_communicator
comm = open_communicator("auto", 60.0)
told = comm.texts(f"of {comm.size}")
sys.stdout.write(f"rank {comm.rank} {told} {sys.argv[1]}\\n")  # one write: ranks share an output
sys.stdout.flush()
sys.exit(int(sys.argv[1]) * comm.rank)
"""


class Local:
    """A proxy that this machine runs, as a task of Ray's does elsewhere."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command)

    def failed(self) -> str | None:
        return None

    def join(self) -> None:
        self.process.wait(20)


class NotStarted:
    def failed(self) -> str | None:
        return "node 7 is gone"

    def join(self) -> None: ...


@pytest.fixture
def program(tmp_path: Path) -> Path:
    mpiexec()
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "TREADLE_THREADS": "1"}


def test_proxies_start_the_ranks_of_their_hosts(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two addresses of this machine stand for two hosts."""
    hosts, asked = {"127.0.0.1": 1, "127.0.0.2": 1}, []

    def start(host: str, command: list[str]) -> Local:
        asked.append(host)
        return Local(command)

    command = [sys.executable, str(program), "0"]
    assert run_on_hosts(command, hosts, start, environment()) == 0
    assert asked == list(hosts)
    told = capsys.readouterr().out
    assert sorted(told.splitlines()) == [f"rank {i} ['of 2', 'of 2'] 0" for i in (0, 1)]


def test_the_code_of_a_rank_that_fails_is_that_of_all(program: Path) -> None:
    command = [sys.executable, str(program), "3"]
    code = run_on_hosts(command, {"127.0.0.1": 2}, lambda _, c: Local(c), environment())
    assert code != 0


def test_a_proxy_that_does_not_start_is_named(program: Path) -> None:
    with pytest.raises(td.DistributedError, match="cannot be started: node 7 is gone"):
        run_on_hosts(
            [sys.executable, str(program), "0"],
            {"127.0.0.1": 2},
            lambda host, command: NotStarted(),
            environment(),
        )


def test_bundles_by_host() -> None:
    nodes = [{"NodeID": n, "NodeManagerAddress": a} for n, a in (("x", "10.0.0.1"), ("y", "::2"))]
    found = hosts_of({2: "x", 0: "y", 1: "x"}, nodes)
    assert found == {"::2": [0], "10.0.0.1": [1, 2]}


def test_what_ray_cannot_run_is_refused(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(td.DistributedError, match=r"Ray cannot be used.*treadle\[ray\]"):
        td.distributed.ray(program, ranks=2)
    with pytest.raises(td.DistributedError, match="there is no file"):
        td.distributed.ray(tmp_path / "none.py", ranks=2)
    with pytest.raises(td.TreadleError, match="ranks = 0"):
        td.distributed.ray(program, ranks=0)


@pytest.mark.slow
def test_ranks_on_workers_of_ray(program: Path, tmp_path: Path) -> None:
    """In a process of its own, so that Ray's threads end with it."""
    pytest.importorskip("ray", reason="pip install 'treadle[ray]'")
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import ray, treadle as td
        ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
        td.distributed.ray({str(program)!r}, ["0"], ranks=2, timeout=60)
        for ranks, code in ((2, "3"), (3, "0")):
            try:
                td.distributed.ray({str(program)!r}, [code], ranks=ranks, timeout=3)
            except td.DistributedError as error:
                print("refused:", error.cause, flush=True)
        """)
    )
    given = {**environment(), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    given["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("['of 2', 'of 2'] 0") == 2, done.stdout + done.stderr
    assert "rank.py ended with the code" in done.stdout
    assert "3 ranks of 1 processors found no room within 3 s, in a cluster of 2" in done.stdout
