"""The default number of threads, on made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treadle.base.errors import ArgumentError
from treadle.runtime.cpu.processors import MOST_THREADS, default_threads

V2 = "34 25 0:29 {shows} {at} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {shows} {at} rw,relatime shared:4 - cgroup cgroup rw,{controllers}"
DISK = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"


class Machine:
    """A root folder with the files of the kernel that the count is made from."""

    def __init__(self, root: Path):
        self.root = root
        self.groups: list[str] = []
        self.mounts = [DISK]

    def write(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def v2(self, path: str, shows: str = "/", at: str = "/sys/fs/cgroup") -> None:
        self.groups.append(f"0::{path}")
        self.mounts.append(V2.format(shows=shows, at=at))

    def v1(self, path: str, shows: str = "/", controllers: str = "cpu,cpuacct") -> None:
        self.groups.append(f"4:{controllers}:{path}")
        at = f"/sys/fs/cgroup/{controllers}"
        self.mounts.append(V1.format(shows=shows, at=at, controllers=controllers))

    def v1_quota(self, folder: str, quota: object, period: object = 100_000) -> None:
        self.write(f"{folder}/cpu.cfs_quota_us", f"{quota}\n")
        self.write(f"{folder}/cpu.cfs_period_us", f"{period}\n")

    def threads(self, **environment: str) -> int:
        self.write("/proc/self/cgroup", "".join(f"{g}\n" for g in self.groups))
        self.write("/proc/self/mountinfo", "".join(f"{m}\n" for m in self.mounts))
        return default_threads(environment, self.root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """16 processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return Machine(tmp_path)


# Without quotas


def test_the_affinity_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.threads() == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 7, 9})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert machine.threads() == 3


def test_systems_without_affinity(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.threads() == 10
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.threads() == 1


def test_an_affinity_that_cannot_be_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> set[int]:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", fail)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert machine.threads() == 5


def test_a_machine_without_those_files(machine: Machine, tmp_path: Path) -> None:
    assert default_threads({}, tmp_path / "nothing here") == 16


def test_this_machine() -> None:
    assert 1 <= default_threads({}) <= (os.cpu_count() or 1)


# Version 2


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("max 100000", 16),
        ("200000 100000", 2),
        ("150000 100000", 2),  # rounded up
        ("100001 100000", 2),
        ("100000 100000", 1),
        ("10000 100000", 1),  # a tenth of a processor is still one thread
        ("1 1000000", 1),
        ("50000 10000", 5),
        ("1600000 100000", 16),
        ("9900000 100000", 16),  # more than there are
    ],
)
def test_a_quota(machine: Machine, text: str, threads: int) -> None:
    machine.v2("/")
    machine.write("/sys/fs/cgroup/cpu.max", text + "\n")
    assert machine.threads() == threads


@pytest.mark.parametrize(
    "text",
    ["", "\n", "max", "100000", "0 100000", "-1 100000", "100000 0", "100000 -5", "a b",
     "1 2 3", "1.5 2", "\0\0 \0"],
)  # fmt: skip
def test_a_quota_that_says_nothing(machine: Machine, text: str) -> None:
    machine.v2("/")
    machine.write("/sys/fs/cgroup/cpu.max", text)
    assert machine.threads() == 16


@pytest.mark.parametrize("smallest", ["user.slice", "user.slice/app", "user.slice/app/job"])
def test_the_tightest_of_the_enclosing_groups(machine: Machine, smallest: str) -> None:
    machine.v2("/user.slice/app/job")
    for group in ("user.slice", "user.slice/app", "user.slice/app/job"):
        quota = 3 if group == smallest else 8
        machine.write(f"/sys/fs/cgroup/{group}/cpu.max", f"{quota}00000 100000")
    machine.write("/sys/fs/cgroup/user.slice/other/cpu.max", "100000 100000")  # not ours
    machine.write("/sys/fs/cgroup/user.slice/app/job/inner/cpu.max", "100000 100000")
    assert machine.threads() == 3


def test_groups_without_the_file(machine: Machine) -> None:
    """The controller may be off for inner groups; the root never has the file."""
    machine.v2("/a/b/c")
    machine.write("/sys/fs/cgroup/a/cpu.max", "400000 100000")
    assert machine.threads() == 4


def test_a_group_that_is_gone(machine: Machine) -> None:
    machine.v2("/a/b (deleted)")
    machine.write("/sys/fs/cgroup/a/cpu.max", "400000 100000")
    assert machine.threads() == 4


def test_the_mount_may_be_elsewhere(machine: Machine) -> None:
    machine.v2("/job", at="/mnt/my\\040groups")
    machine.write("/mnt/my groups/job/cpu.max", "300000 100000")
    assert machine.threads() == 3


def test_a_container_that_sees_only_its_own_part(machine: Machine) -> None:
    machine.v2("/docker/abc/inner", shows="/docker/abc")
    machine.write("/sys/fs/cgroup/cpu.max", "600000 100000")
    machine.write("/sys/fs/cgroup/inner/cpu.max", "500000 100000")
    assert machine.threads() == 5


@pytest.mark.parametrize("path", ["/docker/xyz", "/docker", "/docker/abcd", "/../other"])
def test_a_mount_that_shows_another_part(machine: Machine, path: str) -> None:
    machine.v2(path, shows="/docker/abc")
    machine.write("/sys/fs/cgroup/cpu.max", "100000 100000")
    assert machine.threads() == 16


def test_a_path_does_not_leave_the_mount(machine: Machine) -> None:
    machine.v2("/../../outside")
    machine.write("/sys/fs/cgroup/cgroup.procs", "")
    machine.write("/sys/outside/cpu.max", "100000 100000")
    assert machine.threads() == 16


def test_the_affinity_and_the_quota_together(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.v2("/")
    machine.write("/sys/fs/cgroup/cpu.max", "600000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert machine.threads() == 2


# Version 1


@pytest.mark.parametrize(
    ("quota", "period", "threads"),
    [
        (-1, 100_000, 16),
        (0, 100_000, 16),
        (250_000, 100_000, 3),
        (30_000, 100_000, 1),
        (100_000, 50_000, 2),
        (100_000, 0, 16),
        ("", 100_000, 16),
        (100_000, "", 16),
        ("many", 100_000, 16),
    ],
)
def test_an_old_quota(machine: Machine, quota: object, period: object, threads: int) -> None:
    machine.v1("/")
    machine.v1_quota("/sys/fs/cgroup/cpu,cpuacct", quota, period)
    assert machine.threads() == threads


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_the_tightest_of_the_old_enclosing_groups(machine: Machine, controllers: str) -> None:
    machine.v1("/jobs/mine", controllers=controllers)
    machine.v1_quota(f"/sys/fs/cgroup/{controllers}/jobs", 300_000)
    machine.v1_quota(f"/sys/fs/cgroup/{controllers}/jobs/mine", 700_000)
    machine.v1_quota(f"/sys/fs/cgroup/{controllers}/jobs/other", 100_000)
    assert machine.threads() == 3


def test_an_old_container(machine: Machine) -> None:
    """The path is the host's, the mount shows the container's group."""
    machine.v1("/docker/abc", shows="/docker/abc")
    machine.v1_quota("/sys/fs/cgroup/cpu,cpuacct", 200_000)
    assert machine.threads() == 2


def test_other_controllers_do_not_count(machine: Machine) -> None:
    machine.v1("/", controllers="cpuset")
    machine.v1("/", controllers="cpuacct")
    machine.v1_quota("/sys/fs/cgroup/cpuset", 100_000)
    machine.v1_quota("/sys/fs/cgroup/cpuacct", 100_000)
    assert machine.threads() == 16


def test_other_controllers_beside_it_do_not_count(machine: Machine) -> None:
    machine.v1("/mine")
    machine.v1("/elsewhere", controllers="cpuset")
    machine.v1_quota("/sys/fs/cgroup/cpu,cpuacct/mine", 300_000)
    machine.v1_quota("/sys/fs/cgroup/cpu,cpuacct/elsewhere", 100_000)
    machine.v1_quota("/sys/fs/cgroup/cpuset/mine", 100_000)
    assert machine.threads() == 3


def test_both_versions_at_once(machine: Machine) -> None:
    machine.v1("/old")
    machine.v2("/new", at="/sys/fs/cgroup/unified")
    machine.v1_quota("/sys/fs/cgroup/cpu,cpuacct/old", 500_000)
    machine.write("/sys/fs/cgroup/unified/new/cpu.max", "400000 100000")
    assert machine.threads() == 4
    machine.v1_quota("/sys/fs/cgroup/cpu,cpuacct/old", 200_000)
    assert machine.threads() == 2


def test_garbage_is_ignored(machine: Machine) -> None:
    machine.groups += ["", ":", "::", "0:", "0::", "0::relative", "nonsense", "x:cpu"]
    machine.mounts += [
        "",
        " - ",
        "a - cgroup2",
        "1 2 3 / 5 6 - cgroup2 cgroup2 rw",
        "\\999 - x y z",
    ]
    assert machine.threads() == 16
    machine.v2("/")
    machine.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert machine.threads() == 2


def test_bytes_that_are_not_text(machine: Machine) -> None:
    machine.v2("/")
    machine.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    machine.threads()
    for name in ("cgroup", "mountinfo"):
        path = machine.root / "proc/self" / name
        path.write_bytes(b"\xff\xfe\n" + path.read_bytes())
    assert default_threads({}, machine.root) == 2
    (machine.root / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\xff 1")
    assert default_threads({}, machine.root) == 16


def test_files_that_are_folders(machine: Machine) -> None:
    machine.v2("/")
    (machine.root / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    assert machine.threads() == 16


# The user's word


@pytest.mark.parametrize("text", ["1", "3", " 8 ", "64", str(MOST_THREADS), "007"])
def test_the_environment_wins(machine: Machine, text: str) -> None:
    machine.v2("/")
    machine.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert machine.threads(TREADLE_THREADS=text) == int(text)


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_value_is_none(machine: Machine, text: str) -> None:
    assert machine.threads(TREADLE_THREADS=text) == 16


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "two", "1e3", "1_0", "٣", "+2", "4097", "9" * 5000, "2 3", "auto"]
)
def test_a_bad_value_is_refused(machine: Machine, text: str) -> None:
    with pytest.raises(ArgumentError, match="from 1 to 4096") as caught:
        machine.threads(TREADLE_THREADS=text)
    assert f"TREADLE_THREADS is {text!r}" in str(caught.value)
    assert "unset it" in str(caught.value)
    assert "test_processors.py" in str(caught.value)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_THREADS", "5")
    assert default_threads() == 5
    monkeypatch.delenv("TREADLE_THREADS")
    assert default_threads() == default_threads({})
