"""`tune replay`: one configuration measured on a toy engine, at the limits that are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.toy import ToySource
from support.toy_tune import write_trace
from tuner.cli import run
from tuner.cli.commands import replay
from tuner.cli.replay import ReplayOptions, run_replay
from tuner.errors import Caveat


def replayed(
    capsys: pytest.CaptureFixture[str], *arguments: str, source: ToySource | None = None
) -> dict[str, Any]:
    """Return what the command prints as JSON, measured on a toy."""
    params = replay.make_context("replay", ["--json", *arguments]).params
    assert run_replay(ReplayOptions.parse(params), source or ToySource()) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_what_is_not_named_is_the_configurations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace(tmp_path / "t.jsonl", n=60))
    current = replayed(capsys, "--trace", trace)
    named = replayed(capsys, "--trace", trace, "--max-num-seqs", "3", "--window", "0s:2s")
    assert current["limits"] == {"max_num_seqs": 16, "max_num_batched_tokens": 2048}
    assert named["limits"] == {"max_num_seqs": 3, "max_num_batched_tokens": 2048}
    assert named["offered"] < current["offered"] == 60
    assert "windowed" in named["caveats"]
    assert "windowed" not in current["caveats"]


def test_a_live_replay_is_not_blamed_on_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace(tmp_path / "t.jsonl", n=60))
    assert (
        "profile_forced" not in replayed(capsys, "--trace", trace, "--force-profile")["caveats"]
    )


def test_what_depends_on_the_text_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace(tmp_path / "t.jsonl", n=60))
    experts = ToySource(caveats=frozenset({Caveat.EXPERTS_ON_RANDOM_TEXT}))
    told = replayed(capsys, "--trace", trace, source=experts)["caveats"]
    assert "experts_on_random_text" in told
    assert "experts_on_random_text" not in replayed(capsys, "--trace", trace)["caveats"]


def test_only_short_answers_are_doubted_for_how_they_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that ends by a stop token is decoded once more where batches are scheduled ahead."""
    told = []
    for tokens in (4, 40):
        rows = (
            f'{{"arrived_at_s": {i / 9}, "input_length": 60, "output_length": {tokens}}}'
            for i in range(60)
        )
        trace = tmp_path / f"{tokens}.jsonl"
        trace.write_text("\n".join(rows))
        profile = str(ROOT / "profiles" / "gpu" / "meta-llama-3.1-8b.1xh100_sxm.yaml")
        shadow = ["--engine", "shadow", "--profile", profile, "--max-num-seqs", "64"]
        told.append(replayed(capsys, "--trace", str(trace), *shadow)["caveats"])
    assert ["short_answers" in caveats for caveats in told] == [True, False]


def test_greedy_is_off_unless_asked_for(tmp_path: Path) -> None:
    trace = ["--trace", str(write_trace(tmp_path / "t.jsonl", n=60))]
    parsed = [
        ReplayOptions.parse(replay.make_context("replay", [*trace, *more]).params)
        for more in ([], ["--greedy"])
    ]
    assert [options.traffic.is_greedy for options in parsed] == [False, True]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--engine", "shadow"], "--engine shadow needs --profile FILE"),
        (["--profile", "x.yaml"], "--profile is for --engine shadow"),
        (["--engine", "shadow", "--greedy"], "--greedy is for a live engine"),
        (["--engine", "shadow", "--clock", "wall"], "--clock wall is for a live engine"),
    ],
)
def test_a_profile_and_a_shadow_go_together(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", "--trace", "t.jsonl", *more]) == 2
    assert words in capsys.readouterr().err


def test_a_lead_in_comes_before_the_window_and_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace(tmp_path / "t.jsonl", n=120))
    window = ["--trace", trace, "--window", "2s:4s", "--max-num-seqs", "1"]
    cold, warm = replayed(capsys, *window), replayed(capsys, *window, "--lead-in", "2s")
    assert cold["offered"] == warm["offered"] > 0
    # One at a time: whoever comes meets the queue that is there already.
    assert warm["ttft_s"]["mean"] > cold["ttft_s"]["mean"]
    closed = ["--load-model", "closed", "--concurrency", "2"]
    assert run(["replay", *window, "--lead-in", "2s", *closed]) == 2
    assert "in a closed loop who comes after a lead-in" in capsys.readouterr().err
    # There is no more before the trace begins.
    asked = replay.make_context("replay", ["--json", *window, "--lead-in", "9s"]).params
    assert run_replay(ReplayOptions.parse(asked), ToySource()) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["ttft_s"] == warm["ttft_s"]
    assert "lead-in: 2 s of the trace come before the window, and no more" in told.err
