"""`tune gate`: a table for people, the same as JSON, a file for what lets requests in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.shadow_files import a_profile, a_trace_file
from tuner.cli import run
from tuner.shadow.profiles import write_profile

SLO = ("--slo", "ttft_p95=1s")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command of a profile and a trace."""
    folder = tmp_path_factory.mktemp("gate")
    write_profile(folder / "profile.yaml", a_profile())
    trace = a_trace_file(folder / "prod.jsonl", 300)
    files = ["--profile", str(folder / "profile.yaml"), "--trace", str(trace)]
    return ["gate", *files, "--force-profile", "--loads", "0.2,2"]


def test_the_table_says_what_json_does(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, *SLO, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [caveat["id"] for caveat in told["caveats"]] == ["profile_forced"]
    assert [at["load"] for at in told["loads"]] == [0.2, 2.0]
    heavy = told["loads"][1]
    assert heavy["with_gate"]["goodput_per_s"] > heavy["without"]["goodput_per_s"]
    assert run([*command, *SLO]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert run([*command, *SLO, "--load", "0.2", "--loads", "1,10", "--json"]) == 0
    again = json.loads(capfd.readouterr().out)["loads"]
    assert [at["load"] for at in again] == [0.2, 2.0], "multiples of what was recorded"
    (shown,) = [line.split() for line in lines if line.strip().startswith("2x")]
    assert shown[2] == f"{heavy['without']['goodput_per_s']:.3g}/s"
    assert shown[3] == f"{heavy['with_gate']['goodput_per_s']:.3g}/s"
    # What is gained is the difference of the two that are shown, whatever other traffic brings.
    gained = heavy["with_gate"]["goodput_per_s"] - heavy["without"]["goodput_per_s"]
    assert shown[4] == f"{gained:+.3g}"
    assert heavy["gained_per_s"] == pytest.approx(gained)
    elsewhere = heavy["gained_on_other_traffic_per_s"]
    assert shown[5:8:2] == [f"{elsewhere[end]:+.3g}" for end in ("low", "high")]
    assert f"{told['gate']['max_in_flight']} requests in the engine at most" in "\n".join(lines)
    assert sum(" tokens" in line and "%" in line for line in lines) == len(told["affected"])


def test_a_window_begins_as_warm_as_a_replay_with_a_lead_in(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Who comes first waits behind who came before, without a gate."""
    window = ["--window", "3s:6s", "--json"]
    assert run([*command, *SLO, *window, "--loads", "1"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["loads"]
    files = command[1 : command.index("--loads")]
    assert run(["replay", "--engine", "shadow", *files, *window, "--lead-in", "1s"]) == 0
    wanted = json.loads(capfd.readouterr().out)
    assert wanted["offered"] == found["without"]["offered"] == found["with_gate"]["offered"]
    assert found["offered_per_s"] == wanted["offered_per_s"]
    assert wanted["ttft_s"]["p50"] > 1.0
    assert found["without"]["slo_attainment_ratio"] == 0.0


def test_a_gate_is_written_where_it_is_asked_for(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "gate.env"
    assert run([*command, *SLO, "--format", "middleware", "-o", str(target)]) == 0
    assert target.read_text().splitlines()[-1].startswith("TUNE_GATE=max_in_flight=")
    out, err = capfd.readouterr()
    assert out == ""
    assert "leave it out" not in err
    idle = ["--format", "middleware", "--load", "0.1", "--loads", "1", "-o", str(target)]
    assert run([*command, *SLO, *idle]) == 0
    assert "at none of these loads is a gate surely better than none" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("-o", "gate.conf", *SLO), 2, "needs --format"),
        (("--json", "--format", "nginx", *SLO), 2, "both go to standard output"),
        ((), 2, "--slo is missing"),
        (("--slo", "itl_p95=1s"), 2, "--slo is missing"),
        (("--slo", "ttft_p95=1ms"), 3, "would refuse everything"),
        (("--slo", "ttft_p95=1ms"), 3, "no load is low enough: relax ttft_p95"),
        (("--load-model", "closed", "--concurrency", "4", *SLO), 2, "needs --load-model open"),
    ],
)
def test_what_cannot_be_gated_is_said(
    command: list[str],
    more: tuple[str, ...],
    code: int,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run([*command, *more]) == code
    assert words in capfd.readouterr().err
