"""A container's share of the machine decides how many processes are started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuner.shadow.pool import usable_cores

CORES = 64
POD = "kubepods.slice/pod.slice/tune.scope"


@pytest.fixture(autouse=True)
def _large_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)))


def cores_with(folder: Path, membership: str, files: dict[str, str]) -> int:
    """Return the cores of a process whose kernel shows these files."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return usable_cores(folder / "cgroup", folder / "membership")


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        *(("max 100000", CORES), ("400000 100000", 4), ("250000 100000", 3)),
        *(("10000 100000", 1), ("100000000 100000", CORES)),
    ],
)
def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, limit: str, cores: int) -> None:
    assert cores_with(tmp_path, "0::/\n", {"cpu.max": f"{limit}\n"}) == cores


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    limits = {f"{POD}/cpu.max": "max 100000", "kubepods.slice/cpu.max": "800000 100000"}
    assert cores_with(tmp_path, f"0::/{POD}\n", limits) == 8
    own = {f"{POD}/cpu.max": "200000 100000"}
    assert cores_with(tmp_path, f"0::/{POD}\n", own) == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", CORES), ("300000", 3)])
def test_older_kernels_say_it_in_two_files(tmp_path: Path, quota: str, cores: int) -> None:
    member = "3:cpuset:/elsewhere\n2:cpu,cpuacct:/docker/tune\n0::/\n"
    files = {
        "cpu/docker/tune/cpu.cfs_quota_us": quota,
        "cpu/docker/tune/cpu.cfs_period_us": "100000",
    }
    assert cores_with(tmp_path, member, files) == cores


def test_without_groups_it_is_what_the_process_is_scheduled_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path / "nothing") == CORES


def test_this_machine_has_at_least_one() -> None:
    assert 1 <= usable_cores() <= CORES
