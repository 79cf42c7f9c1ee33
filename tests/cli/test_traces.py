"""`tune trace`: what a user types, and what it says about real recordings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.paths import SHARED_TRACES
from tuner.cli import run
from tuner.traffic.formats import read_trace

SHARED = SHARED_TRACES
Output = pytest.CaptureFixture[str]
KEYS = (
    "format rows duration_s rate_per_s iat_cv peak_1s peak_60s prompt_tokens output_tokens "
    "prefix_reuse_ratio in_flight warnings dropped"
)


def lines(n: int, every_s: float = 1.0) -> str:
    rows = [
        {"arrived_at_s": i * every_s, "input_length": 10 + i, "output_length": 5}
        for i in range(n)
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.fixture
def prod(tmp_path: Path) -> Path:
    path = tmp_path / "prod.jsonl"
    path.write_text(lines(100))
    return path


def inspected(capsys: Output, *arguments: object) -> Any:
    """Return what `tune trace inspect --json` prints."""
    capsys.readouterr()
    assert run(["trace", "inspect", "--json", *map(str, arguments)]) == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_one_file_is_an_object_and_several_are_a_list(prod: Path, capsys: Output) -> None:
    one = inspected(capsys, prod)
    assert list(one) == KEYS.split()
    assert one["rows"] == 100
    for found in inspected(capsys, prod, prod):
        assert (found["rows"], found["source"]) == (100, "prod.jsonl")
    twin = shutil.copy(prod, prod.with_name("twin.jsonl"))
    assert inspected(capsys, prod, twin, "--together")["rows"] == 200


def test_a_description_for_people_names_the_same_facts(prod: Path, capsys: Output) -> None:
    assert run(["trace", "inspect", str(prod)]) == 0
    said = capsys.readouterr().out
    assert "100 in 99.0 s" in said
    assert "prefix reuse   unknown" in said


def test_a_trace_is_cut_scaled_thinned_and_merged(prod: Path, capsys: Output) -> None:
    out = prod.with_name("out.jsonl")

    def reshaped(*arguments: str) -> tuple[int, float]:
        assert run(["trace", *arguments, "-o", str(out)]) == 0, capsys.readouterr().err
        trace = read_trace(out)
        return len(trace), trace.duration_s

    assert reshaped("slice", str(prod), "--window", "10s:20s") == (10, 9.0)
    assert read_trace(out).zero_s == 10.0  # the recording's own clock is kept
    assert reshaped("slice", str(prod), "--rows", "5:8") == (3, 2.0)
    assert reshaped("scale", str(prod), "--load", "2") == (200, 99.0)
    assert reshaped("thin", str(prod), "--replicas", "4", "--router", "round-robin") == (25, 96)
    twin = shutil.copy(prod, prod.with_name("twin.jsonl"))
    assert reshaped("merge", str(prod), str(twin)) == (200, 99.0)
    assert reshaped("convert", str(prod)) == (100, 99.0)


def test_without_a_name_the_trace_goes_to_standard_output(
    prod: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["trace", "slice", str(prod), "--rows", "0:2"]) == 0
    out, err = capfdbinary.readouterr()
    assert len(out.splitlines()) == 2
    assert b"2 requests in 1.0 s written to standard output" in err


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("slice prod.jsonl", "either --window or --rows"),
        ("slice prod.jsonl --rows 100:", "holds no request of 100"),
        ("slice prod.jsonl --rows x", "--rows must look like 0:1000"),
        ("thin prod.jsonl --replicas 2 --replica 2", "replica 2 of 2 does not exist"),
        ("thin prod.jsonl --replicas 2 --router prefix", "has no hash ids"),
        ("convert prod.jsonl --spread", "no coarse ticks"),
        ("convert prod.jsonl --only-model m", "no model names"),
        ("convert prod.jsonl --max-invalid 2", "needs --skip-invalid"),
        ("convert prod.jsonl -o none/x.jsonl", "cannot be written"),
        ("convert prod.jsonl -o x.CSV.gz", "x.csv.gz: a trace is written as json lines"),
        ("inspect", "missing argument"),
    ],
)
def test_bad_input_is_said_in_one_line(
    prod: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, typed: str, shown: str
) -> None:
    monkeypatch.chdir(prod.parent)
    assert run(["trace", *typed.split()]) == 2
    assert shown in capsys.readouterr().err.lower().replace("prod.jsonl", "prod.jsonl")


def test_what_a_written_trace_lacks_is_told_and_its_remarks_name_the_original(
    prod: Path, capsys: Output
) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens"
    models = ("GPT-4", "ChatGPT")
    rows = [f"{i},,1.5,{models[i % 2]},{50 + i},{20 + i},9,API log" for i in range(40)]
    rows[7], rows[9] = "7,,0.1,GPT-4,57,0,57,API log", "9,,1.5,GPT-4,many,29,9,API log"
    burst, out = prod.with_name("burst.csv"), prod.with_name("out.jsonl")
    burst.write_text("\n".join([f"{head},Log Type", *rows, ""]))
    for command in ("convert", "slice --rows 0:9", "scale --load 2", "merge"):
        name, *more = command.split()
        typed = ["trace", name, str(burst), *more, "--skip-invalid", "-o", str(out)]
        assert run(typed) == 0, capsys.readouterr().err
        said = capsys.readouterr().err
        assert "dropped from burst.csv: 1 (invalid: " in said
        assert "1 (failed request)" in said
    assert run(["trace", "inspect", str(out)]) == 0
    assert "burst.csv mixes 2 models" in capsys.readouterr().out


def published() -> list[dict[str, Any]]:
    """Return what is known of the published recordings; none where they are not at hand."""
    path = SHARED / "MANIFEST.json"
    return json.loads(path.read_text())["files"] if path.exists() else []


def with_key(key: str) -> list[Any]:
    known = [f for f in published() if key in f.get("stats", f.get("expected", {}))]
    if not known:
        reason = "the published recordings are not at hand: put them into ../shared/traces"
        return [pytest.param({}, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(f, id=f["file"]) for f in known]


@pytest.mark.parametrize("known", with_key("arrival"))
def test_published_recordings_are_described_as_known(
    capsys: Output, known: dict[str, Any]
) -> None:
    found, stats = inspected(capsys, SHARED / known["file"]), known["stats"]
    arrival, flight = stats["arrival"], stats["inflight_20ms_per_output_token"]
    assert found["rows"] == stats["rows"]
    assert found["duration_s"] == pytest.approx(arrival["duration_s"], abs=0.01)
    assert found["iat_cv"] == pytest.approx(arrival["iat_cv"], abs=0.01)
    assert found["rate_per_s"] == pytest.approx(arrival["mean_rate"], abs=0.005)
    assert found["peak_1s"] == arrival["peak_1s_count"]
    assert found["peak_60s"] == arrival["peak_60s_count"]
    for side in ("prompt", "output"):
        for name in ("p50", "p90", "p99", "max", "mean"):
            expected = stats[side][name]
            assert found[f"{side}_tokens"][name] == pytest.approx(expected, abs=0.06), name
    assert found["in_flight"]["mean"] == pytest.approx(flight["mean"], abs=0.06)
    assert found["in_flight"]["peak"] == flight["peak"]
    if reuse := stats.get("reuse_within_slice"):
        expected = reuse["token_prefix_hit_share"]
        assert found["prefix_reuse_ratio"] == pytest.approx(expected, abs=1e-4)
    else:
        assert found["prefix_reuse_ratio"] is None


@pytest.mark.parametrize("known", with_key("token_prefix_reuse"))
def test_agent_sessions_are_described_as_known(capsys: Output, known: dict[str, Any]) -> None:
    found = inspected(capsys, SHARED / known["file"], "--zero-output", "one")
    stats = known["stats"]
    assert found["format"] == "weka"
    assert found["rows"] == stats["requests"]
    reuse = found["prefix_reuse_ratio"]
    assert reuse == pytest.approx(stats["token_prefix_reuse"], abs=1e-4)
    trace = read_trace(SHARED / known["file"])
    assert trace.turns is not None


@pytest.mark.parametrize("known", with_key("failures_zero_response"))
def test_failures_are_counted(capsys: Output, known: dict[str, Any]) -> None:
    found, expected = inspected(capsys, SHARED / known["file"]), known["expected"]
    assert found["rows"] == expected["rows"] - expected["failures_zero_response"]
    assert sum(found["dropped"].values()) == expected["failures_zero_response"]


def test_spreading_gives_mooncakes_clock_its_poisson_arrivals_back(capsys: Output) -> None:
    path = SHARED / "mooncake_conversation.open.jsonl"
    if not path.exists():
        pytest.skip("the published recordings are not at hand: put them into ../shared/traces")
    literal = inspected(capsys, path)
    assert "quantised_clock" in {w["code"] for w in literal["warnings"]}
    assert inspected(capsys, path, "--spread")["iat_cv"] == pytest.approx(1.0, abs=0.1)


def test_every_published_file_is_a_trace_or_says_why_it_is_none(capsys: Output) -> None:
    """Aggregates are sampled in small, so that this takes seconds."""
    if not published():
        pytest.skip("the published recordings are not at hand: put them into ../shared/traces")
    for known in published():
        path = SHARED / known["file"]
        capsys.readouterr()
        code = run(["trace", "inspect", "--json", "--sample", "1h", str(path)])
        out, err = capsys.readouterr()
        if "leave --sample out" in err:
            code = run(["trace", "inspect", "--json", str(path)])
            out, err = capsys.readouterr()
        assert code in (0, 2), f"{path}: {err}"
        if code == 0:
            assert json.loads(out)["rows"] > 0
        else:
            refused = ("metrics", "offline", "dataset.json", "otel_flat", "first1")
            assert any(word in known["file"] for word in refused), err
            assert err.startswith("error: ")
