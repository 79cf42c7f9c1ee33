"""Whoever has a profile needs neither vLLM nor torch; whoever needs them is told so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support.no_vllm import VLLM, without
from support.paths import ROOT
from support.shadow_files import a_profile, a_trace_file, furnished, home
from support.shadow_parts import a_shape
from tuner.shadow.profiles import write_profile

__all__ = ["home"]

TUNE = [sys.executable, "-c", "from tuner.cli import main; main()"]
PATIENCE_S = 240.0
DEMO = str(ROOT / "examples" / "demo" / "best.yaml")
TRANSLATION = str(ROOT / "traces" / "translation.jsonl")
PROFILE = ("--profile", "profile.yaml")
NOW = ("--trace", "now.jsonl")

PREDICTING = {
    "tune": (
        *("--method", "shadow", *PROFILE, *NOW, "--max-num-seqs", "2,8"),
        *("-o", "new.yaml", "--run-dir", "run"),
    ),
    "plan": ("plan", *PROFILE, *NOW, "--loads", "0.1,0.2", "--max-num-seqs", "2,8"),
    "plan-by-hour": (
        *("plan", *PROFILE, "--trace", "week.csv", "--by", "hour"),
        *("--max-num-seqs", "2,8"),
    ),
    "explore": ("explore", *PROFILE, *NOW, "--loads", "0.1,0.2", "--max-num-seqs", "2,8"),
    "check": (
        *("check", "--baseline", "profile.yaml", "--trace", "more.jsonl"),
        *("--baseline-trace", "before.jsonl"),
        *("--config", "best.yaml", "--max-num-seqs", "2,8"),
    ),
    "replay": ("replay", "--engine", "shadow", *PROFILE, *NOW, "--max-num-seqs", "8"),
}
ODD = ("--profile", "odd.yaml")
UNKNOWN = {
    "tune odd": (
        *("--method", "shadow", *ODD, *NOW, "--max-num-seqs", "2,8", "--run-dir", "odd"),
    ),
    "plan odd": ("plan", *ODD, *NOW, "--loads", "0.1", "--max-num-seqs", "2,8"),
    "check odd": (
        *("check", "--baseline", "odd.yaml", "--trace", "more.jsonl"),
        *("--baseline-trace", "before.jsonl", "--config", "best.yaml"),
    ),
    "replay odd": ("replay", "--engine", "shadow", *ODD, *NOW, "--max-num-seqs", "8"),
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


LIVE = {
    "tune live": (*NOW, "--budget", "30s"),
    "replay live": ("replay", *NOW),
    "verify": ("verify", *NOW),
    "compare": ("compare", *NOW),
}
ONE_BY_ONE = """
import contextlib, io, json, sys
from tuner.cli import run

found = {}
for name, arguments in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found[name] = run(arguments), out.getvalue(), err.getvalue()
print(json.dumps(found))
"""
"""Commands one after the other in one process, which takes its time to start."""


@pytest.fixture
def folder(home: Path) -> Path:
    """Return a folder with a profile, and traffic before and now."""
    a_trace_file(home / "now.jsonl", 3000)
    return home


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return the exit code of every command, and what it wrote."""
    folder = furnished(tmp_path_factory.mktemp("home"))
    a_trace_file(folder / "now.jsonl", 1000)
    a_trace_file(folder / "more.jsonl", 3000)
    odd = replace(a_shape(), scheduler={"max_num_partial_prefills": 4})
    write_profile(folder / "odd.yaml", replace(a_profile(), shape=odd))
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for hour, step_s in ((8, 20), (20, 5)):
        for second in range(0, 3600, step_s):
            clock = f"2026-01-05 {hour:02d}:{second // 60:02d}:{second % 60:02d}"
            lines.append(f"{clock}.0000000,200,80")
    (folder / "week.csv").write_text("\n".join(lines) + "\n")
    process = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        cwd=folder,
        env=without(folder, VLLM),
        input=json.dumps(PREDICTING | READING | UNKNOWN | LIVE),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    found: dict[str, tuple[int, str, str]] = json.loads(process.stdout)
    return found


def typed(
    folder: Path, *arguments: str, hidden: Sequence[str] = VLLM
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TUNE, *arguments],
        cwd=folder,
        env=without(folder, hidden),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("name", [*PREDICTING, *READING])
def test_who_has_a_profile_or_a_run_needs_no_vllm(
    done: dict[str, tuple[int, str, str]], name: str
) -> None:
    code, _, err = done[name]
    assert code == EXIT.get(name, 0), err


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_option_that_the_simulator_does_not_know_is_named_and_the_way_out_told(
    done: dict[str, tuple[int, str, str]], name: str
) -> None:
    code, _, err = done[name]
    assert code == 2, err
    error, hint = err.splitlines()[-2:]
    assert error == (
        "error: the simulator does not know max_num_partial_prefills: 4, and vLLM, whose own "
        "scheduler is asked then, is not installed"
    )
    assert hint.startswith("hint:  pip install 'max-num-seqs-tuner[cpu]'")


@pytest.mark.slow
def test_a_watch_starts_from_a_profile_of_any_vllm(folder: Path) -> None:
    done = typed(
        folder,
        *("watch", "--once", *PROFILE, "--emit", "best.yaml"),
        *("--prometheus", "http://127.0.0.1:9"),
    )
    assert "watching best.yaml" in done.stderr
    assert "Prometheus at 127.0.0.1:9 cannot be reached" in done.stderr


@pytest.mark.parametrize("name", LIVE)
def test_a_live_engine_is_told_to_need_vllm_and_what_to_install(
    done: dict[str, tuple[int, str, str]], name: str
) -> None:
    code, _, err = done[name]
    assert code == 2, err
    error, hint = err.splitlines()[-2:]
    assert error == "error: vLLM is not installed in this environment, and this needs it"
    assert "pip install 'max-num-seqs-tuner[gpu]', or 'max-num-seqs-tuner[cpu]'" in hint


def test_the_doctor_says_what_there_is_to_install(
    done: dict[str, tuple[int, str, str]],
) -> None:
    _, shown, _ = done["doctor"]
    assert "ok       predictions from a profile" in shown
    assert "absent   live replays                vLLM is not installed" in shown
    assert "pip install 'max-num-seqs-tuner[gpu]'" in shown


def test_a_trace_in_csv_is_told_to_need_polars(folder: Path) -> None:
    (folder / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,5,5\n"
    )
    done = typed(folder, "trace", "inspect", "t.csv", hidden=["polars"])
    assert done.returncode == 2, done.stderr
    assert "t.csv is CSV, which polars reads, and polars is not installed" in done.stderr
    assert "pip install 'max-num-seqs-tuner[csv]'" in done.stderr
