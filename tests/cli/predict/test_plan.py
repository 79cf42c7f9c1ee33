"""`tune plan`: what is best at which load, predicted from a profile alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.shadow_files import a_profile, a_trace_file
from tuner.cli import run
from tuner.cli.values import LOADS
from tuner.errors import Caveat
from tuner.shadow.profiles import write_profile


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a profile and a trace."""
    folder = tmp_path_factory.mktemp("plan")
    write_profile(folder / "profile.yaml", a_profile())
    return str(folder / "profile.yaml"), str(a_trace_file(folder / "prod.jsonl", 400))


@pytest.fixture(scope="module")
def command(files: tuple[str, str]) -> list[str]:
    """Return the words that plan for both."""
    return ["plan", "--profile", files[0], "--trace", files[1], "--force-profile"]


def test_more_load_wants_larger_caps_until_a_change_pays(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--loads", "0.05,1", "--max-num-seqs", "2,8,24", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [caveat["id"] for caveat in told["caveats"]] == ["profile_forced"]
    assert told["engine"] == "shadow"
    assert told["current"] == {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    light, heavy = told["loads"]
    assert (light["load"], heavy["load"]) == (0.05, 1.0)
    assert not light["change_pays"]
    assert heavy["change_pays"]
    assert heavy["best"]["max_num_seqs"] > 4


def test_the_table_shows_what_both_reach_at_every_load_of_a_range(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [*command, "--loads", "0.05:1:0.95", "--max-num-seqs", "2,8"]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [found["load"] for found in told["loads"]] == [0.05, 1.0]
    assert run(asked) == 0
    lines = capfd.readouterr().out.splitlines()[-2:]
    for line, found in zip(lines, told["loads"], strict=True):
        best, current = found["at_best"], found["at_current"]
        shown = line.split()
        assert shown[0] == f"{found['load']:g}x"
        assert [float(shown[i]) for i in (2, 5)] == [
            float(f"{reached['e2e_s'][told['tail']]:.3g}") for reached in (best, current)
        ]
        assert [shown[i] for i in (4, 7)] == [
            f"{reached['requests_per_s']:.3g}/s" for reached in (best, current)
        ]
        assert ("not sustained" in line) is not (best["sustained"] and current["sustained"])


@pytest.mark.parametrize("command", ["plan", "explore"])
def test_a_window_begins_as_warm_as_a_replay_with_a_lead_in(
    command: str, files: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A third of it comes before it; but not in a closed loop, where there is none."""
    words = ["--profile", files[0], "--trace", files[1], "--force-profile", "--json"]
    words += ["--window", "4s:7s"]
    closed = ["--load-model", "closed", "--concurrency", "6"]
    for more, lead_in in (([], ["--lead-in", "1s"]), (closed, [])):
        assert run([command, *words, *more, "--loads", "1", "--max-num-seqs", "4"]) == 0
        (found,) = json.loads(capfd.readouterr().out)["loads"]
        assert run(["replay", "--engine", "shadow", *words, *more, *lead_in]) == 0
        wanted = json.loads(capfd.readouterr().out)
        assert found["at_current"]["e2e_s"]["p50"] == wanted["e2e_s"]["p50"]
        for name in ("offered", "offered_per_s", "utilisation"):
            assert found["at_current"][name] == wanted[name]


def test_loads_are_told_as_multiples_of_the_recorded_one_also_of_traffic_at_another(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [*command, "--max-num-seqs", "2,8"]
    assert run([*asked, "--loads", "2", "--json"]) == 0
    (twice,) = json.loads(capfd.readouterr().out)["loads"]
    assert run([*asked, "--load", "2", "--loads", "1", "--json"]) == 0
    (again,) = json.loads(capfd.readouterr().out)["loads"]
    assert [again[key] for key in ("load", "at_current")] == [2.0, twice["at_current"]]
    assert run([*asked, "--load", "2", "--loads", "1"]) == 0
    told = capfd.readouterr()
    assert told.out.splitlines()[-1].split()[0] == "2x"
    assert "load 2 x: best" in told.err
    # Where none is good enough nobody is called the best.
    assert run([*asked, "--loads", "1", "--slo", "ttft_p90=0.01ms"]) == 0
    assert "load 1 x: no setting meets the SLOs, nearest " in capfd.readouterr().err


def test_where_settings_cannot_be_compared_the_cause_is_told(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    less = ["--max-num-seqs", "2", "--request-timeout", "1s"]
    assert run([*command, "--load", "2", "--loads", "1", *less]) == 3
    told = capfd.readouterr().err
    assert "at 2 x the recorded load no setting answers" in told
    assert "time out\n" in told
    assert "trials.jsonl" not in told
    assert run(["plan", "--help"]) == 0
    assert "3 no setting answers" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--fleet", "--slo", "e2e_p90=2s", "--loads", "3"], "--loads is for the plan by load"),
        (["--clients", "--knobs", "long-prefill"], "--knobs is for the plan by load"),
        (["--router", "least-loaded"], "--router is for --fleet"),
        (["--gpu-hour-price", "2"], "--gpu-hour-price is for --fleet"),
        (["--clients", "--timezone", "+02:00"], "--timezone is for --by hour"),
        (["--clients", "--max-num-seqs", "4"], "--max-num-seqs is for the plan by load"),
        (
            ["--fleet", "--slo", "e2e_p90=2s", "--objective", "goodput"],
            "--objective is for the plan by load",
        ),
    ],
)
def test_an_option_that_another_kind_of_plan_reads_is_refused(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--profile", "x.yaml", "--trace", "t.jsonl", *more]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "loads"),
    [
        ("1", (1.0,)),
        ("2x,0.5", (0.5, 2.0)),
        ("0.5:1.5:0.25", (0.5, 0.75, 1.0, 1.25, 1.5)),
        ("0.1:0.4:0.1,3,0.3", (0.1, 0.2, 0.3, 0.4, 3.0)),
        ("1:2:0.4", (1.0, 1.4, 1.8)),
        ("2:2:1", (2.0,)),
    ],
)
def test_loads_are_a_list_of_loads_and_ranges_ascending(
    typed: str, loads: tuple[float, ...]
) -> None:
    assert LOADS.convert(typed, None, None) == loads


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--profile", "x.yaml", "--loads", "2:1:0.5"], "--loads a range must be FROM:TO:STEP"),
        (["--profile", "x.yaml", "--loads", "1:2"], "--loads a range must be FROM:TO:STEP"),
        (["--profile", "x.yaml", "--loads", "1:2:0"], "below 1,000,000, got '0'"),
        (["--profile", "x.yaml", "--loads", "1:9:1e-5"], "must be at most 200 loads"),
        ([], "--profile is missing"),
        (["--profile", "gone.yaml"], "gone.yaml cannot be read"),
        (["--profile", "x.yaml", "--loads", "0"], "must be a multiple above 0"),
    ],
)
def test_what_cannot_be_planned_is_reported(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(a_trace_file(tmp_path / "prod.jsonl", 40))
    assert run(["plan", "--trace", trace, *more]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_slos_that_no_load_is_low_enough_for_are_named(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [*command, "--loads", "0.5,4", "--max-num-seqs", "2,8", "--json"]
    assert run([*asked, "--slo", "ttft_p90=1ms", "--slo", "e2e_p90=1h"]) == 0
    said = capfd.readouterr().err
    assert "requests that are alone in the engine already take longer: ttft_p90 0." in said
    assert "no load is low enough: relax ttft_p90, shorten prompts, or take other" in said
    assert run([*asked, "--slo", "e2e_p90=1h"]) == 0
    assert "no load is low enough" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_fleet_is_planned_by_stretches_with_its_cost(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [
        *command,
        "--fleet",
        "--slo",
        "e2e_p90=2s",
        "--stretch",
        "10s",
        "--gpu-hour-price",
        "2",
    ]
    asked += ["--start-time", "1s", "--load", "4"]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    fixed, by_stretch, scaled, sure = told["ways"]
    names = ["fixed", "by stretch", "autoscaled", "sure"]
    assert [way["name"] for way in told["ways"]] == names
    odds = told["odds"]
    assert (odds["replicas"], odds["sure"]["replicas"]) == (
        fixed["replicas"],
        sure["replicas"],
    )
    assert odds["p_kept"] < 0.9 <= odds["sure"]["p_kept"]
    assert fixed["replicas"] > 1
    assert by_stretch["gpu_hours"] <= fixed["gpu_hours"]
    assert fixed["cost"] == pytest.approx(2 * fixed["gpu_hours"])
    assert scaled["autoscaler"]["target"] >= 1
    assert run(asked) == 0
    out = capfd.readouterr().out
    assert f"{fixed['replicas']} replicas at" in out
    assert "least-loaded router keep e2e_p90=2s" in out
    assert f"P(SLOs met, load borne) {odds['p_kept']:.2f}, with {sure['replicas']} " in out
    assert len(out.splitlines()) == 8 + len(told["ways"]) + len(fixed["stretches"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "--fleet needs an SLO"),
        (["--slo", "e2e_p90=2s", "--by", "hour"], "two plans"),
        (["--slo", "e2e_p90=2s", "--router", "prefix"], "no hash ids"),
        (["--slo", "e2e_p90=2s", "--stretch", "0s"], "--stretch must be at least 1s"),
    ],
)
def test_a_fleet_that_cannot_be_planned_is_refused(
    command: list[str], capfd: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert run([*command, "--fleet", *more]) == 2
    assert said in capfd.readouterr().err


def test_a_stretch_without_a_request_takes_one_replica(
    files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in Path(files[1]).read_text().splitlines()[:60]]
    late = [{**row, "arrived_at_s": row["arrived_at_s"] + 300.0} for row in rows]
    trace = tmp_path / "gap.jsonl"
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in (*rows, *late)))
    command = ["plan", "--profile", files[0], "--trace", str(trace), "--force-profile"]
    asked = ["--fleet", "--slo", "e2e_p90=2s", "--stretch", "60s", "--json"]
    assert run([*command, *asked]) == 0
    for way in json.loads(capfd.readouterr().out)["ways"]:
        assert [one["start_s"] for one in way["stretches"]] == [0.0, 300.0]


def test_a_fleet_says_what_it_does_not_keep_and_of_what_it_needs_how_many(
    files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in Path(files[1]).read_text().splitlines()]
    long = [{**row, "arrived_at_s": row["arrived_at_s"] + 60.0} for row in rows[:50]]
    long = [{**row, "output_length": 10 * row["output_length"]} for row in long]
    trace = tmp_path / "long.jsonl"
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in (*rows, *long)))
    command = ["plan", "--profile", files[0], "--trace", str(trace), "--force-profile"]
    asked = [*command, "--fleet", "--slo", "e2e_p90=2s", "--stretch", "60s"]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    needed = {tuple(one["limits"].values()): one["replicas"] for one in told["needed"]}
    assert run(asked) == 0
    lines = capfd.readouterr().out.splitlines()
    assert (
        "keep e2e_p90=2s but in 1 of 2 stretches, where up to 64 do not; predicted" in lines[0]
    )
    best, current = (needed[tuple(told[name].values())] for name in ("limits", "current"))
    assert (
        f"the busiest stretch by itself needs {best}, at the current 4/512 {current}" in lines
    )


def test_in_a_closed_loop_one_load_is_predicted(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    closed = ["--load-model", "closed", "--concurrency", "4", "--max-num-seqs", "4"]
    assert run([*command, *closed, "--loads", "0.5,1,2", "--json"]) == 0
    out, err = capfd.readouterr()
    assert [at["load"] for at in json.loads(out)["loads"]] == [1.0]
    assert "keeps as many in flight at every load: one is predicted" in err


def test_clients_are_told_the_same_in_words_and_in_json(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--clients", "--slo", "e2e_p95=60s", "--load", "0.05", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["retries"] > 0
    assert told["sharing"] is None
    assert run([*command, "--clients", "--slo", "e2e_p95=60s", "--load", "0.05"]) == 0
    lines = capfd.readouterr().out
    assert f"connection pool {told['connections']}," in lines
    assert f"time-out {told['timeout_s']:.3g} s" in lines
    assert f"retry budget {told['retries']:.0%}" in lines
    assert run([*command, "--clients", "--by", "hour"]) == 2
    assert "one of them" in capfd.readouterr().err


@pytest.mark.parametrize(
    "asked",
    [
        ("plan", "--loads", "0.5", "--max-num-seqs", "4"),
        ("plan", "--fleet", "--slo", "e2e_p50=1m", "--max-num-seqs", "4"),
        ("plan", "--clients"),
        ("gate", "--loads", "0.2", "--slo", "ttft_p50=1s"),
        ("gate", "--loads", "0.2", "--slo", "ttft_p50=1s", "--format", "middleware"),
    ],
)
def test_what_is_predicted_from_a_derived_profile_carries_the_caveat(
    files: tuple[str, str],
    asked: tuple[str, ...],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    derived = str(tmp_path / "derived.yaml")
    write_profile(Path(derived), replace(a_profile(), origin="derived, not measured"))
    command = [*asked, "--profile", derived, "--trace", files[1], "--force-profile"]
    assert run(command) == 0
    text = capfd.readouterr().out
    assert f"caveat: {Caveat.DERIVED.text}" in text
    assert f"caveat: {Caveat.PROFILE_FORCED.text}" in text
    assert "on what was measured" not in text
    where = ["-o", str(tmp_path / "gate.json")] if "--format" in asked else []
    assert run([*command, "--json", *where]) == 0
    told = json.loads(capfd.readouterr().out)
    texts = {caveat["id"]: caveat["text"] for caveat in told["caveats"]}
    assert texts["derived"].startswith(f"{Caveat.DERIVED.text}: expect a time per output token")
    assert texts["profile_forced"] == Caveat.PROFILE_FORCED.text
