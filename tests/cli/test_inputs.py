"""What is said of the traffic that a command takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.traffic import a_trace
from tuner.cli.inputs import say_missed
from tuner.traffic.traces import Remark, RemarkKind, Turns


def test_of_a_load_that_a_file_missed_nothing_is_said_when_another_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Forty sessions, of which the first has five in six of the requests.
    after = np.where(np.arange(234) % 6 == 5, -1, 0)
    after[0] = -1
    trace = replace(
        a_trace([float(row) for row in range(234)]), turns=Turns(after, np.zeros(234))
    )
    said = Remark("3 times the recorded load, where 4 was asked for", RemarkKind.LOAD_MISSED)
    trace = replace(trace, notes=trace.notes.with_remark(said))
    say_missed(trace, [1, 3])
    assert capsys.readouterr().err == ""
    say_missed(trace, [1.5])
    assert "times the recorded load, in the same time, where 1.5 was" in capsys.readouterr().err
