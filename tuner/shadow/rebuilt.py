"""The batches of a served engine, rebuilt from what its recorder kept of steps and requests.

Which requests decoded in a step, and so how much context it attended to, follows from the
recorded requests: a request ends with the step that the engine stamped its end with, and each
step before brought out one of its tokens, or as many as its drafts did in the mean. What does
not come together is left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from tuner.engine.steps import NO_WAIT_S, StepColumns, chains
from tuner.errors import TooFewSamplesError
from tuner.shadow.recorded import UNKNOWN, RecordedRequests, RecordedSteps
from tuner.stats import Bools, Floats, Ints

LATE_S: Final = 0.03
"""Ours: a first token is this much, or a step, from where its later tokens say it was."""

STRETCH_S: Final = 30.0
"""Ours: steps of so long a time share a mood of the machine, as a replay's do."""

MANY_S: Final = 600.0
"""Ours: a step that took longer is none."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The steps whose batches are known, and how many are left out for which reason.

    `requests` is how many ended with one of all the steps.
    """

    steps: StepColumns
    left_out: dict[str, int]
    requests: int

    def stretches(self) -> list[StepColumns]:
        """Return the steps in stretches that share a mood of the machine."""
        if not len(self.steps):
            return []
        number = ((self.steps.end_s - self.steps.end_s[0]) // STRETCH_S).astype(np.int64)
        return [self.steps.take(number == n) for n in np.unique(number)]


def rebuild_all(recorded: Sequence[RecordedSteps], requests: RecordedRequests) -> list[Rebuilt]:
    """Return what was in the steps of each start, one of which may have answered nothing.

    Raises: TooFewSamplesError if nothing of the requests belongs to any of the steps.
    """
    found = [rebuild(steps, requests) for steps in recorded]
    if not any(one.requests for one in found):
        raise TooFewSamplesError(
            f"none of {len(requests)} requests ends with one of {sum(map(len, recorded))} "
            "recorded steps",
            "name the recording that the steps lie beside",
        )
    return found


def rebuild(steps: RecordedSteps, requests: RecordedRequests) -> Rebuilt:
    """Return what was in each step, with the contexts of its sequences."""
    spans = _Spans.of(steps, requests)
    decode_context, spread, is_decode_known = spans.decode_contexts(steps.generating)
    prefill, prefill_context = spans.prefills(steps)
    duration_s = _durations(steps, went_on=spans.went_on())
    nothing = np.zeros(len(steps))
    columns = StepColumns(
        end_s=steps.ended_s,
        duration_s=duration_s,
        repeats=np.ones(len(steps)),
        decode_seqs=steps.generating.astype(np.float64),
        prefill_tokens=prefill,
        decode_context_tokens=decode_context,
        prefill_context_tokens=prefill_context,
        decode_spread_tokens=spread,
        running=(steps.generating + np.maximum(steps.context_requests, 0)).astype(np.float64),
        waiting=nothing,
        kv_usage_ratio=nothing,
        kv_peak_ratio=nothing,
        preempted=np.maximum(steps.preempted, 0).astype(np.float64),
        cached_tokens=nothing,
        launch_s=_launches(steps, duration_s),
        is_late=_noticed_late(steps),
        draft_tokens=_verified(steps),
    )
    return _usable(columns, is_decode_known, _begins_again(steps), int(spans.is_whole.sum()))


def _verified(steps: RecordedSteps) -> Floats:
    """Return how many drafts each step verified; where nobody knows, the most there may be."""
    most = steps.generating * steps.draft_tokens
    known = steps.generation_tokens - steps.generating
    found = np.where(steps.generation_tokens == UNKNOWN, most, np.clip(known, 0, most))
    return found.astype(np.float64)


def _begins_again(steps: RecordedSteps) -> Bools:
    """Mark the steps that compute a request anew which was set aside: it decodes, says vLLM."""
    return steps.generation_tokens > steps.generating * (1 + steps.draft_tokens)


def _usable(
    columns: StepColumns, is_decode_known: Bools, begins_again: Bools, requests: int
) -> Rebuilt:
    """Leave out the steps of which something is unknown, and count them by reason."""
    took_s = columns.duration_s
    reasons = {
        "without a time": ~(np.isfinite(took_s) & (took_s > 0) & (took_s < MANY_S)),
        "with a prompt whose pieces are unknown": ~np.isfinite(columns.prefill_context_tokens),
        "with a request that was set aside and begins again": begins_again,
        "with requests that are not in the recording": ~is_decode_known,
    }
    usable, left_out = np.ones(len(columns), dtype=np.bool_), {}
    for reason, is_out in reasons.items():
        left_out[reason] = int((usable & is_out).sum())
        usable &= ~is_out
    usable &= columns.has_batch
    whole = _of_whole_chains(columns, usable)
    left_out["whose time is shared with one of these"] = int((usable & ~whole).sum())
    return Rebuilt(columns.take(whole), {k: n for k, n in left_out.items() if n}, requests)


def _noticed_late(steps: RecordedSteps) -> Floats:
    """Mark the batches of an asynchronous core that were done before it came to look.

    Where nobody knows what it waited, those before a prompt, which is slowest to launch: their
    time and that of the prompt are known together whoever was late.
    """
    if not _is_asynchronous(steps):
        return np.zeros(len(steps))
    is_before_prompt = np.append(steps.context_tokens[1:] != 0, [False])
    is_known = np.isfinite(steps.elapsed_s)
    return np.where(is_known, steps.elapsed_s < NO_WAIT_S, is_before_prompt).astype(np.float64)


def _launches(steps: RecordedSteps, duration_s: Floats) -> Floats:
    """Return what launching each step took the host, 0 where nobody knows.

    A step that an asynchronous core did not wait for took what launching the next one did.
    """
    launch_s = np.zeros(len(steps))
    if _is_asynchronous(steps):
        is_late = np.isfinite(duration_s) & (steps.elapsed_s < NO_WAIT_S)
        launch_s[1:] = np.where(is_late, duration_s, 0.0)[:-1]
    return launch_s


def _is_asynchronous(steps: RecordedSteps) -> bool:
    shape = steps.server.shape
    return shape is not None and shape.asynchronous


def _of_whole_chains(steps: StepColumns, usable: Bools) -> Bools:
    """Leave out rows that share their time with one that is left out."""
    chain = chains(steps)
    is_whole: Bools = np.bincount(chain, usable) == np.bincount(chain)
    found: Bools = usable & is_whole[chain]
    return found


def _durations(steps: RecordedSteps, *, went_on: Bools) -> Floats:
    """Return how long each step took: the interval, or what the core waited and usually adds.

    What the core waits for the model leaves its own work out, which the intervals hold. An
    asynchronous core usually does that while the model computes the batch before, but not where
    it was idle: how long launching such a batch took is not known, and neither is its time.

    Shapes: went_on is [steps], see `_Spans.went_on`.
    """
    both = np.isfinite(steps.interval_s) & np.isfinite(steps.elapsed_s)
    added_s = (
        float(np.median((steps.interval_s - steps.elapsed_s)[both])) if both.any() else 0.0
    )
    from_core: Floats = steps.elapsed_s + max(added_s, 0.0)
    if _is_asynchronous(steps):
        from_core = np.where(went_on, from_core, np.nan)
    return np.where(np.isfinite(steps.interval_s), steps.interval_s, from_core)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Between which steps each request ran: scheduled, first token, last token.

    `is_whole` marks those that ended with a recorded step, or whose client left after a first
    token that came with one.

    Shapes: all [requests]; `tokens_per_step` is 1 for who was never set aside, or what drafts
    brought in the mean. `most_tokens` is what a step computes of a decoding request.
    """

    begin: Ints
    first: Ints
    last: Ints
    tokens_per_step: Floats
    is_whole: Bools
    steps: int
    prompt_tokens: Ints
    cached_tokens: Ints
    most_tokens: int

    @classmethod
    def of(cls, steps: RecordedSteps, requests: RecordedRequests) -> Self:
        ended_s, n, first_s = steps.ended_s, len(steps), requests.first_s
        most_tokens = 1 + steps.draft_tokens
        # Each step in which anything decodes brings out a token of all who do, or several.
        counted = np.concatenate([[0], np.cumsum(steps.generating > 0)])
        last, is_whole = _last_steps(steps, counted, requests)
        wanted = counted[last + 1] - (requests.output_tokens - 1)
        # The step after a first token decodes.
        by_count = np.searchsorted(counted, np.maximum(wanted, 0), "right") - 2
        single = requests.output_tokens == 1
        by_count = np.where(single, last, by_count)
        by_count = np.clip(by_count, 0, n - 1)
        known_s = steps.interval_s[np.isfinite(steps.interval_s)]
        usual_s = float(np.median(known_s)) if known_s.size else 0.0
        late_s = np.abs(ended_s[by_count] - first_s)
        agrees = (late_s < LATE_S + usual_s) & (wanted >= 0) & (most_tokens == 1)
        first = np.where(agrees, by_count, np.minimum(_first_steps(steps, first_s), last))
        between = np.maximum(counted[last + 1] - counted[first + 1], 1)
        rate = np.minimum(most_tokens, (requests.output_tokens - 1) / between)
        rate = np.where(agrees, 1.0, rate)
        begin_s = first_s - np.nan_to_num(requests.prefill_s)
        begin = np.minimum(np.searchsorted(ended_s, begin_s + 1e-4, "right"), first)
        return cls(
            begin,
            first,
            last,
            rate,
            is_whole & (requests.ends_s >= ended_s[0]) if n else is_whole,
            n,
            requests.prompt_tokens,
            requests.cached_tokens,
            most_tokens,
        )

    def went_on(self) -> Bools:
        """Whether a request of each step had been scheduled before the step before ended.

        If not, the step found the engine idle. Of requests that are missing nothing is known.

        Shapes: [steps].
        """
        use, change = self.is_whole, np.zeros(self.steps + 1)
        np.add.at(change, self.begin[use] + 1, 1.0)
        np.add.at(change, self.last[use] + 1, -1.0)
        found: Bools = np.cumsum(change)[:-1] > 0
        return found

    def decode_contexts(self, generating: Ints) -> tuple[Floats, Floats, Bools]:
        """Return the contexts that each step's decodes attend to, and where they are known.

        Their sum, and how far they are apart. Where a request or two are missing the others
        stand for them.

        Shapes: [steps] each.
        """
        use = self.is_whole & (self.last > self.first)
        after, until, rate = self.first[use] + 1, self.last[use] + 1, self.tokens_per_step[use]
        level = self.prompt_tokens[use] - rate * after + self.most_tokens

        def over(values: Floats) -> Floats:
            total = np.zeros(self.steps + 1)
            np.add.at(total, after, values)
            np.add.at(total, until, -values)
            return np.cumsum(total)[:-1]

        count, step = over(np.ones(after.size)), np.arange(self.steps)
        context = over(level) + over(rate) * step
        squares = over(level**2) + (2 * over(level * rate) + over(rate**2) * step) * step
        is_known = np.abs(count - generating) <= np.maximum(1, 0.1 * generating)
        is_known &= (count > 0) | (generating == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(count > 0.5, context / count, 0.0)
            apart = np.where(count > 0.5, squares / count - mean**2, 0.0)
        seqs = np.maximum(generating, 0)
        return mean * seqs, np.sqrt(np.maximum(apart, 0.0) * seqs), is_known

    def prefills(self, steps: RecordedSteps) -> tuple[Floats, Floats]:
        """Return the tokens that each step prefilled, and their contexts; nan where unknown.

        Who gets its first token with a step is prefilled to its end in it; what is left goes to
        the others in the order in which they were scheduled.

        Shapes: [steps] each.
        """
        tokens = steps.context_tokens.astype(np.float64)
        context = np.where(steps.context_tokens == 0, 0.0, np.nan)
        by_first: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.is_whole).tolist():
            by_first.setdefault(int(self.first[row]), []).append(row)
        left = (self.prompt_tokens - self.cached_tokens).astype(np.int64)
        done = self.cached_tokens.astype(np.int64).copy()
        waiting = sorted(
            np.flatnonzero(self.is_whole).tolist(), key=lambda row: self.begin[row]
        )
        at, open_rows = 0, list[int]()
        for step in np.flatnonzero(steps.context_tokens != 0).tolist():
            while at < len(waiting) and self.begin[waiting[at]] <= step:
                open_rows.append(waiting[at])
                at += 1
            open_rows = [row for row in open_rows if self.first[row] >= step and left[row] > 0]
            ending = [row for row in by_first.get(step, ()) if left[row] > 0]
            if steps.context_tokens[step] == UNKNOWN:
                found = self._single(step, ending, left)
            else:
                others = [row for row in open_rows if self.first[row] > step]
                found = _dealt(int(steps.context_tokens[step]), ending, others, left)
            if found is None:
                continue
            tokens[step] = sum(found.values())
            context[step] = sum(n * done[r] + n * (n + 1) // 2 for r, n in found.items())
            for row, n in found.items():
                left[row] -= n
                done[row] += n
        return np.maximum(tokens, 0.0), context

    def _single(self, step: int, ending: list[int], left: Ints) -> dict[int, int] | None:
        """Return what a step without details prefilled, None if prompts came in pieces."""
        if not ending or any(self.begin[row] < step for row in ending):
            return None
        return {row: int(left[row]) for row in ending}


def _first_steps(steps: RecordedSteps, first_s: Floats) -> Ints:
    """Return the steps that brought first tokens, by when these came.

    Those with a prompt, the nearest; where no step is known to have had one, the next.

    Shapes: first_s and what is returned are [requests].
    """
    ended_s = steps.ended_s
    with_prompt = np.flatnonzero(steps.context_tokens)
    if steps.draft_tokens == 0 or with_prompt.size == 0:
        return np.clip(np.searchsorted(ended_s, first_s - LATE_S / 2), 0, len(steps) - 1)
    after = np.clip(np.searchsorted(ended_s[with_prompt], first_s), 1, with_prompt.size - 1)
    around = np.stack([with_prompt[after - 1], with_prompt[after]])
    off_s = np.abs(ended_s[around] - first_s)
    found: Ints = np.where(off_s[0] <= off_s[1], around[0], around[1])
    return found


def _last_steps(
    steps: RecordedSteps, counted: Ints, requests: RecordedRequests
) -> tuple[Ints, Bools]:
    """Return the step with each request's last token, and whether it is a recorded one.

    Who was left has its last token so many decoding steps after its first, and none once its
    client had gone.

    Shapes: counted is [steps + 1], what is returned [requests].
    """
    ended_s = steps.ended_s
    last, is_whole = _steps_at(ended_s, requests.ends_s)
    first, has_begun = _steps_at(ended_s, requests.first_s)
    after_first = (requests.output_tokens - 1) / steps.tokens_per_step
    by_count = counted[first + 1] + np.rint(after_first)
    cut = np.maximum(np.searchsorted(counted, by_count) - 1, first)
    return (
        np.where(requests.is_cut, np.minimum(cut, last), last),
        np.where(requests.is_cut, has_begun, is_whole),
    )


def _steps_at(ended_s: Floats, instants_s: Floats) -> tuple[Ints, Bools]:
    """Return the last step up to each instant, and whether it ended then."""
    found = np.clip(np.searchsorted(ended_s, instants_s + 2e-5, "right") - 1, 0, None)
    return found, np.abs(ended_s[found] - instants_s) < 1e-4


def _dealt(
    tokens: int, ending: list[int], others: list[int], left: Ints
) -> dict[int, int] | None:
    """Return who was prefilled by how much, None if it does not come together."""
    found = {row: int(left[row]) for row in ending}
    rest = tokens - sum(found.values())
    if rest < 0:
        # A first token that is stamped a step off: nothing is known of either step.
        return None
    for row in others:
        part = min(rest, int(left[row]) - 1)
        if part > 0:
            found[row], rest = part, rest - part
    return found if rest == 0 else None
