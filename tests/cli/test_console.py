"""What a person sees on a terminal is what was said, whatever characters it holds."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from rich.table import Table

from support.paths import ROOT
from tuner.cli.displays import RunDisplay
from tuner.engine.limits import EngineLimits
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial

BEST = ROOT / "examples" / "demo" / "best.yaml"
SHOWS = """
from tuner.cli.displays import ReplayDisplay, RunDisplay
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial
from tuner.replay.loop import Progress

limits = EngineLimits(8, 512)
score = Score(Tier.FAILED, float("inf"), "failed")
cause = "died at [core.py:12] of [/opt/x] :boom:"
record = Trial.of(0, limits, Phase.LADDER, 0, score, None, cause)
with RunDisplay(60.0) as display:
    display.note("no shadow: cannot open [/models/qwen] :warning: see [core.py:12] [bold]")
    display.trial_started(0, limits, Phase.LADDER)
    display._now = "trial of [/models/llama]"
    display.trial_ended(record, 10.0)
with ReplayDisplay() as display:
    display.show("replaying [/traces/day.jsonl]")
"""


MANY = """
from tuner.cli.displays import RunDisplay
from tuner.engine.limits import EngineLimits
from tuner.search.objective import Score, Tier
from tuner.search.trials import Phase, Trial

limits = EngineLimits(256, 131072)
score = Score(Tier.FAILED, float("inf"), "failed")
with RunDisplay(60.0) as display:
    for n in range(100, 140):
        display.trial_started(n, limits, Phase.RACE)
        cause = "the engine died of " + "many causes " * 20
        display.trial_ended(Trial.of(n, limits, Phase.RACE, 1, score, None, cause), 10.0)
    display.trial_started(140, limits, Phase.RACE)
"""


def test_the_row_in_bold_is_of_the_best_that_is_named_below_it() -> None:
    """A cold engine that shows more of another window says nothing of who raced best."""
    rows = [(8, Phase.RACE, 2.0), (16, Phase.RACE, 3.0), (16, Phase.COLD, 1.0)]
    display = RunDisplay(60.0)
    for number, (cap, phase, value) in enumerate(rows):
        score, limits = Score(Tier.GOOD, value, "e2e_p95"), EngineLimits(cap, 512)
        display.trial_ended(Trial.of(number, limits, phase, 1, score, {}), 10.0)
    table, _, below = display._table().renderables
    assert isinstance(table, Table)
    assert "best so far 8/512" in str(below)
    assert ["bold" in str(row.style) for row in table.rows] == [True, False, False]


def on_a_terminal(code: str, columns: int = 200, lines: int = 50) -> str:
    """Return all that a program writes to a terminal of such a size."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(columns), "LINES": str(lines)}
    environment = {**os.environ, "TERM": "xterm-256color", **size}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # how Linux says that the other side of a terminal is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


def test_brackets_and_colons_are_shown_as_they_are() -> None:
    shown = on_a_terminal(SHOWS)
    for text in (
        "cannot open [/models/qwen] :warning: see [core.py:12] [bold]",
        "died at [core.py:12] of [/opt/x] :boom:",
        "trial of [/models/llama]",
        "replaying [/traces/day.jsonl]",
    ):
        assert text in shown


def test_a_small_terminal_shows_the_newest_trials_whole_and_what_goes_on() -> None:
    shown = on_a_terminal(MANY, 80, 24)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in shown.splitlines()]
    top = max(i for i, line in enumerate(lines) if "seqs/tokens" in line)
    head, *trials, now, best = lines[top : top + 23]
    assert [line.split()[0] for line in trials] == [str(n) for n in range(120, 140)]
    assert all("256/131072" in line for line in trials)
    assert len(head) <= 80
    assert "trial 140 race 256/131072" in now
    assert "nothing works so far" in best


@pytest.mark.parametrize(
    ("typed", "closed", "code"),
    [(f"emit {BEST}", ">&-", 0), ("no-such-command", "2>&-", 2)],
)
def test_a_stream_that_is_closed_is_no_error_and_none_takes_its_place(
    typed: str, closed: str, code: int
) -> None:
    shell = f"exec {sys.executable} -m tuner.cli {typed} {closed}"
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
