"""The watch: sample, check, wait for later traffic to say the same, hand over, guard, sleep.

Everything that takes time or reaches beyond the process comes in as an argument, so that days
pass in a test at once. A round that fails leaves everything as it was, is reported and counted.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tuner.drift.check import Checked, DriftVerdict, other_limits
from tuner.drift.watch.handover import Clock, Notify, Rollout
from tuner.drift.watch.policy import (
    Act,
    ChangeProposal,
    Memory,
    Policy,
    confirm,
    later_from_s,
    next_act,
)
from tuner.drift.watch.publish import Reason
from tuner.drift.watch.state import RolloutRecord, StateDir
from tuner.engine.limits import EngineLimits
from tuner.errors import DefectError, TunerError
from tuner.files import ExpectedText
from tuner.redact import redacted_text
from tuner.traffic.sketch import TrafficSketch
from tuner.traffic.traces import Trace

BACK_OFF_S: Final = (2.0, 8.0, 30.0)
"""Ours: a Prometheus that restarts is back within them; one that is down waits a round."""

Sample = Callable[[float], Trace]
"""Return the traffic since a Unix time. Raises: TunerError if it cannot be had."""

Check = Callable[[Trace, EngineLimits, TrafficSketch | None], Checked]
"""Check traffic at the current limits against what they were tuned for, None for the profile's
own. Raises: TunerError if that cannot be."""


@dataclass(frozen=True, slots=True)
class _CheckedTraffic:
    """A check's result, and the traffic it is of."""

    trace: Trace
    checked: Checked

    @property
    def has_verdict(self) -> bool:
        """Whether there was data enough."""
        return self.checked.verdict is not DriftVerdict.TOO_LITTLE


@dataclass(slots=True)
class Watcher:
    """One configuration in use, and all that it takes to keep it tuned."""

    store: StateDir
    rollout: Rollout
    policy: Policy
    every_s: float
    tuned_for: EngineLimits
    sample: Sample
    sketch: Callable[[Trace], TrafficSketch]
    check: Check
    clock: Clock
    notify: Notify
    began_s: float = 0.0
    """When the last round began, on the clock that nobody sets, so that a probe can notice a
    hang."""

    @property
    def current(self) -> EngineLimits:
        """The limits in use: those of the file, else those handed over or tuned last."""
        written = self.rollout.publisher.current()
        return written or self.store.state.current or self.tuned_for

    def run(self) -> None:
        """Watch without end."""
        while True:
            error = self.round()
            if error is not None:
                self.notify(f"error: {error.message}")
                if error.hint:
                    self.notify(f"hint:  {error.hint}")
            self.clock.sleep(self.rest_s())

    def rest_s(self) -> float:
        """Return how long to sleep: until the next round, or until the guard's window ends."""
        rest_s = max(self.began_s + self.every_s - self.clock.elapsed_s(), 0.0)
        judged_at_s = self.rollout.judged_at_s
        if judged_at_s is None:
            return rest_s
        until_judged_s = judged_at_s - self.clock.now_s()
        return min(rest_s, until_judged_s) if until_judged_s > 0 else rest_s

    def round(self) -> TunerError | None:
        """Do what is due and return what went wrong, if anything.

        Also where that is a defect of ours, or of what we call: who watches for months must not
        end over one odd answer, and the next round may be well.
        """
        self.began_s = self.clock.elapsed_s()
        try:
            rollbacks = self.store.state.counts.rollbacks
            self.rollout.go_on()
            if self.store.state.counts.rollbacks == rollbacks:
                # Else there was a change just now, and nothing could follow from a check.
                self._check()
        except TunerError as error:
            self._failed(error)
            return error
        except Exception as defect:  # noqa: BLE001 - for the reason given above
            self.notify(traceback.format_exc().rstrip())
            unforeseen = DefectError(
                f"a defect of tune ended the round: {type(defect).__name__}: {defect}",
                "the next round begins as usual; report it together with the lines above",
            )
            self._failed(unforeseen)
            return unforeseen
        return None

    def _sampled(self, since_s: float) -> Trace:
        """Return the traffic; a query that fails is repeated, later each time."""
        for wait_s in BACK_OFF_S:
            try:
                return self.sample(since_s)
            except TunerError as error:
                self.notify(f"no traffic: {error.message}; asking again in {wait_s:g} s")
            self.clock.sleep(wait_s)
        return self.sample(since_s)

    def _check(self) -> None:
        """Check the traffic, and change the configuration where that is called for."""
        # The change below is decided for this file and is written over no other.
        text_before, current = self.rollout.publisher.text_now(), self.current
        tuned_for = self._tuned_for()
        result = self._checked(self.clock.now_s() - self.policy.since_s, current, tuned_for)
        act, memory = self._decided(result)
        self._note(result, act, memory)
        proposal = _proposal(result.checked)
        gain = "" if proposal is None else f" {_gain_text(proposal)} at {proposal.limits}"
        self.notify(f"{result.checked.verdict}{gain}: {result.checked.why}; {act}")
        if act is Act.CONFIRM:
            act, result = self._confirmed(result, current, tuned_for)
        if act is Act.CHANGE:
            self._change(result, text_before, current)

    def _checked(
        self, since_s: float, current: EngineLimits, tuned_for: TrafficSketch | None
    ) -> _CheckedTraffic:
        trace = self._sampled(since_s)
        checked = self.check(trace, current, tuned_for)
        differing = other_limits(current, self.store.state.current or self.tuned_for)
        return _CheckedTraffic(trace, checked.but(differing))

    def _tuned_for(self) -> TrafficSketch | None:
        """Return the traffic that the current limits were tuned for, None for the profile's."""
        state = self.store.state
        if not state.traffic:
            return None
        tuned_for, message = self.store.traffic(state.traffic)
        if message:
            self.notify(f"{message}; comparing with the profile's own traffic")
        return tuned_for

    def _decided(self, result: _CheckedTraffic) -> tuple[Act, Memory]:
        memory, on_guard = self.store.state.memory, self.rollout.is_on_guard
        if not result.has_verdict:
            return Act.NONE, memory
        now_s, proposal = self.clock.now_s(), _proposal(result.checked)
        return next_act(self.policy, memory, proposal, now_s, on_guard=on_guard)

    def _confirmed(
        self, result: _CheckedTraffic, current: EngineLimits, tuned_for: TrafficSketch | None
    ) -> tuple[Act, _CheckedTraffic]:
        """Check the traffic after the verdict by itself; return the act and its evidence."""
        memory, now_s = self.store.state.memory, self.clock.now_s()
        since_s = later_from_s(self.policy, memory, now_s)
        if since_s is None:
            return Act.CONFIRM, result
        later = self._checked(since_s, current, tuned_for)
        message = f"{later.checked.verdict}: {later.checked.why}"
        if not later.has_verdict:
            self.notify(f"not yet: the later traffic alone is {message}")
            return Act.CONFIRM, result
        on_guard, proposal = self.rollout.is_on_guard, _proposal(later.checked)
        act, memory = confirm(
            self.policy, memory, proposal, self.clock.now_s(), on_guard=on_guard
        )
        self.store.update(memory=memory, last=replace(self.store.state.last, act=str(act)))
        self.notify(f"the later traffic alone is {message}; {act}")
        return act, later

    def _note(self, result: _CheckedTraffic, act: Act, memory: Memory) -> None:
        """Save a check's result and what follows from it; partial data gives no verdict."""
        checked, last, counts = result.checked, self.store.state.last, self.store.state.counts
        verdict = str(checked.verdict)
        checks = {**counts.checks, verdict: counts.checks.get(verdict, 0) + 1}
        last = replace(
            last,
            check_s=self.clock.now_s() if result.has_verdict else last.check_s,
            verdict=verdict,
            why=checked.why,
            act=str(act),
            gain_ratio=None if checked.gain is None else checked.gain.value,
        )
        self.store.update(memory=memory, last=last, counts=replace(counts, checks=checks))

    def _change(
        self, result: _CheckedTraffic, text_before: ExpectedText, current: EngineLimits
    ) -> None:
        """Hand the new configuration over; what takes time comes before the file is read."""
        checked, now_s, publisher = result.checked, self.clock.now_s(), self.rollout.publisher
        if checked.best is None:
            return
        new_traffic = self.store.keep_traffic(self.sketch(result.trace), now_s)
        gain = "" if checked.gain is None else checked.gain.text
        evidence = str(self.store.path)
        reason = Reason(result.trace, current, gain, checked.why, evidence, now_s)
        before = publisher.to_return_to(text_before, current)
        after = publisher.changed(checked.best, reason)
        self.rollout.begin(
            RolloutRecord(
                old=current,
                new=checked.best,
                old_text=before.text,
                new_text=after.text,
                has_secrets=before.has_secrets or after.has_secrets,
                why=checked.why,
                decided_s=now_s,
                old_traffic=self.store.state.traffic,
                new_traffic=new_traffic,
                had_file=text_before.text is not None,
            )
        )

    def _failed(self, error: TunerError) -> None:
        """Note and count what went wrong; the configuration stays as it is."""
        state = self.store.state
        message = redacted_text(error.message)
        last = replace(state.last, error=message, error_s=self.clock.now_s())
        counts = replace(state.counts, errors=state.counts.errors + 1)
        # Used also where it cannot be saved: nothing rests on counts and words.
        self.store.state = replace(state, last=last, counts=counts)
        try:
            self.store.update()
        except TunerError as full:
            self.notify(f"error: {full.message}")


def _proposal(checked: Checked) -> ChangeProposal | None:
    """Return what the check proposes, None unless a re-tune pays.

    Of a current configuration that has nothing of what is optimised, as no goodput, no gain is
    a share.
    """
    if checked.verdict is not DriftVerdict.PAYS or checked.best is None:
        return None
    gain = checked.gain
    if gain is None:
        return ChangeProposal(checked.best, math.inf, against=checked.current)
    return ChangeProposal(checked.best, gain.value, gain.meets_more, checked.current)


def _gain_text(proposal: ChangeProposal) -> str:
    ratio = proposal.gain_ratio
    return f"{ratio:.1%}" if math.isfinite(ratio) else "without end"
