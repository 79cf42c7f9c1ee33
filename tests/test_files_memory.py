"""How much memory there is, of the machine and of a container."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tuner.files import free_bytes

V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = (
    *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    *("memory/memory.stat", "total_inactive_file"),
)


def machine(folder: Path, kib: int = 8_000_000) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal:  16000000 kB\nMemAvailable:  {kib} kB\n")
    return path


def container(
    folder: Path, names: tuple[str, ...], limit: str, used: int, dropped: int
) -> None:
    for name, text in zip(names[:2], (limit, str(used)), strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    (folder / names[2]).write_text(f"anon 5\n{names[3]} {dropped}\n")


def test_of_a_machine_it_is_what_is_available(tmp_path: Path) -> None:
    assert free_bytes(machine(tmp_path), tmp_path) == 8_000_000 * 1024
    assert 0 < free_bytes() < math.inf


@pytest.mark.parametrize("names", [V2, V1], ids=["v2", "v1"])
def test_of_a_container_it_is_its_own_and_files_read_before_do_not_count(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    container(tmp_path, names, "2000000000", 1_500_000_000, 400_000_000)
    assert free_bytes(machine(tmp_path), tmp_path) == 900_000_000


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path: Path) -> None:
    container(tmp_path, V2, "max", 1_500_000_000, 0)
    assert free_bytes(machine(tmp_path), tmp_path) == 8_000_000 * 1024


def test_where_the_system_does_not_tell_nothing_is_refused(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "none", tmp_path) == math.inf
