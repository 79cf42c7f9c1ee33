"""Shadows of a baseline's profile on new traffic, as `tune check` and `tune watch` need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tuner.cli.console import say
from tuner.cli.options import credentials
from tuner.drift.baseline import Baseline
from tuner.drift.check import Checked, DriftVerdict, check, unlike_server, without_replay
from tuner.drift.compare import Drift, drift_between
from tuner.drift.retune import Ready, RetuneOptions, shadow_process, shadows_for
from tuner.drift.watch.guard import GuardSample
from tuner.drift.watch.handover import Clock
from tuner.engine.limits import EngineLimits
from tuner.errors import TunerError
from tuner.replay.arrivals import ClockKind, Sessions
from tuner.replay.metrics import Measurement
from tuner.replay.process import EngineProcess
from tuner.replay.runner import Failure
from tuner.run.directory import RunDir
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER
from tuner.traffic.prometheus import hits_missed, known_in_part, trace_from_prometheus
from tuner.traffic.prometheus.live import Live, live_between
from tuner.traffic.sketch import TrafficSketch, sketch_of
from tuner.traffic.traces import LoadModel, TooLong, Trace
from tuner.traffic.windows import whole


@contextmanager
def shadows_on(
    read: Trace,
    baseline: Baseline,
    present: EngineLimits | None,
    options: Mapping[str, Any],
    host: EngineProcess,
    run_dir: RunDir,
) -> Iterator[Ready]:
    """Yield shadows of the baseline's profile for this traffic; they end with the block.

    `present` is None where the configuration that is named says it. Options that are not given
    are those of the baseline.

    Raises: TunerError.
    """
    config, wanted = options["config"] or None, _retune_options(options)
    with shadows_for(read, baseline, present, config, wanted, host, run_dir, say) as ready:
        yield ready


def _retune_options(options: Mapping[str, Any]) -> RetuneOptions:
    load_model = options["load_model"]
    return RetuneOptions(
        objective=Objective(options["objective"]) if options["objective"] else None,
        slos=tuple(options["slo"]),
        ladder=options["max_num_seqs"] or DEFAULT_LADDER,
        budget_s=options["budget"],
        window=options["window"],
        load_model=LoadModel(load_model) if load_model else None,
        concurrency=options["concurrency"],
        clock=ClockKind(options["clock"]),
        request_timeout_s=options["request_timeout"],
        sessions=Sessions(options["sessions"]),
        too_long=TooLong(options["too_long"]),
        jobs=options["jobs"],
        seed=options["seed"],
        is_forced=options["force_profile"],
    )


MAX_REPLAYED: Final = 20_000
"""Ours: twenty times what a p99 asks for; of a busier server the end of a stretch is judged."""

# How a re-tune replays sampled traffic: as `tune check` does by default.
_REPLAY: Mapping[str, Any] = {
    "window": None,
    "load_model": None,
    "concurrency": None,
    "clock": "virtual",
    "request_timeout": None,
    "sessions": "causal",
}


@dataclass(frozen=True, slots=True)
class PrometheusTraffic:
    """Traffic and live metrics of the watched server, as Prometheus keeps them."""

    options: Mapping[str, Any]
    clock: Clock
    is_closed: bool

    def since(self, start_s: float) -> Trace:
        """Return the traffic since a Unix time. Raises: UsageError."""
        now_s = self.clock.now_s()
        return self._sampled(now_s - start_s, now_s)

    def between(self, start_s: float, end_s: float) -> Trace:
        """Return the traffic between two Unix times. Raises: UsageError."""
        return self._sampled(end_s - start_s, end_s)

    def live(self, start_s: float, end_s: float) -> Live:
        """Return how the server did between two Unix times. Raises: UsageError."""
        given = self.options
        return live_between(
            given["prometheus"],
            start_s,
            end_s,
            given["step"],
            model=given["only_model"],
            headers=credentials(given),
            verify=not given["no_verify"],
        )

    def sketch(self, trace: Trace) -> TrafficSketch:
        """Return the sketch of sampled traffic."""
        return sketch_of(trace, self.options["step"])

    def _sampled(self, since_s: float, until_s: float) -> Trace:
        given = self.options
        return trace_from_prometheus(
            given["prometheus"],
            since_s,
            given["step"],
            model=given["only_model"],
            seed=given["seed"],
            concurrency=self.is_closed,
            until_s=until_s,
            headers=credentials(given),
            verify=not given["no_verify"],
        )


@dataclass(frozen=True, slots=True)
class ShadowCheck:
    """Checks and forecasts by the shadows of one profile; their processes end with each."""

    options: Mapping[str, Any]
    baseline: Baseline
    before: TrafficSketch
    traffic: PrometheusTraffic

    def check(
        self, trace: Trace, present: EngineLimits, tuned_for: TrafficSketch | None
    ) -> Checked:
        """Return the verdict on traffic at the present limits. Raises: TunerError."""
        told = known_in_part(trace.notes.remarks)
        if told:
            return Checked(DriftVerdict.TOO_LITTLE, told, Drift((), (), told), present)
        now = self.traffic.sketch(trace)
        drift = drift_between(tuned_for or self.before, now, self.options["seed"])
        found = without_replay(drift, present)
        if found is not None:
            return found
        with self._shadows(trace, present) as ready:
            return check(drift, ready.trace, ready.retune, ready.aim)

    def guard_sample(
        self, start_s: float, end_s: float, settings: Sequence[EngineLimits]
    ) -> GuardSample:
        """Return how the server did and would have done. Raises: TunerError."""
        live = self.traffic.live(start_s, end_s)
        if not live.requests:
            return GuardSample(live, {}, "no request finished")
        if live.requests > MAX_REPLAYED:
            start_s = end_s - (end_s - start_s) * MAX_REPLAYED / live.requests
            live = self.traffic.live(start_s, end_s)
        try:
            trace = self.traffic.between(start_s, end_s)
            with self._shadows(trace, settings[0]) as ready:
                found = ready.retune.replay([ready.trace], settings, ready.aim)
        except TunerError as error:
            return GuardSample(live, {}, error.message)
        in_use = found[settings[-1]][0]
        if told := _unlike(trace, in_use):
            return GuardSample(live, {}, told)
        return GuardSample(live, {limits: outcomes[0] for limits, outcomes in found.items()})

    @contextmanager
    def _shadows(self, read: Trace, present: EngineLimits) -> Iterator[Ready]:
        """Yield shadows of the profile, and the traffic as they can take it."""
        options, profile = {**self.options, **_REPLAY}, self.baseline.profile
        with (
            shadow_process(profile, is_forced=options["force_profile"]) as (host, run_dir),
            shadows_on(read, self.baseline, present, options, host, run_dir) as ready,
        ):
            yield ready


def _unlike(trace: Trace, predicted: Measurement | Failure) -> str:
    """Say why a prediction of traffic is none of what the server served, or nothing."""
    if told := hits_missed(trace.notes.remarks):
        return told
    if not isinstance(predicted, Measurement):
        return ""
    return unlike_server(trace, [whole(trace)], predicted)
