"""The instants of a request's life, for one request and for a whole replay.

Answers when each request was due, sent, first answered and finished, how it ended, and which
latencies follow: they are differences of these instants.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tuner.stats import Floats, Ints, LogHistogram, WeightedSamples


class Outcome(IntEnum):
    """How a request ended; every offered request has exactly one.

    UNFINISHED is no failure: the recording that a closed loop follows ended first, with the
    request in flight or still to be sent. How late it would have been is unknown. A gate in
    front of the engine turns away, or ends an answer before its recorded length.
    """

    COMPLETED = 0
    REFUSED = 1
    TIMED_OUT = 2
    ABORTED = 3
    UNFINISHED = 4
    TURNED_AWAY = 5
    TRUNCATED = 6


@dataclass(frozen=True, slots=True)
class Timelines:
    """The timelines of a replay as columns, one row per offered request in the trace's order.

    `work_s` is for how long each request keeps the engine busy when batches are full
    (`load.offered_work_s`), nan where that is not known.

    Shapes: every column is [n] but gap_s, which counts the gaps between tokens of all.
    Units: seconds on the replay's clock; nan where a request never got that far.
    """

    due_s: Floats
    sent_s: Floats
    first_s: Floats
    last_s: Floats
    output_tokens: Ints
    outcome: Ints
    gap_s: WeightedSamples
    work_s: Floats

    def __len__(self) -> int:
        return int(self.due_s.size)

    def rows(self, some: Ints, zero_s: float = 0.0) -> Timelines:
        """Return some of the requests, on a clock that is at zero at an instant of this one."""
        return replace(
            self,
            due_s=self.due_s[some] - zero_s,
            sent_s=self.sent_s[some] - zero_s,
            first_s=self.first_s[some] - zero_s,
            last_s=self.last_s[some] - zero_s,
            output_tokens=self.output_tokens[some],
            outcome=self.outcome[some],
            work_s=self.work_s[some],
        )

    def count(self, outcome: Outcome) -> int:
        """Return how many requests ended so."""
        return int((self.outcome == int(outcome)).sum())

    @property
    def completed(self) -> NDArray[np.bool_]:
        """Mark the requests that were answered in full."""
        mask: NDArray[np.bool_] = self.outcome == int(Outcome.COMPLETED)
        return mask

    @property
    def lost(self) -> NDArray[np.bool_]:
        """Mark the requests that the engine could have served and that were not in full.

        However long it took, who asked did not get it: their latency is without end. Refused
        requests are not among them; they were too long for the engine at any setting.
        """
        mask: NDArray[np.bool_] = np.isin(self.outcome, _LOST)
        return mask

    @property
    def ttft_s(self) -> Floats:
        """Time to first token of the completed requests."""
        return (self.first_s - self.due_s)[self.completed]

    @property
    def e2e_s(self) -> Floats:
        """End-to-end latency of the completed requests."""
        return (self.last_s - self.due_s)[self.completed]

    @property
    def tpot_s(self) -> Floats:
        """Time per output token of completed requests with two tokens or more."""
        rows = self.completed & (self.output_tokens >= 2)
        gaps = np.maximum(self.output_tokens - 1, 1)
        tpot_s: Floats = ((self.last_s - self.first_s) / gaps)[rows]
        return tpot_s

    @property
    def send_lag_s(self) -> Floats:
        """How late each request that was sent reached the engine."""
        lag_s: Floats = self.sent_s - self.due_s
        sent_lag_s: Floats = lag_s[~np.isnan(lag_s)]
        return sent_lag_s


_LOST = [Outcome.TIMED_OUT, Outcome.ABORTED, Outcome.TURNED_AWAY, Outcome.TRUNCATED]

# Gaps that are kept before they are counted: ours, a megabyte of them.
_CHUNK_GAPS = 65536


class TimelineRecorder:
    """Collects stamps while a replay runs and hands them over as columns.

    Rows are the trace's row numbers; a row that is never touched stays aborted.
    """

    def __init__(self, due_s: Floats) -> None:
        n = due_s.size
        self._due_s = due_s.astype(np.float64, copy=True)
        self._sent_s = np.full(n, np.nan)
        self._first_s = np.full(n, np.nan)
        self._last_s = np.full(n, np.nan)
        self._tokens = np.zeros(n, dtype=np.int64)
        self._outcome = np.full(n, int(Outcome.ABORTED), dtype=np.int64)
        self._gap_s = array("d")
        self._gaps = LogHistogram()

    def due(self, row: int, at_s: float) -> None:
        """Note when the row became due, where the load model decides that."""
        self._due_s[row] = at_s

    def sent(self, row: int, at_s: float) -> None:
        """Note that the row was handed to the engine."""
        self._sent_s[row] = at_s

    def tokens(self, row: int, count: int, at_s: float) -> None:
        """Note that count tokens of the row came out together: one output, with one gap.

        Source: vllm/v1/metrics/stats.py, IterationStats.update_from_output, of
            `vllm:inter_token_latency_seconds`; so does `vllm bench serve`.
        """
        if self._tokens[row] == 0:
            self._first_s[row] = at_s
        else:
            self._gap(at_s - self._last_s[row])
        self._last_s[row] = at_s
        self._tokens[row] += count

    def answered(self, row: int) -> int:
        """Return how many tokens of the row came out."""
        return int(self._tokens[row])

    def _gap(self, gap_s: float) -> None:
        self._gap_s.append(gap_s)
        if len(self._gap_s) >= _CHUNK_GAPS:
            self._fold()

    def _fold(self) -> None:
        self._gaps.add(np.array(self._gap_s), np.ones(len(self._gap_s)))
        self._gap_s = array("d")

    def begin_to_measure(self) -> None:
        """Forget the gaps so far, which came while the engine warmed up."""
        self._gap_s = array("d")
        self._gaps = LogHistogram()

    def ended(self, row: int, outcome: Outcome) -> None:
        """Note how the row ended."""
        self._outcome[row] = int(outcome)

    def finish(self) -> Timelines:
        """Return everything that was noted."""
        self._fold()
        return Timelines(
            due_s=self._due_s,
            sent_s=self._sent_s,
            first_s=self._first_s,
            last_s=self._last_s,
            output_tokens=self._tokens,
            outcome=self._outcome,
            gap_s=self._gaps.finish(),
            work_s=np.full(self._due_s.size, np.nan),
        )
