"""The watch: sample, check, wait for the same verdict again, hand over, guard, sleep.

Everything that takes time or reaches beyond the process comes in as an argument, so that days
pass in a test at once. A round that fails leaves everything as it was, is reported and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tuner.check import Checked, Verdict
from tuner.engine.protocol import EngineLimits
from tuner.errors import TunerError
from tuner.traces import Trace
from tuner.traffic_sketch import TrafficSketch
from tuner.watch.handover import Clock, Handing, Notebook, Tell
from tuner.watch.policy import Act, Policy, Proposal, decide
from tuner.watch.publish import Reason
from tuner.watch.state import Handover, Last

BACK_OFF_S: Final = (2.0, 8.0, 30.0)
"""Ours: a Prometheus that restarts is back within them; one that is down waits a round."""

Sample = Callable[[], Trace]
"""Return the traffic of late. Raises: TunerError if it cannot be had."""

Check = Callable[[Trace, EngineLimits, TrafficSketch | None], Checked]
"""Check traffic at the present limits against what they were tuned for, None for the profile's
own. Raises: TunerError if that cannot be."""


@dataclass(slots=True)
class Watcher:
    """One configuration in use, and all that it takes to keep it tuned."""

    book: Notebook
    handing: Handing
    policy: Policy
    every_s: float
    tuned_for: EngineLimits
    sample: Sample
    sketch: Callable[[Trace], TrafficSketch]
    check: Check
    clock: Clock
    tell: Tell
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
                self._check(self._sampled())
        except TunerError as error:
            self._failed(error)
            return error
        return None

    def _sampled(self) -> Trace:
        """Return the traffic; a server that does not answer is asked again, later each time."""
        for wait_s in BACK_OFF_S:
            try:
                return self.sample()
            except TunerError as error:
                self.tell(f"no traffic: {error.message}; asking again in {wait_s:g} s")
            self.clock.sleep(wait_s)
        return self.sample()

    def _check(self, trace: Trace) -> None:
        """Check the traffic, and change the configuration where that is called for."""
        present, state = self.present, self.book.state
        tuned_for, told = None, ""
        if state.traffic:
            tuned_for, told = self.book.kept.traffic(state.traffic)
        if told:
            self.tell(f"{told}; comparing with the profile's own traffic")
        checked = self.check(trace, present, tuned_for)
        act, proposal = Act.NONE, _proposal(checked)
        memory = state.memory
        if checked.verdict is not Verdict.TOO_LITTLE:
            on_guard = self.handing.is_on_guard
            act, memory = decide(
                self.policy, memory, proposal, self.clock.now_s(), on_guard=on_guard
            )
        last = self._noted(checked, act)
        counts = state.counts
        checks = _one_more(counts.checks, str(checked.verdict))
        self.book.put(
            replace(state, memory=memory, last=last, counts=replace(counts, checks=checks))
        )
        gain = "" if proposal is None else f" {proposal.gain_ratio:.1%} at {proposal.limits}"
        self.tell(f"{checked.verdict}{gain}: {checked.why}; {act}")
        if act is Act.CHANGE and proposal is not None:
            self._change(trace, checked, present, proposal.limits)

    def _noted(self, checked: Checked, act: Act) -> Last:
        """Return what is shown of the last check; partial data gives no verdict."""
        last = self.book.state.last
        has_verdict = checked.verdict is not Verdict.TOO_LITTLE
        return replace(
            last,
            check_s=self.clock.now_s() if has_verdict else last.check_s,
            verdict=str(checked.verdict),
            why=checked.why,
            act=str(act),
            gain_ratio=None if checked.gain is None else checked.gain.value,
        )

    def _change(
        self, trace: Trace, checked: Checked, present: EngineLimits, new: EngineLimits
    ) -> None:
        """Hand the new configuration over."""
        now_s, publisher = self.clock.now_s(), self.handing.publisher
        gain = "" if checked.gain is None else checked.gain.text
        evidence = str(self.book.kept.path)
        reason = Reason(trace, present, gain, checked.why, evidence, now_s)
        before, after = publisher.current(present), publisher.changed(new, reason)
        state = self.book.state
        self.handing.begin(
            Handover(
                old=present,
                new=new,
                old_text=before.text,
                new_text=after.text,
                has_secrets=before.has_secrets or after.has_secrets,
                why=checked.why,
                decided_s=now_s,
                old_traffic=state.traffic,
                new_traffic=self.book.kept.keep_traffic(self.sketch(trace), now_s),
                bias=self._bias(now_s, present),
            )
        )

    def _bias(self, now_s: float, present: EngineLimits) -> dict[str, float]:
        """Return how the present limits do against their prediction, if that is known."""
        guard = self.handing.guard
        if guard is None:
            return {}
        try:
            return guard.bias_before(now_s, present)
        except TunerError as error:
            self.tell(f"how well {present} does live is not known: {error.message}")
            return {}

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
    if checked.verdict is not Verdict.PAYS or checked.best is None or checked.gain is None:
        return None
    return Proposal(checked.best, checked.gain.value, checked.gain.is_tier_better)


def _one_more(counts: Mapping[str, int], name: str) -> dict[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}
