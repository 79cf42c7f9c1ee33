"""The sample traces are what the generator makes, and show what their README says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.make_samples import SAMPLES, chat, main, shared_prefix, translation
from support.paths import ROOT
from support.traffic import request_at
from tuner.traffic.describe import describe
from tuner.traffic.formats import read_trace
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.traces import Trace

FOLDER = ROOT / "traces"
DEMO_SECONDS_PER_OUTPUT_TOKEN = 0.004


def test_the_files_are_what_the_command_in_the_readme_makes(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in FOLDER.glob("*.jsonl")}
    assert made == shipped
    assert max(map(len, made.values())) < 400_000


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_reads_back_as_it_was_made(
    make: Callable[[int], Trace], tmp_path: Path
) -> None:
    made = make(7)
    write_trace(made, tmp_path / "sample.jsonl")
    read = read_trace(tmp_path / "sample.jsonl")
    assert read.due_s.tolist() == made.due_s.tolist()
    assert [request_at(read, i) for i in range(50)] == [request_at(made, i) for i in range(50)]
    assert make(7).due_s.tolist() == made.due_s.tolist()
    assert make(8).due_s.tolist() != made.due_s.tolist()


def test_every_row_of_the_readme_is_recomputed() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, make in SAMPLES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}.jsonl`"))
        shown = describe(make(0))
        assert f"| {shown.rows:,} | {shown.duration_s:.1f} s |" in row
        assert f"{shown.rate_per_s:.1f}/s" in row
        assert f"busiest second {shown.peak_1s}" in row
        for tokens in (shown.prompt_tokens, shown.output_tokens):
            assert f"| {tokens.p50:,.0f}, {tokens.p99:,.0f} |" in row
        if shown.prefix_reuse_ratio is not None:
            assert f"{shown.prefix_reuse_ratio:.1%}".replace("%", " %") in row


def test_translation_keeps_two_to_twenty_in_flight_and_peaks_near_25() -> None:
    trace = translation()
    shown = describe(trace, DEMO_SECONDS_PER_OUTPUT_TOKEN).in_flight
    assert shown.p90 is not None
    assert 15 <= shown.p90 <= 20
    assert 22 <= shown.peak <= 28
    for tokens in (trace.prompt_tokens, trace.output_tokens):
        assert tokens.min() >= 10
        assert tokens.max() <= 200
        assert np.quantile(tokens, 0.9) > 4 * np.quantile(tokens, 0.1)
    assert np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1] > 0.8


def test_chat_is_bursty_and_shared_prefixes_are_shared() -> None:
    burstiness = describe(chat()).iat_cv
    assert burstiness is not None
    assert burstiness > 2.5
    reuse_ratio = describe(shared_prefix()).prefix_reuse_ratio
    assert reuse_ratio is not None
    assert 0.5 <= reuse_ratio <= 0.6


def test_the_command_without_a_folder_says_how_it_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "python tests/support/make_samples.py DIR" in capsys.readouterr().err
