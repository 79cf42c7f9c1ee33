"""What the engine's steps did and how long they took.

Two forms of the same thing: a summary, of which decode-step time, queue depth, KV usage and
the noise share are computed and whose size does not grow with the replay; and, on request,
every step as columns, to which a step-time model is fitted.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from tuner.engine.protocol import Batch, Step
from tuner.stats import Floats, LogHistogram, WeightedSamples

# A step is distorted when it took half as long again as the median of its like: ours; the
# steps of one batch size repeat within a few percent on an undisturbed core.
DISTORTED_RATIO = 1.5
# Like steps: same number of decoding sequences, at least this many of them (ours).
LIKE_STEPS = 8
# Steps that are kept before they are counted into the summary: ours, about two megabytes.
_CHUNK_STEPS = 16384
NO_WAIT_S = 3e-4
"""An asynchronous host that waited for no longer came to look when a batch was done: ours, a
thread that hands a result over takes less."""
LEVELS = ("running", "waiting", "kv_usage_ratio")
_NO_BATCH = Batch(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepColumns:
    """One row per step that completed a batch or passed time, or per run of like steps.

    `repeats` is the number of like steps that a row stands for, duration_s their sum; the
    contexts are those of the first. `launch_s` is what launching the batch took the host, 0
    where nobody knows. `is_late` marks with 1 a batch whose end the host noticed late, since it
    was launching the next one, and a turn that launched the first: some of the time that the
    row says is that of the row after. `draft_tokens` are verified beside one token of each
    decoding sequence.

    Shapes: every column is [rows].
    Units: seconds on the replay's clock, tokens, sequences, ratios in 0 to 1.
    """

    end_s: Floats
    duration_s: Floats
    repeats: Floats
    decode_seqs: Floats
    prefill_tokens: Floats
    decode_context_tokens: Floats
    prefill_context_tokens: Floats
    decode_spread_tokens: Floats
    running: Floats
    waiting: Floats
    kv_usage_ratio: Floats
    kv_peak_ratio: Floats
    preempted: Floats
    cached_tokens: Floats
    launch_s: Floats
    is_late: Floats
    draft_tokens: Floats

    @classmethod
    def of_batches(
        cls,
        duration_s: Floats,
        decode_seqs: Floats,
        prefill_tokens: Floats,
        decode_context_tokens: Floats,
        prefill_context_tokens: Floats,
        prompts: Floats,
        decode_spread_tokens: Floats | None = None,
    ) -> StepColumns:
        """Return a step of each batch, of whose engine nothing else is known."""
        nothing = np.zeros(duration_s.size)
        spread = nothing if decode_spread_tokens is None else decode_spread_tokens
        return cls(
            np.cumsum(duration_s),
            duration_s,
            nothing + 1.0,
            decode_seqs,
            prefill_tokens,
            decode_context_tokens,
            prefill_context_tokens,
            spread,
            decode_seqs + prompts,
            *[nothing] * 8,
        )

    def __len__(self) -> int:
        return int(self.end_s.size)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> StepColumns:
        """Return some of the rows."""
        return StepColumns(*(getattr(self, f.name)[rows] for f in fields(self)))

    @property
    def tokens(self) -> Floats:
        """The tokens of each batch as the token budget counts them; of a run, of one step."""
        return self.decode_seqs + self.draft_tokens + self.prefill_tokens

    @property
    def has_batch(self) -> NDArray[np.bool_]:
        """Mark the steps that computed anything; others are turns to tidy up."""
        mask: NDArray[np.bool_] = (self.decode_seqs > 0) | (self.prefill_tokens > 0)
        return mask

    @property
    def is_decode_only(self) -> NDArray[np.bool_]:
        """Mark the steps in which nothing but decoding happened."""
        mask: NDArray[np.bool_] = (self.decode_seqs > 0) & (self.prefill_tokens == 0)
        return mask

    @property
    def is_host_bound(self) -> NDArray[np.bool_]:
        """Mark the batches that took what launching the next one does, not what they compute.

        Late after a late one: the host has been the slower of the two since before. A single
        late one is a short batch before one that is long to launch and to compute.
        """
        is_late = (self.is_late > 0) & self.has_batch
        mask: NDArray[np.bool_] = is_late & np.concatenate([[False], is_late[:-1]])[: len(self)]
        return mask


LONGEST_CHAIN = 8
"""Rows of a chain at most: ours. Where the host is always the slower one every step is late,
and takes what launching the next one does, which is much the same."""


def chains(steps: StepColumns) -> NDArray[np.int64]:
    """Return each row's chain: late ones and the row after share a time, and so a number.

    Shapes: [rows].
    """
    is_in_time, row = steps.is_late == 0, np.arange(len(steps))
    begins = np.concatenate([[True], is_in_time[:-1]]) if len(steps) else is_in_time
    place = row - np.maximum.accumulate(np.where(begins, row, 0))
    return np.cumsum(place % LONGEST_CHAIN == 0) - 1


_WIDTH = len(StepColumns.__dataclass_fields__)


def _columns(rows: array[float]) -> StepColumns:
    table = np.array(rows, dtype=np.float64).reshape(-1, _WIDTH)
    return StepColumns(*np.ascontiguousarray(table.T))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a replay's steps took, as a straight line: what it costs to make batches fuller.

    Fitted so that all steps together take what they took: `base_s` a step, `decode_s` each
    decoding sequence in it, `prefill_s` each prompt token computed. Good enough to say how
    long work takes in fuller batches, not to predict a step.

    Units: seconds.
    """

    base_s: float
    decode_s: float
    prefill_s: float


class CostSums:
    """Sums over steps from which `StepCosts` are fitted.

    `alone` are steps that only decode: steps, sequences, sequences squared, seconds, seconds
    times sequences; `mixed` the others: steps, sequences, prompt tokens, seconds. Steps that
    share a time, since some were noticed late, are counted together, as their mean.

    Shapes: alone is [5], mixed [4]; zeros where nothing is given.
    """

    def __init__(self, alone: Floats | None = None, mixed: Floats | None = None) -> None:
        self._alone = np.zeros(5) if alone is None else alone
        self._mixed = np.zeros(4) if mixed is None else mixed

    def add(self, rows: StepColumns) -> None:
        """Add steps; a run of like steps counts as often as it stands for one."""
        steps, seqs, tokens, took_s = (
            rows.repeats * rows.has_batch,
            rows.repeats * rows.decode_seqs,
            rows.prefill_tokens,
            rows.duration_s,
        )
        if rows.is_late.any():
            of = chains(rows)
            steps, seqs, tokens, took_s = (
                np.bincount(of, column).astype(np.float64)
                for column in (steps, seqs, tokens, took_s)
            )
        alone = (steps > 0) & (tokens == 0)
        each = seqs[alone] / steps[alone]
        self._alone += (
            steps[alone].sum(),
            seqs[alone].sum(),
            (seqs[alone] * each).sum(),
            took_s[alone].sum(),
            (took_s[alone] * each).sum(),
        )
        self._mixed += [column[~alone].sum() for column in (steps, seqs, tokens, took_s)]

    def fit(self) -> StepCosts:
        """Return the non-negative line that leaves the sum of all steps as it was."""
        n, seqs, squares, took_s, product = self._alone.tolist()
        base_s = decode_s = 0.0
        if n:
            spread = squares - seqs * seqs / n
            # Where all batches were of one size, nothing is known of fuller ones: they are
            # taken to gain nothing.
            decode_s = (
                (product - took_s * seqs / n) / spread
                if spread > 1e-9 * squares
                else took_s / seqs
            )
            decode_s = min(max(decode_s, 0.0), took_s / seqs)
            base_s = (took_s - decode_s * seqs) / n
        steps, beside, tokens, mixed_s = self._mixed.tolist()
        rest_s = mixed_s - base_s * steps - decode_s * beside
        return StepCosts(base_s, decode_s, max(rest_s, 0.0) / tokens if tokens else 0.0)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """All steps of a replay in a size that does not grow with it.

    `decode_steps` holds how long steps took in which nothing but decoding happened,
    `by_batch` the same by the number of sequences, `levels` how long running, waiting and KV
    usage held which value, `peaks` their largest. `prefill_tokens` were
    computed, again after a preemption too. For `host_bound_s` steps took what launching does.

    Units: seconds; weights of levels in seconds.
    """

    steps: int
    duration_s: float
    decode_steps: WeightedSamples
    by_batch: Mapping[int, WeightedSamples]
    levels: Mapping[str, WeightedSamples]
    peaks: Mapping[str, float]
    prefill_tokens: int
    cached_tokens: int
    preempted: int
    max_step_tokens: int
    costs: StepCosts = field(default_factory=lambda: StepCosts(0.0, 0.0, 0.0))
    host_bound_s: float = 0.0

    def distorted(self) -> tuple[float, float]:
        """Return how many steps the machine's noise stretched, and of how many comparable.

        Only steps that decode alone can be compared with their like.
        """
        compared = distorted = 0.0
        for like in self.by_batch.values():
            if like.total_weight >= LIKE_STEPS:
                compared += like.total_weight
                distorted += like.above(DISTORTED_RATIO * like.value_at(0.5))
        return distorted, compared


class StepLog:
    """Collects steps while a replay runs.

    With `keep` every step stays at hand as a row of columns. Steps that were `predicted` are
    not compared with their like: no machine disturbs them. Requests take `draft_slots` of the
    token budget beside their tokens.
    """

    def __init__(
        self, *, keep: bool = False, predicted: bool = False, draft_slots: int = 0
    ) -> None:
        self._rows: array[float] = array("d")
        self._kept: list[StepColumns] = []
        self._keep, self._predicted, self._draft_slots = keep, predicted, draft_slots
        self._steps = self._prefill = self._cached = self._preempted = self._fullest = 0
        self._duration_s = self._host_bound_s = 0.0
        self._decode, self._by_batch = LogHistogram(), dict[int, LogHistogram]()
        self._levels = {name: LogHistogram() for name in LEVELS}
        self._peaks = dict.fromkeys(LEVELS, 0.0)
        self._costs = CostSums()

    def append(self, step: Step, end_s: float) -> None:
        """Note a turn that ended at end_s on the replay's clock."""
        batch = step.batch or _NO_BATCH
        self._rows.extend(
            (
                end_s,
                step.duration_s,
                1,
                batch.decode_seqs,
                batch.prefill_tokens,
                batch.decode_context_tokens,
                batch.prefill_context_tokens,
                batch.decode_spread_tokens,
                step.running,
                step.waiting,
                step.kv_usage_ratio,
                step.kv_usage_ratio,
                batch.preempted,
                batch.cached_tokens,
                step.launch_s,
                step.is_late,
                batch.draft_tokens,
            )
        )
        if len(self._rows) >= _CHUNK_STEPS * _WIDTH:
            self._fold()

    def _fold(self) -> None:
        """Count what came since the last time."""
        rows, self._rows = _columns(self._rows), array("d")
        if not len(rows):
            return
        if self._keep:
            self._kept.append(rows)
        self._steps += int(rows.repeats.sum())
        self._duration_s += float(rows.duration_s.sum())
        self._host_bound_s += float(rows.duration_s[rows.is_host_bound].sum())
        self._prefill += int(rows.prefill_tokens.sum())
        self._cached += int(rows.cached_tokens.sum())
        self._preempted += int(rows.preempted.sum())
        self._costs.add(rows)
        fullest = int((rows.tokens + self._draft_slots * rows.running).max())
        self._fullest = max(self._fullest, fullest)
        for name in LEVELS:
            self._levels[name].add(getattr(rows, name), rows.duration_s)
            column = "kv_peak_ratio" if name == "kv_usage_ratio" else name
            self._peaks[name] = max(self._peaks[name], float(getattr(rows, column).max()))
        self._count_decodes(rows)

    def _count_decodes(self, rows: StepColumns) -> None:
        alone = rows.is_decode_only
        each_s, times = (rows.duration_s / rows.repeats)[alone], rows.repeats[alone]
        self._decode.add(each_s, times)
        if self._predicted:
            return
        # What is late was not stretched: the next step is as much shorter.
        in_time = (rows.is_late == 0)[alone]
        each_s, times = each_s[in_time], times[in_time]
        seqs = rows.decode_seqs[alone][in_time]
        for n in np.unique(seqs):
            like = self._by_batch.setdefault(int(n), LogHistogram())
            like.add(each_s[seqs == n], times[seqs == n])

    def finish(self) -> tuple[StepSummary, StepColumns | None]:
        """Return the summary, and the steps themselves where they were kept."""
        self._fold()
        summary = StepSummary(
            steps=self._steps,
            duration_s=self._duration_s,
            decode_steps=self._decode.finish(),
            by_batch={n: total.finish() for n, total in self._by_batch.items()},
            levels={name: total.finish() for name, total in self._levels.items()},
            peaks=self._peaks,
            prefill_tokens=self._prefill,
            cached_tokens=self._cached,
            preempted=self._preempted,
            max_step_tokens=self._fullest,
            costs=self._costs.fit(),
            host_bound_s=self._host_bound_s,
        )
        return summary, joined(self._kept) if self._keep else None


def joined(parts: list[StepColumns]) -> StepColumns:
    """Return the rows of all parts, one after the other."""
    names = StepColumns.__dataclass_fields__
    empty = [np.empty(0)]
    return StepColumns(
        **{n: np.concatenate([getattr(p, n) for p in parts] or empty) for n in names}
    )
