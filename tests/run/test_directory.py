"""A run directory belongs to one run at a time, and its files are whole or not there."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.files import read_json
from tuner.run.directory import RunDir, new_run_path
from tuner.run.journal import Journal


def test_a_second_owner_is_kept_out_until_the_first_has_gone(tmp_path: Path) -> None:
    first = RunDir(tmp_path / "run", resume=False)
    with pytest.raises(UsageError, match="another run is using"):
        RunDir(tmp_path / "run", resume=False)
    first.close()
    first.close()
    RunDir(tmp_path / "run", resume=False).close()


def test_a_new_run_never_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    old = RunDir(tmp_path / "run", resume=False)
    old.write_json("run.json", {"a": 1})
    old.close()
    with pytest.raises(UsageError, match="holds a run already"):
        RunDir(tmp_path / "run", resume=False)
    again = RunDir(tmp_path / "run", resume=True)
    assert read_json(again.path / "run.json", dict[str, int], "") == {"a": 1}
    again.close()


@pytest.mark.parametrize("name", ["profile.yaml", "result.json", "traffic.json"])
def test_a_new_run_writes_over_no_file_of_somebody_else(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"holds {name}, in whose place"):
        RunDir(tmp_path, resume=False)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(name, "mine")]


def test_a_run_that_was_killed_before_it_began_begins_anew_in_its_place(tmp_path: Path) -> None:
    killed = RunDir(tmp_path / "run", resume=False)
    (killed.path / "profile.yaml").write_text("given")
    killed.close()
    RunDir(tmp_path / "run", resume=False).close()


def test_a_place_that_is_no_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used: Not a directory"):
        RunDir(tmp_path / "file" / "run", resume=False)


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, resume=False)
    rows: list[dict[str, Any]] = [{"n": 1, "x": None}, {"n": 2, "x": [1.5, "ü"]}]
    run_dir.write_lines("trials.jsonl", rows)
    text = (tmp_path / "trials.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == rows
    run_dir.close()


def test_a_line_is_added_behind_half_of_one(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, resume=False)
    run_dir.add_line("steps.jsonl", {"n": 1})
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"n": 2, "colu')
    run_dir.add_line("steps.jsonl", {"n": 3})
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[::2]] == [{"n": 1}, {"n": 3}]
    run_dir.close()


def test_a_full_disk_leaves_the_last_state_whole(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, resume=False)
    run_dir.write_json("result.json", {"state": "good"})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UsageError, match=r"result\.json cannot be written") as caught:
            run_dir.write_json("result.json", {"state": "x" * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--resume" in caught.value.hint
    assert read_json(run_dir.path / "result.json", dict[str, Any], "") == {"state": "good"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "result.json"]
    run_dir.close()


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        read_json(tmp_path / "run.json", dict[str, Any], "")
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        read_json(tmp_path / "run.json", dict[str, Any], "")


@pytest.mark.parametrize("name", ["what?1", "50%20x", "a#b", "{x}", "é ü", "a&b=c"])
def test_a_directory_may_be_called_anything(tmp_path: Path, name: str) -> None:
    for number in range(2):
        folder = RunDir(tmp_path / f"{name}{number}", resume=False)
        journal = Journal(folder.storage_url)
        assert journal.records() == []
        assert (folder.path / "study.db").stat().st_size > 0
        journal.begin(EngineLimits(8, 512))
        journal.close()
        again = Journal(folder.storage_url, must_exist=True)
        assert len(again._trials()) == 1
        again.close()
        folder.close()
    assert len(list(tmp_path.iterdir())) == 2, "beside the directories"


def test_each_new_run_gets_a_path_of_its_own(tmp_path: Path) -> None:
    paths = set()
    for _ in range(3):
        path = new_run_path(tmp_path)
        path.mkdir()
        paths.add(path)
    assert len(paths) == 3


def test_a_run_that_measured_nothing_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    run_dir = RunDir(path, resume=False)
    run_dir.write_json("run.json", {})
    for name in ("engine.log", "study.db", "study.db-journal", "profile.yaml"):
        (path / name).write_text("x")
    run_dir.discard()
    run_dir.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["trials.jsonl", "notes.txt", "worker-host-7.log", "result.json"]
)
def test_what_may_be_a_result_or_somebody_elses_stays_with_all_beside_it(
    tmp_path: Path, name: str
) -> None:
    run_dir = RunDir(tmp_path / "run", resume=False)
    (run_dir.path / "engine.log").write_text("x")
    (run_dir.path / name).write_text("x")
    run_dir.discard()
    run_dir.close()
    assert {one.name for one in run_dir.path.iterdir()} == {".lock", "engine.log", name}


def test_what_was_measured_stays_before_its_file_is_written(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run", resume=False)
    run_dir.is_measured = True
    run_dir.discard()
    run_dir.close()
    assert run_dir.path.exists()


def test_a_folder_that_was_there_before_stays_and_so_does_all_that_it_held(
    tmp_path: Path,
) -> None:
    mine, full = tmp_path / "mine", tmp_path / "full"
    for folder in (mine, full):
        folder.mkdir()
    (full / "notes.txt").write_text("of somebody else")
    for folder, left in ((mine, set()), (full, {".lock", "notes.txt", "run.json"})):
        run_dir = RunDir(folder, resume=False)
        run_dir.write_json("run.json", {})
        run_dir.discard()
        run_dir.close()
        assert {one.name for one in folder.iterdir()} == left
    # A run that goes on is never discarded.
    again = RunDir(full, resume=True)
    again.discard()
    again.close()
    assert (full / "run.json").exists()


def test_a_neighbour_of_the_run_keeps_their_folder(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs" / "one", resume=False)
    (tmp_path / "runs" / "two").mkdir()
    run_dir.discard()
    run_dir.close()
    assert [one.name for one in (tmp_path / "runs").iterdir()] == ["two"]
