"""What a person sees on a terminal is what was said, whatever characters it holds."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

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


def on_a_terminal(code: str) -> str:
    """Return all that a program writes to a terminal 200 columns wide."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
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
