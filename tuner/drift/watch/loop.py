"""The watch: sample, check, wait for later traffic to say the same, hand over, guard, sleep.

Everything that takes time or reaches beyond the process comes in as an argument, so that days
pass in a test at once. A round that fails leaves everything as it was, is reported and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tuner.drift.check import Checked, DriftVerdict
from tuner.drift.watch.handover import Clock, Notify, Rollout, StateStore
from tuner.drift.watch.policy import (
    Act,
    Memory,
    Policy,
    Proposal,
    confirm,
    decide,
    later_from_s,
)
from tuner.drift.watch.publish import Reason
from tuner.drift.watch.state import Counts, Last, RolloutRecord
from tuner.engine.limits import EngineLimits
from tuner.errors import TunerError
from tuner.files import ExpectedText
from tuner.traffic.sketch import TrafficSketch
from tuner.traffic.traces import Trace

BACK_OFF_S: Final = (2.0, 8.0, 30.0)
"""Ours: a Prometheus that restarts is back within them; one that is down waits a round."""

Sample = Callable[[float], Trace]
"""Return the traffic since a Unix time. Raises: TunerError if it cannot be had."""

Check = Callable[[Trace, EngineLimits, TrafficSketch | None], Checked]
"""Check traffic at the present limits against what they were tuned for, None for the profile's
own. Raises: TunerError if that cannot be."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a check found on which traffic."""

    trace: Trace
    checked: Checked

    @property
    def has_verdict(self) -> bool:
        """Whether there was data enough."""
        return self.checked.verdict is not DriftVerdict.TOO_LITTLE


@dataclass(slots=True)
class Watcher:
    """One configuration in use, and all that it takes to keep it tuned."""

    book: StateStore
    handing: Rollout
    policy: Policy
    every_s: float
    tuned_for: EngineLimits
    sample: Sample
    sketch: Callable[[Trace], TrafficSketch]
    check: Check
    clock: Clock
    tell: Notify
    began_s: float = 0.0
    """When the last round began, in Unix seconds: a probe sees a loop that hangs."""

    @property
    def present(self) -> EngineLimits:
        """The limits in use: those of the file, else those handed over or tuned last."""
        held = self.handing.publisher.present()
        return held or self.book.state.present or self.tuned_for

    def run(self) -> None:
        """Watch without end."""
        while True:
            error = self.round()
            if error is not None:
                self.tell(f"error: {error.message}")
                if error.hint:
                    self.tell(f"hint:  {error.hint}")
            self.clock.sleep(self.rest_s())

    def rest_s(self) -> float:
        """Return how long to sleep: until the next round, or until the guard wants to look."""
        now_s = self.clock.now_s()
        wake_s = self.began_s + self.every_s
        judged_at_s = self.handing.judged_at_s
        if judged_at_s is not None and judged_at_s > now_s:
            wake_s = min(wake_s, judged_at_s)
        # A clock that was put back must not let it sleep for hours.
        return min(max(wake_s - now_s, 0.0), self.every_s)

    def round(self) -> TunerError | None:
        """Do what is due and return what went wrong, if anything."""
        self.began_s = self.clock.now_s()
        try:
            rollbacks = self.book.state.counts.rollbacks
            self.handing.go_on()
            if self.book.state.counts.rollbacks == rollbacks:
                # Else there was a change just now, and nothing could follow from a check.
                self._check()
        except TunerError as error:
            self._failed(error)
            return error
        return None

    def _sampled(self, since_s: float) -> Trace:
        """Return the traffic; a server that does not answer is asked again, later each time."""
        for wait_s in BACK_OFF_S:
            try:
                return self.sample(since_s)
            except TunerError as error:
                self.tell(f"no traffic: {error.message}; asking again in {wait_s:g} s")
            self.clock.sleep(wait_s)
        return self.sample(since_s)

    def _check(self) -> None:
        """Check the traffic, and change the configuration where that is called for."""
        # What is found below is found for this file; it is written over no other.
        held, present = self.handing.publisher.held(), self.present
        tuned_for = self._tuned_for()
        found = self._found(self.clock.now_s() - self.policy.since_s, present, tuned_for)
        act, memory = self._decided(found)
        self._note(found.checked, act, memory)
        proposal = _proposal(found.checked)
        gain = "" if proposal is None else f" {proposal.gain_ratio:.1%} at {proposal.limits}"
        self.tell(f"{found.checked.verdict}{gain}: {found.checked.why}; {act}")
        if act is Act.CONFIRM:
            act, found = self._confirmed(found, present, tuned_for)
        if act is Act.CHANGE:
            self._change(found, held, present)

    def _found(
        self, since_s: float, present: EngineLimits, tuned_for: TrafficSketch | None
    ) -> _Found:
        trace = self._sampled(since_s)
        return _Found(trace, self.check(trace, present, tuned_for))

    def _tuned_for(self) -> TrafficSketch | None:
        """Return the traffic that the present limits were tuned for, None for the profile's."""
        state = self.book.state
        if not state.traffic:
            return None
        tuned_for, told = self.book.kept.traffic(state.traffic)
        if told:
            self.tell(f"{told}; comparing with the profile's own traffic")
        return tuned_for

    def _decided(self, found: _Found) -> tuple[Act, Memory]:
        memory, on_guard = self.book.state.memory, self.handing.is_on_guard
        if not found.has_verdict:
            return Act.NONE, memory
        now_s, proposal = self.clock.now_s(), _proposal(found.checked)
        return decide(self.policy, memory, proposal, now_s, on_guard=on_guard)

    def _confirmed(
        self, found: _Found, present: EngineLimits, tuned_for: TrafficSketch | None
    ) -> tuple[Act, _Found]:
        """Check what came after the verdict by itself; return what to do, and by what."""
        memory, now_s = self.book.state.memory, self.clock.now_s()
        since_s = later_from_s(self.policy, memory, now_s)
        if since_s is None:
            return Act.CONFIRM, found
        later = self._found(since_s, present, tuned_for)
        told = f"{later.checked.verdict}: {later.checked.why}"
        if not later.has_verdict:
            self.tell(f"not yet: the later traffic alone is {told}")
            return Act.CONFIRM, found
        on_guard, proposal = self.handing.is_on_guard, _proposal(later.checked)
        act, memory = confirm(
            self.policy, memory, proposal, self.clock.now_s(), on_guard=on_guard
        )
        self._put(memory, replace(self.book.state.last, act=str(act)))
        self.tell(f"the later traffic alone is {told}; {act}")
        return act, later

    def _note(self, checked: Checked, act: Act, memory: Memory) -> None:
        """Keep what a check found and what follows from it."""
        counts = self.book.state.counts
        checks = _one_more(counts.checks, str(checked.verdict))
        self._put(memory, self._noted(checked, act), replace(counts, checks=checks))

    def _put(self, memory: Memory, last: Last, counts: Counts | None = None) -> None:
        state = self.book.state
        counts = state.counts if counts is None else counts
        self.book.put(replace(state, memory=memory, last=last, counts=counts))

    def _noted(self, checked: Checked, act: Act) -> Last:
        """Return what is shown of the last check; partial data gives no verdict."""
        last = self.book.state.last
        has_verdict = checked.verdict is not DriftVerdict.TOO_LITTLE
        return replace(
            last,
            check_s=self.clock.now_s() if has_verdict else last.check_s,
            verdict=str(checked.verdict),
            why=checked.why,
            act=str(act),
            gain_ratio=None if checked.gain is None else checked.gain.value,
        )

    def _change(self, found: _Found, held: ExpectedText, present: EngineLimits) -> None:
        """Hand the new configuration over; what takes time comes before the file is read."""
        checked, now_s, publisher = found.checked, self.clock.now_s(), self.handing.publisher
        if checked.best is None:
            return
        new_traffic = self.book.kept.keep_traffic(self.sketch(found.trace), now_s)
        gain = "" if checked.gain is None else checked.gain.text
        evidence = str(self.book.kept.path)
        reason = Reason(found.trace, present, gain, checked.why, evidence, now_s)
        before = publisher.to_return_to(held, present)
        after = publisher.changed(checked.best, reason)
        self.handing.begin(
            RolloutRecord(
                old=present,
                new=checked.best,
                old_text=before.text,
                new_text=after.text,
                has_secrets=before.has_secrets or after.has_secrets,
                why=checked.why,
                decided_s=now_s,
                old_traffic=self.book.state.traffic,
                new_traffic=new_traffic,
                had_file=held.text is not None,
            )
        )

    def _failed(self, error: TunerError) -> None:
        """Note and count what went wrong; the configuration stays as it is."""
        state = self.book.state
        last = replace(state.last, error=error.message, error_s=self.clock.now_s())
        counts = replace(state.counts, errors=state.counts.errors + 1)
        noted = replace(state, last=last, counts=counts)
        try:
            self.book.note(noted)
        except TunerError as full:
            self.tell(f"error: {full.message}")


def _proposal(checked: Checked) -> Proposal | None:
    """Return what the check proposes, None unless a re-tune pays."""
    if checked.verdict is not DriftVerdict.PAYS or checked.best is None or checked.gain is None:
        return None
    gain = checked.gain
    return Proposal(checked.best, gain.value, gain.is_tier_better, checked.present)


def _one_more(counts: Mapping[str, int], name: str) -> dict[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}
