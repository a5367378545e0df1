"""`td.distributed.ray`: Ray says where ranks run, and MPI's own process manager starts them there.

Ray reserves processors, and on each host that it chose one of its tasks runs MPI's proxy. The ranks
are processes of MPI, as under mpiexec; Ray carries none of what they exchange.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.base.errors import DistributedError
from treadle.base.numbers import POSITIVE, check_number, check_whole
from treadle.distributed.mpiexec import mpiexec_path, run_on_hosts

NAME = "distributed.ray"
THREADS = "TREADLE_THREADS"
LEAVE = 10.0  # seconds for a task to end when mpiexec has


def ray(
    program: str | Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    cpus: int = 1,
    timeout: float = 300.0,
) -> None:
    """Run a Python file on ranks that a Ray cluster has room for, and wait for its end.

    Each of the `ranks` has `cpus` processors, and computes with as many threads. `timeout` is how
    many seconds they are waited for. A cluster that this process is not connected to is the one
    that `ray.init()` finds or starts. All hosts have the file and this interpreter at the same
    paths.
    """
    ranks, cpus = check_whole(NAME, "ranks", ranks), check_whole(NAME, "cpus", cpus)
    check_number(NAME, "timeout", timeout, POSITIVE)
    if not Path(program).is_file():
        raise DistributedError(NAME, f"there is no file {program}", "Pass a Python file.")
    library = _library()
    mpiexec_path()  # before anything is reserved
    environment = {THREADS: str(cpus), **os.environ}
    command = [sys.executable, str(Path(program).resolve()), *map(str, arguments)]
    with _connected(library), _reserved(library, ranks, cpus, timeout) as (group, bundles):

        def start(host: str, proxy: list[str]) -> _Task:
            return _Task(library, group, bundles[host][0], cpus, proxy)

        counts = {host: len(numbers) for host, numbers in bundles.items()}
        own = library.util.get_node_ip_address()
        code = run_on_hosts(command, counts, start, environment, own)
    if code:
        raise DistributedError(
            NAME,
            f"{program} ended with the code {code} on {ranks} ranks",
            "What they said is above.",
        )


def _library() -> Any:
    try:
        import ray as library
    except ImportError as error:
        remedy = "pip install 'treadle[ray]'; without it use treadle launch."
        raise DistributedError(NAME, f"Ray cannot be used: {error}", remedy) from error
    return library


@contextmanager
def _connected(library: Any) -> Iterator[None]:
    """Connected as the user is, or for this long."""
    if library.is_initialized():
        yield
        return
    library.init()
    try:
        yield
    finally:
        library.shutdown()


@contextmanager
def _reserved(
    library: Any, ranks: int, cpus: int, timeout: float
) -> Iterator[tuple[Any, dict[str, list[int]]]]:
    """Processors for all ranks: a placement group, and its bundles by host."""
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([{"CPU": cpus}] * ranks, strategy="PACK")
    try:
        if not group.wait(timeout):
            there = library.cluster_resources().get("CPU", 0)
            raise DistributedError(
                NAME,
                f"{ranks} ranks of {cpus} processors found no room within {timeout:g} s, in a "
                f"cluster of {there:g}",
                "Use fewer ranks, or wait longer with timeout=….",
            )
        table = placement_group_table(group)["bundles_to_node_id"]
        yield group, hosts_of(table, library.nodes())
    finally:
        remove_placement_group(group)


def hosts_of(
    bundles: Mapping[int, str], nodes: Sequence[Mapping[str, Any]]
) -> dict[str, list[int]]:
    """Bundles by the address of the host that they are on."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    found: dict[str, list[int]] = {}
    for number in sorted(bundles):
        found.setdefault(addresses[bundles[number]], []).append(number)
    return found


class _Task:
    """A task of Ray's that runs a proxy where a bundle is."""

    def __init__(self, library: Any, group: Any, bundle: int, cpus: int, command: list[str]):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def run_proxy() -> int:  # a function inside a function: Ray sends its code along
            return subprocess.run(command, check=False).returncode

        place = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        self._library = library
        options = {"num_cpus": cpus, "scheduling_strategy": place, "max_retries": 0}
        self._result = library.remote(**options)(run_proxy).remote()

    def failed(self) -> str | None:
        done, _ = self._library.wait([self._result], timeout=0)
        if not done:
            return None
        try:
            code = self._library.get(self._result)
        except Exception as error:  # of Ray's many
            return f"{type(error).__name__}: {error}"
        return f"the proxy ended with the code {code}" if code else None

    def join(self) -> None:
        self._library.wait([self._result], timeout=LEAVE)
