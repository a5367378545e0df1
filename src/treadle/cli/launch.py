"""`treadle launch -n 4 FILE.py`: a program on several ranks of this machine, or of some hosts."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from treadle.base.errors import DistributedError
from treadle.cli.train import USAGE, UsageError
from treadle.distributed.mpiexec import mpiexec_path
from treadle.distributed.watch import STATUS

THREADS = "TREADLE_THREADS"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    launch = commands.add_parser(
        "launch",
        help="run a Python file on several ranks",
        description="Start a Python file on several ranks with mpiexec; `train FILE.py` as the "
        "program is the command `treadle train FILE.py` on each. Ranks share the processors. "
        "Ctrl-C and SIGTERM go to all of them.",
        epilog="Exit codes: 0 all is well, else that of the first rank that failed, 137 for one "
        "that was killed, 2 wrong usage.",
    )
    launch.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many")
    launch.add_argument("--hosts", metavar="A,B", help="machines, by name (default: this one)")
    launch.add_argument("program", metavar="FILE.py", help="a Python file, or: train FILE.py")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to it")


def run_launch(options: argparse.Namespace) -> int:
    """Run the program on all ranks; the exit code of the first that failed."""
    try:
        command = command_of(options.ranks, options.program, options.arguments, options.hosts)
    except UsageError as error:
        print(f"treadle launch: {error}", file=sys.stderr)
        return USAGE
    with tempfile.TemporaryDirectory(prefix="treadle-launch-") as folder:
        status = Path(folder) / "status"
        code = _run(command, environment_of(options.ranks, status, os.environ))
        return _first_code(status, code)


def command_of(
    ranks: int, program: str, arguments: Sequence[str], hosts: str | None = None
) -> list[str]:
    """The mpiexec that sits beside the interpreter, or on the path, and what it starts."""
    if ranks < 1:
        raise UsageError(f"-n {ranks}: at least one rank.")
    try:
        mpiexec = mpiexec_path()
    except DistributedError as error:
        raise UsageError(f"{error.cause}. {error.remedy}") from error
    if program == "train":
        started = ["-m", "treadle", "train"]
    elif Path(program).is_file():
        started = [program]
    else:
        raise UsageError(f"there is no file {program}.")
    where = ["-hosts", hosts] if hosts else []
    return [mpiexec, "-n", str(ranks), *where, sys.executable, *started, *arguments]


def environment_of(ranks: int, status: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Ranks share the processors, unless the user says how many threads each has."""
    each = max(1, _processors() // ranks)
    return {THREADS: str(each), **given, STATUS: str(status)}


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Signals are passed on once: a terminal's do not reach a session of its own."""
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _first_code(status: Path, code: int) -> int:
    """What the monitor says of the rank that failed first; mpiexec's where it says nothing."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return int(json.loads(status.read_text(encoding="utf-8"))["code"])
    return code
