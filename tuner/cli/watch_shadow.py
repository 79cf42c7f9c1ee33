"""What a watch asks of Prometheus and of a profile's shadows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tuner.aim import Aim
from tuner.baseline import Baseline
from tuner.check import Checked, Verdict, check, without_replay
from tuner.cli.inputs import fit_lengths, profiled_engine, replay_plan
from tuner.cli.trace_jobs import headers_of
from tuner.console import say
from tuner.drift import Drift, compare
from tuner.engine.protocol import EngineLimits
from tuner.errors import TunerError, UsageError
from tuner.objective import Objective
from tuner.plan import DEFAULT_LADDER, Budget, search_space
from tuner.prometheus import trace_from_prometheus
from tuner.retune import Retune, retuning, shadow_host
from tuner.shadows import default_jobs
from tuner.traces import Trace
from tuner.traffic_sketch import TrafficSketch, sketch_of
from tuner.watch.guard import Look
from tuner.watch.handover import Clock
from tuner.watch.live import Live, live_between

# How a sampled trace says that its server was not asked all the time: see `prometheus.remarks`.
_GAP_WORDS = ("there is no data for", "there is data for")

MOST_REPLAYED: Final = 20_000
"""Ours: twenty times what a p99 asks for; of a busier server the end of a stretch is judged."""

# How a re-tune replays sampled traffic: as `tune check` does by default.
_REPLAY: Mapping[str, Any] = {
    "engine_args": (),
    "model": None,
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

    def lately(self) -> Trace:
        """Return the traffic of late. Raises: UsageError."""
        return self._sampled(self.options["since"], self.clock.now_s())

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
            headers=self.credentials(),
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
            headers=self.credentials(),
            verify=not given["no_verify"],
        )

    def credentials(self) -> dict[str, str]:
        """Return the headers; a token in a file may be another one by now.

        Raises: UsageError if it cannot be read.
        """
        headers = headers_of(self.options["headers"])
        path = self.options["token_file"]
        if not path:
            return headers
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"--token-file {path} cannot be read: {reason}") from error
        return headers | {"Authorization": f"Bearer {token}"}


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
        gaps = [r for r in trace.notes.remarks if r.startswith(_GAP_WORDS)]
        if gaps:
            told = f"the present traffic is known in part only: {'; '.join(gaps)}"
            return Checked(Verdict.TOO_LITTLE, told, Drift((), (), told), present)
        now = self.traffic.sketch(trace)
        drift = compare(tuned_for or self.before, now, self.options["seed"])
        found = without_replay(drift, present)
        if found is not None:
            return found
        with self._retune(trace, present) as (retune, aim, fitted):
            return check(drift, fitted, retune, aim)

    def look(self, start_s: float, end_s: float, settings: Sequence[EngineLimits]) -> Look:
        """Return how the server did and would have done. Raises: TunerError."""
        live = self.traffic.live(start_s, end_s)
        if not live.requests:
            return Look(live, {}, "no request finished")
        if live.requests > MOST_REPLAYED:
            start_s = end_s - (end_s - start_s) * MOST_REPLAYED / live.requests
            live = self.traffic.live(start_s, end_s)
        try:
            trace = self.traffic.between(start_s, end_s)
            with self._retune(trace, settings[0]) as (retune, aim, fitted):
                found = retune.replay([fitted], settings, aim)
        except TunerError as error:
            return Look(live, {}, error.message)
        return Look(live, {limits: outcomes[0] for limits, outcomes in found.items()})

    @contextmanager
    def _retune(
        self, read: Trace, present: EngineLimits
    ) -> Iterator[tuple[Retune, Aim, Trace]]:
        """Yield shadows of the profile, and the traffic as they can take it."""
        options, baseline = {**self.options, **_REPLAY}, self.baseline
        forced = options["force_profile"]
        with shadow_host(baseline.profile, is_forced=forced) as (host, run_dir):
            facts = host.facts(profiled_engine(options, baseline.profile).values)
            trace, told = fit_lengths(read, facts.max_model_len, options["too_long"])
            if told:
                say(told)
            ladder = options["max_num_seqs"] or DEFAULT_LADDER
            space = search_space(facts, trace, ladder, present)
            aim = Aim(
                Objective(options["objective"]) if options["objective"] else baseline.objective,
                tuple(options["slo"]) or baseline.slos,
                replay_plan(options, trace),
                Budget(options["budget"]),
                None,
            )
            with retuning(
                host,
                run_dir,
                baseline.profile,
                space,
                jobs=options["jobs"] or default_jobs(),
                seed=options["seed"],
                is_forced=forced,
            ) as retune:
                yield retune, aim, trace
