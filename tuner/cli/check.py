"""`tune check`: whether traffic has shifted since a run, and whether a re-tune would pay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import TrafficOptions, at_said_load
from tuner.cli.options import Params, path_of
from tuner.cli.prometheus import PrometheusOptions
from tuner.drift.baseline import Baseline, read_baseline
from tuner.drift.check import check_traffic
from tuner.drift.retune import RetuneOptions
from tuner.errors import UsageError
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER
from tuner.traffic.reshape import of_middle_engine
from tuner.traffic.sketch import TrafficSketch, sketch_of
from tuner.traffic.traces import TooLong, Trace


def retune_of(params: Params) -> RetuneOptions:
    """Return what a re-tune aims at, as check and watch say it alike."""
    objective = params["objective"]
    return RetuneOptions(
        objective=Objective(objective) if objective else None,
        slos=tuple(params["slo"]),
        ladder=params["max_num_seqs"] or DEFAULT_LADDER,
        too_long=TooLong(params["too_long"]),
        seed=params["seed"],
        is_forced=params["force_profile"],
    )


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Which traffic is compared with which baseline, and how a re-tune is tried.

    `baseline` is a run directory or a profile's file. The current traffic is in the files of
    `traffic` or else sampled from `prometheus`. `profile` goes before the run's own, `config`
    before the configuration that the run recommends, and `baseline_files`, the traffic that was
    tuned for, before what the run keeps of it.

    Raises: UsageError unless the current traffic is named once.
    """

    baseline: Path
    profile: Path | None
    config: Path | None
    baseline_files: tuple[str, ...]
    traffic: TrafficOptions
    prometheus: PrometheusOptions | None
    retune: RetuneOptions
    as_json: bool

    def __post_init__(self) -> None:
        """Refuse two sources of traffic, or none."""
        if bool(self.traffic.files) == bool(self.prometheus):
            raise UsageError(
                "name the current traffic with either --trace or --prometheus",
                "for example --trace today.jsonl, or --prometheus http://prometheus:9090",
            )

    @classmethod
    def parse(cls, params: Params, given: Collection[str]) -> Self:
        """Return what the command line says; `given` are those it names. Raises: UsageError."""
        if not params["baseline"]:
            raise UsageError(
                "--baseline is missing", "name a run directory, or the profile.yaml of one"
            )
        traffic = TrafficOptions.parse(params)
        retune = replace(
            retune_of(params),
            window=traffic.window,
            min_gain_ratio=params["min_gain"],
            **traffic.settings,
        )
        return cls(
            baseline=Path(params["baseline"]),
            profile=path_of(params["profile"]),
            config=path_of(params["config"]),
            baseline_files=tuple(params["baseline_trace"]),
            traffic=traffic,
            prometheus=PrometheusOptions.beside_a_trace(params, given),
            retune=retune,
            as_json=params["as_json"],
        )


def run_check(options: CheckOptions) -> int:
    """Check, print, and return the exit code. Raises: TunerError."""
    baseline = read_baseline(options.baseline, options.profile)
    before = _sketch_before(baseline, options)
    trace, now = _current(options, is_closed=before.is_closed)
    current = None if options.config else baseline.current
    checked = check_traffic(
        trace, (before, now), baseline, current, options.config, options.retune, say
    )
    show_result(checked.as_json(), checked.lines(), as_json=options.as_json)
    return checked.exit_code


def _sketch_before(baseline: Baseline, options: CheckOptions) -> TrafficSketch:
    """Return the sketch of what was tuned for: the named trace's, or the one that was kept."""
    if not options.baseline_files:
        return baseline.check_has_traffic(options.baseline)
    trace = options.traffic.reading.read(options.baseline_files)
    if baseline.sha256 and trace.sha256 != baseline.sha256:
        say(f"--baseline-trace is another file than the run's: it had {baseline.label}")
    return sketch_of(of_middle_engine(trace))


def _current(options: CheckOptions, *, is_closed: bool) -> tuple[Trace, TrafficSketch]:
    """Return the current traffic and its sketch. Raises: TraceError, UsageError."""
    traffic, server = options.traffic, options.prometheus
    if server is None:
        trace, drawn_s = of_middle_engine(traffic.reading.read(traffic.files)), None
    else:
        server, remark = server.of_one_replica()
        trace = server.sampled(traffic.seed, is_closed=is_closed)
        trace = replace(trace, notes=trace.notes.with_remark(remark))
        drawn_s = server.step_s
        for remark in trace.notes.remarks:
            say(remark.text)
    trace = at_said_load(trace, traffic.load)
    return trace, sketch_of(trace, drawn_s)
