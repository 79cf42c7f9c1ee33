"""Traffic that `tune watch` samples, and what a baseline's profile predicts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tuner.cli.console import say
from tuner.cli.prometheus import PrometheusOptions
from tuner.drift.baseline import Baseline
from tuner.drift.check import Checked, check_traffic, unlike_server
from tuner.drift.retune import RetuneOptions, retune_on
from tuner.drift.watch.guard import GuardSample
from tuner.drift.watch.handover import Clock
from tuner.engine.limits import EngineLimits
from tuner.errors import TunerError
from tuner.replay.metrics import Measurement
from tuner.replay.runner import Failure
from tuner.traffic.prometheus import another_load
from tuner.traffic.prometheus.live import Live
from tuner.traffic.sketch import TrafficSketch, sketch_of
from tuner.traffic.traces import Remark, Trace
from tuner.traffic.windows import whole

MAX_WATCHED_REQUESTS: Final = 2_000_000
"""Ours: six hours at 92 requests a second, more than an engine serves. A round draws and
replays them, and whoever is scraped may claim any number."""


@dataclass(frozen=True, slots=True)
class PrometheusTraffic:
    """Traffic and live metrics of the watched server, as Prometheus keeps them.

    Of several replicas traffic is that of one; `remark` says of which, where it is known.
    """

    server: PrometheusOptions
    seed: int
    clock: Clock
    is_closed: bool
    remark: str | Remark = ""

    def of_one_replica(self, start_s: float, end_s: float) -> PrometheusTraffic:
        """Return the same of the replica that stands for all between two Unix times.

        Raises: UsageError.
        """
        server, remark = self.server.of_one_replica(end_s - start_s, end_s)
        return replace(self, server=server, remark=remark)

    def since(self, start_s: float) -> Trace:
        """Return the traffic since a Unix time. Raises: UsageError."""
        now_s = self.clock.now_s()
        return self.of_one_replica(start_s, now_s).between(start_s, now_s)

    def between(self, start_s: float, end_s: float) -> Trace:
        """Return the traffic between two Unix times. Raises: UsageError."""
        trace = self.server.sampled(
            self.seed,
            is_closed=self.is_closed,
            since_s=end_s - start_s,
            until_s=end_s,
            max_requests=MAX_WATCHED_REQUESTS,
        )
        return replace(trace, notes=trace.notes.with_remark(self.remark))

    def sketch(self, trace: Trace) -> TrafficSketch:
        """Return the sketch of sampled traffic."""
        return sketch_of(trace, self.server.step_s)


@dataclass(frozen=True, slots=True)
class ShadowCheck:
    """Checks and predictions by one profile.

    `config` is the current configuration, the baseline's where it is None.
    """

    retune: RetuneOptions
    config: Path | None
    baseline: Baseline
    before: TrafficSketch
    traffic: PrometheusTraffic

    def check(
        self, trace: Trace, current: EngineLimits, tuned_for: TrafficSketch | None
    ) -> Checked:
        """Return the verdict on traffic at the current limits. Raises: TunerError."""
        sketches = tuned_for or self.before, self.traffic.sketch(trace)
        return check_traffic(
            trace, sketches, self.baseline, current, self.config, self.retune, say
        )

    def guard_sample(
        self, start_s: float, end_s: float, settings: Sequence[EngineLimits]
    ) -> GuardSample:
        """Return how the server did and would have done. Raises: TunerError."""
        live = self.traffic.server.live(start_s, end_s)
        if not live.requests:
            return GuardSample(live, {}, "no request finished")
        try:
            one = self.traffic.of_one_replica(start_s, end_s)
            trace = one.between(start_s, end_s)
            live = _of_one(one.server.live(start_s, end_s), live)
            # As the server was sent it, whatever the run that tuned for it kept in flight.
            sent = replace(self.baseline, concurrency=None, request_timeout_s=None)
            ready = retune_on(trace, sent, settings[0], self.config, self.retune, say)
            measure, plan = ready.retune.predictor.measure, ready.aim.plan
            outcomes = {x: measure([ready.trace], x, plan, ready.aim.slos) for x in settings}
        except TunerError as error:
            return GuardSample(live, {}, error.message)
        if why := _unlike(trace, outcomes[settings[-1]]):
            return GuardSample(live, {}, why)
        return GuardSample(live, outcomes)


def _of_one(one: Live, fleet: Live) -> Live:
    """Return how a replica did, with whether those of its fleet are there and restarted."""
    return replace(
        one,
        covered_ratio=fleet.covered_ratio,
        is_there=fleet.is_there,
        restarted_s=fleet.restarted_s,
        anew=fleet.anew,
    )


def _unlike(trace: Trace, predicted: Measurement | Failure) -> str:
    """Say why a prediction of traffic is none of what the server served, or nothing."""
    if missed := another_load(trace.notes):
        return missed
    if not isinstance(predicted, Measurement):
        return ""
    return unlike_server(trace, [whole(trace)], predicted)
