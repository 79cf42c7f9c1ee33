"""Whoever has a profile needs neither vLLM nor torch; whoever needs them is told so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.no_vllm import VLLM, without
from support.paths import ROOT
from support.report_parts import live_run
from support.shadow_files import a_trace_file, home

__all__ = ["home"]

TUNE = [sys.executable, "-c", "from tuner.cli import main; main()"]
PATIENCE_S = 240.0
DEMO = str(ROOT / "examples" / "demo" / "best.yaml")
TRANSLATION = str(ROOT / "traces" / "translation.jsonl")
PROFILE = ("--profile", "profile.yaml")
NOW = ("--trace", "now.jsonl")

PREDICTING = {
    "tune": ("--method", "shadow", *PROFILE, *NOW, "--max-num-seqs", "2,8", "-o", "new.yaml"),
    "plan": ("plan", *PROFILE, *NOW, "--loads", "0.1,0.2", "--max-num-seqs", "2,8"),
    "plan-by-hour": (
        *("plan", *PROFILE, "--trace", "week.csv", "--by", "hour"),
        *("--max-num-seqs", "2,8"),
    ),
    "explore": ("explore", *PROFILE, *NOW, "--loads", "0.1,0.2", "--max-num-seqs", "2,8"),
    "check": (
        *("check", "--baseline", "profile.yaml", *NOW, "--baseline-trace", "before.jsonl"),
        *("--config", "best.yaml", "--max-num-seqs", "2,8"),
    ),
    "replay": ("replay", "--engine", "shadow", *PROFILE, *NOW, "--max-num-seqs", "8"),
}
EXIT = {"check": 10}
"""A re-tune pays: the traffic has grown tenfold."""
READING = {
    "inspect": ("trace", "inspect", TRANSLATION),
    "convert": ("trace", "convert", "now.jsonl", "-o", "packed.jsonl.zst"),
    "emit": ("emit", DEMO, "--format", "kubernetes", "-o", "deployment.yaml"),
    "emit-run": ("emit", "run", "-o", "again.yaml"),
    "report": ("report", "run", "-o", "page.html"),
    "doctor": ("doctor",),
}


@pytest.fixture
def folder(home: Path) -> Path:
    """Return a folder with a profile, traffic before and now, and the directory of a run."""
    a_trace_file(home / "now.jsonl", 3000)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for hour, step_s in ((8, 20), (20, 5)):
        for second in range(0, 3600, step_s):
            clock = f"2026-01-05 {hour:02d}:{second // 60:02d}:{second % 60:02d}"
            lines.append(f"{clock}.0000000,200,80")
    (home / "week.csv").write_text("\n".join(lines) + "\n")
    return home


def typed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TUNE, *arguments],
        cwd=folder,
        env=without(folder, VLLM),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("name", PREDICTING)
def test_what_a_profile_predicts_needs_no_vllm(folder: Path, name: str) -> None:
    done = typed(folder, *PREDICTING[name])
    assert done.returncode == EXIT.get(name, 0), done.stderr


@pytest.mark.parametrize("name", READING)
def test_what_reads_and_writes_needs_no_vllm(folder: Path, name: str) -> None:
    if "run" in READING[name]:
        live_run(folder)
    done = typed(folder, *READING[name])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_watch_starts_from_a_profile_of_any_vllm(folder: Path) -> None:
    done = typed(
        folder,
        *("watch", "--once", *PROFILE, "--emit", "best.yaml"),
        *("--prometheus", "http://127.0.0.1:9"),
    )
    assert "watching best.yaml" in done.stderr
    assert "Prometheus at 127.0.0.1:9 cannot be reached" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        (*NOW, "--budget", "30s"),
        ("replay", *NOW),
        ("verify", *NOW),
        ("compare", *NOW),
    ],
    ids=["tune", "replay", "verify", "compare"],
)
def test_a_live_engine_is_told_to_need_vllm_and_what_to_install(
    folder: Path, command: tuple[str, ...]
) -> None:
    done = typed(folder, *command)
    assert done.returncode == 2, done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error == "error: vLLM is not installed in this environment, and this needs it"
    assert "pip install 'max-num-seqs-tuner[gpu]', or 'max-num-seqs-tuner[cpu]'" in hint


def test_the_doctor_says_what_there_is_to_install(folder: Path) -> None:
    shown = typed(folder, "doctor").stdout
    assert "ok       predictions from a profile" in shown
    assert "absent   live replays                vLLM is not installed" in shown
    assert "pip install 'max-num-seqs-tuner[gpu]'" in shown


def test_a_trace_in_csv_is_told_to_need_polars(folder: Path) -> None:
    (folder / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,5,5\n"
    )
    done = subprocess.run(
        [*TUNE, "trace", "inspect", "t.csv"],
        cwd=folder,
        env=without(folder, ["polars"]),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2, done.stderr
    assert "t.csv is CSV, which polars reads, and polars is not installed" in done.stderr
    assert "pip install 'max-num-seqs-tuner[csv]'" in done.stderr
