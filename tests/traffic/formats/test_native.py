"""What the native format says of single requests survives reading, reshaping and writing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tuner.errors import TraceError
from tuner.traffic.formats import read_trace
from tuner.traffic.formats.native import native_rows
from tuner.traffic.formats.sources import write_trace
from tuner.traffic.resample import Resampler, at_load
from tuner.traffic.reshape import merge
from tuner.traffic.traces import Trace


def written(folder: Path, priorities: Sequence[object]) -> Path:
    """Write requests a second apart, whose lengths tell their priority."""
    path = folder / "some.jsonl"
    with path.open("w") as file:
        for i, priority in enumerate(priorities):
            is_usual = isinstance(priority, int) and priority < 1000
            tokens = 50 + (priority if is_usual else 0)  # type: ignore[operator]  # an int
            row = {"arrived_at_s": float(i), "input_length": tokens, "output_length": 5}
            if priority is not None:
                row["priority"] = priority  # type: ignore[assignment]  # some are wrong
            file.write(json.dumps(row) + "\n")
    return path


def carried(trace: Trace) -> bool:
    return trace.priorities is not None and np.array_equal(
        trace.priorities, trace.prompt_tokens - 50
    )


def test_priorities_stay_with_their_requests_whatever_is_made_of_a_trace(
    tmp_path: Path,
) -> None:
    trace = read_trace(written(tmp_path, [3, None, -2, 0, *range(200)]))
    with_none = read_trace(written(tmp_path, [None] * 9))
    assert carried(trace)
    assert with_none.priorities is None
    changed = [
        trace.slice_rows(np.arange(1, 30, 3)),
        merge([trace, with_none]),
        at_load(trace, 2.5),
        at_load(trace, 0.5),
        Resampler(trace).draw(np.random.default_rng(0)),
    ]
    assert all(carried(other) for other in changed)
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps(row) + "\n" for row in native_rows(changed[1])))
    assert carried(read_trace(again))


@pytest.mark.parametrize("priority", [1.5, "high", True, 1 << 63])
def test_a_priority_that_is_no_whole_number_is_refused(
    tmp_path: Path, priority: object
) -> None:
    with pytest.raises(TraceError, match=r"line 2: priority must be a 64-bit whole number"):
        read_trace(written(tmp_path, [0, priority]))


def test_a_turn_that_came_before_what_it_waits_for_waits_for_none(tmp_path: Path) -> None:
    path = tmp_path / "turned.jsonl"
    path.write_text(
        '{"arrived_at_s": 5, "input_length": 10, "output_length": 5}\n'
        '{"arrived_at_s": 1, "input_length": 9, "output_length": 5, "after": 0, "pause_s": 1}\n'
        '{"arrived_at_s": 9, "input_length": 8, "output_length": 5, "after": 0, "pause_s": 2}\n'
    )
    trace = read_trace(path)
    assert trace.turns is not None
    assert trace.turns.after.tolist() == [-1, -1, 1]
    assert trace.turns.pause_s.tolist() == [0, 0, 2]
    assert "1 turns arrived before the request" in " ".join(trace.notes.texts)
    write_trace(trace, str(tmp_path / "written.jsonl"))
    again = read_trace(tmp_path / "written.jsonl")
    assert again.turns is not None
    assert again.turns.after.tolist() == [-1, -1, 1]


def test_a_last_line_that_a_killed_recorder_left_half_written_is_left_out_and_told(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-20])
    trace = read_trace(path)
    assert len(trace) == 2
    assert any("last line was not written to its end" in said for said in trace.notes.texts)
    # Whole lines that are wrong, and a file with nothing else, are refused as ever.
    for text in ('{"arrived_at_s": 9, "inp\n', '{"arrived_at_s": 9}', "gone"):
        wrong = written(tmp_path, [1, 2])
        wrong.write_text(wrong.read_text() + text)
        with pytest.raises(TraceError, match="line 3: "):
            read_trace(wrong)
    path.write_text('{"arrived_at_s": 9, "inp')
    with pytest.raises(TraceError, match="line 1: is not JSON"):
        read_trace(path)
