"""The mpiexec that is installed, and its hosts' proxies when somebody else starts them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Protocol

from treadle.base.errors import DistributedError

BESIDE = "pip install 'treadle[distributed]' brings mpi4py and an mpiexec."
PROXY, LAST = "HYDRA_LAUNCH:", "HYDRA_LAUNCH_END"  # what mpiexec -launcher manual prints
LEAVE = 3.0  # seconds to end in
PAUSE = 0.1  # seconds between looks at what runs elsewhere


def mpiexec_path() -> str:
    """The one beside the interpreter, or on the path."""
    if find_spec("mpi4py") is None:
        raise DistributedError("mpiexec", "mpi4py is not installed", BESIDE)
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    if found is None:
        cause = f"there is no mpiexec beside {sys.executable} or on the path"
        raise DistributedError("mpiexec", cause, BESIDE)
    return found


class Proxy(Protocol):
    """A process of MPI's on one of the hosts, which starts the ranks there."""

    def failed(self) -> str | None:
        """Why it could not be started, or None; mpiexec knows of what comes after."""
        ...

    def join(self) -> None:
        """Until it has ended, which it does soon after mpiexec."""
        ...


Start = Callable[[str, list[str]], Proxy]  # on a host, a command


def run_on_hosts(
    command: Sequence[str],
    hosts: Mapping[str, int],
    start: Start,
    environment: Mapping[str, str],
    own: str | None = None,
) -> int:
    """Run a command on so many ranks of each host; the exit code of mpiexec.

    mpiexec says what is to be run on each host, and `start` does it: no host is logged in to. `own`
    is this machine's address, as the hosts see it.
    """
    listed = ",".join(f"{host}:{count}" for host, count in hosts.items())
    options = ["-launcher", "manual", "-hosts", listed, "-n", str(sum(hosts.values()))]
    options += ["-localhost", own] if own else []
    with subprocess.Popen(
        [mpiexec_path(), *options, *command],
        env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        try:
            return _follow(child, list(hosts), start)
        finally:
            if child.poll() is None:
                _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """mpiexec tells its proxies to end; while it waits for the first of them it hears nothing."""
    child.terminate()
    try:
        child.wait(LEAVE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _follow(child: subprocess.Popen[str], hosts: list[str], start: Start) -> int:
    """Start the proxies that are asked for, then pass on what ranks print."""
    assert child.stdout is not None
    proxies: list[Proxy] = []
    for line in child.stdout:
        if line.startswith(PROXY):
            command = shlex.split(line.removeprefix(PROXY))
            proxies.append(start(hosts[len(proxies)], command))
        elif line.strip() == LAST:
            break
        else:
            print(line, end="")
    reader = threading.Thread(target=_pass_on, args=(child.stdout,), daemon=True)
    reader.start()
    while child.poll() is None:
        wrong = next((text for p in proxies if (text := p.failed()) is not None), None)
        if wrong is not None:
            remedy = "All hosts have this interpreter and its mpiexec, at the same paths."
            raise DistributedError("distributed.ray", f"ranks cannot be started: {wrong}", remedy)
        time.sleep(PAUSE)
    reader.join()
    for proxy in proxies:
        proxy.join()
    return child.returncode


def _pass_on(lines: IO[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)
