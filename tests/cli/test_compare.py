"""`tune compare`: the strategies of the field in their known order, printed, kept and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.emit_parts import a_run_dir
from support.shadow_files import a_profile, a_trace_file
from support.toy import ToyCosts, ToySource
from support.toy_tune import write_trace
from tuner.cli.commands import compare
from tuner.cli.compare import CompareOptions, run_compare
from tuner.errors import ShadowError, UsageError
from tuner.report.page import sections_of
from tuner.report.run_files import read_run
from tuner.shadow.profiles import write_profile

# A step costs nearly the same for one sequence as for eight, as on an engine.
SOURCE = ToySource(ToyCosts(base_s=0.01, knee=64, crowd_s=0.0))


@pytest.fixture
def profile(tmp_path: Path) -> tuple[str, ...]:
    """Return the options that name a profile in place of an engine."""
    write_profile(tmp_path / "profile.yaml", a_profile())
    return ("--profile", str(tmp_path / "profile.yaml"), "--force-profile")


def compared(trace: Path, *more: str) -> int:
    arguments = ["--trace", str(trace), "--max-num-seqs", "16", "--batch-size", "2,4", *more]
    params = compare.make_context("compare", arguments).params
    return run_compare(CompareOptions.parse(params), SOURCE)


def test_strategies_stand_in_the_order_of_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", n=120)
    assert compared(trace, "--uniform", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["recorded", "saturation", "uniform"]
    for name, rows in found.items():
        assert [row["max_num_seqs"] for row in rows] == [1, 1, 2, 4, 16, 16]
        assert [row["processes"] for row in rows] == [1, 2, 1, 1, 1, 1]
        several = rows.pop(1)
        rates = [row["measurement"]["requests_per_s"] for row in rows]
        assert rates[0] < rates[1] < rates[2] < rates[3] * 1.001
        waits = [row["measurement"]["e2e_s"]["p50"] for row in rows]
        assert waits[1] < waits[0]
        if name == "saturation":
            # A toy has no device to share: two of them do twice as much.
            assert several["measurement"]["requests_per_s"] == pytest.approx(2 * rates[0], 0.05)
        else:
            assert "at saturation" in several["failure"]


def test_what_is_kept_stands_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, folder = write_trace(tmp_path / "t.jsonl", n=60), a_run_dir(tmp_path)
    assert compared(trace, "--uniform", "--run", str(folder)) == 0
    out, err = capsys.readouterr()
    assert "one request at a time" in out
    assert "shown in" in err
    page = (folder / "report.html").read_text()
    assert "The strategies of the field" in page
    sections = {section.anchor: section for section in sections_of(read_run(folder))}
    recorded, saturated, uniform = sections["strategies"].tables
    names = [[row[0].text for row in one.rows] for one in (recorded, saturated, uniform)]
    assert names[0] == names[1] == names[2]
    assert len(names[0]) == 6
    assert "with uniform lengths: one request at a time" in sections["strategies"].plots[0].says


def test_the_load_the_window_and_that_all_is_predicted_stand_on_terminal_and_page(
    profile: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, folder = a_trace_file(tmp_path / "t.jsonl", 100), a_run_dir(tmp_path)
    where = ("--load", "3", "--window", "0s:1s", "--run", str(folder))
    assert compared(trace, *profile, *where) == 0
    assert capsys.readouterr().out.startswith("at 3 x the recorded load, window 0 s to 1 s")
    section = {s.anchor: s for s in sections_of(read_run(folder))}["strategies"]
    assert "Every number here was predicted, none was measured: window 0 s" in section.says[1]
    recorded, _ = section.tables
    assert recorded.caption == "With 3 \N{MULTIPLICATION SIGN} the recorded load"
    assert recorded.rows[0][-1].text == "queue grew"
    assert all("customdata" in bars["hovertemplate"] for bars in section.plots[0].traces)


def test_a_folder_that_holds_no_run_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", n=10)
    with pytest.raises(UsageError, match="holds no result"):
        compared(trace, "--run", str(tmp_path))


def test_a_profile_predicts_the_order_of_the_field(
    profile: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two engines that share a card do no more than one, and waste what each leaves idle."""
    trace = a_trace_file(tmp_path / "t.jsonl", 300)
    assert compared(trace, *profile, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["recorded", "saturation"]
    names = [row["strategy"] for row in found["saturation"]]
    alone, two, _, static, configured, tuned = (
        row["measurement"]["requests_per_s"] for row in found["saturation"]
    )
    assert alone < static < configured < tuned
    assert two <= alone * 1.001
    assert "2 engines" in names[1]
    assert compared(trace, *profile) == 0
    told = capsys.readouterr()
    assert "with all requests there at once" in told.out
    assert "caveat: the profile may be of another machine or engine" in told.err
    with pytest.raises(ShadowError, match="max-model-len: not set, here it is 64"):
        compared(trace, *profile[:2], "--engine-arg", "max-model-len=64")


def test_in_a_window_several_engines_too_begin_warm(
    profile: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = a_trace_file(tmp_path / "t.jsonl", 200)
    assert compared(trace, *profile, "--window", "1s:2s", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["recorded"]
    assert len({row["measurement"]["completed"] for row in rows}) == 1
    assert [row["processes"] for row in rows] == [1, 2, 1, 1, 1, 1]


def test_of_fewer_requests_than_engines_one_is_idle(
    profile: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = a_trace_file(tmp_path / "t.jsonl", 1)
    assert compared(trace, *profile, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["recorded"]
    alone, two = (row["measurement"]["requests_per_s"] for row in rows[:2])
    assert two == pytest.approx(alone / 2, 0.01)
    assert compared(write_trace(tmp_path / "one.jsonl", n=1), "--json") == 0
    rows = json.loads(capsys.readouterr().out)["saturation"]
    assert [row["measurement"]["completed"] for row in rows[:2]] == [1, 1]


def test_static_batches_that_are_offered_more_than_they_ever_serve_are_marked(
    profile: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the window is too short to show it, and a request alone costs little."""
    trace = a_trace_file(tmp_path / "t.jsonl", 100, per_s=10.0)
    assert compared(trace, *profile, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    for recorded, at_once in zip(found["recorded"], found["saturation"], strict=True):
        measured, most = recorded["measurement"], at_once["measurement"]["requests_per_s"]
        is_outrun = measured["offered_per_s"] > most
        assert measured["sustained"] is not is_outrun, recorded["strategy"]
        assert ("not_sustained" in measured["caveats"]) is is_outrun
    assert compared(trace, *profile) == 0
    (shown,) = [
        line
        for line in capsys.readouterr().out.split("\n\n")[0].splitlines()
        if line.startswith("static batches of 4")
    ]
    assert shown.endswith("queue grew")
