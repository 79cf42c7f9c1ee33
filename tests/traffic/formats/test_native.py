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
