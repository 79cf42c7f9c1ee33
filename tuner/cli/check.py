"""What `tune check` does, once its options are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.console import say
from tuner.cli.inputs import read_named
from tuner.cli.options import credentials
from tuner.cli.shadows import shadows_on
from tuner.drift.baseline import Baseline, read_baseline
from tuner.drift.check import Checked, check, without_replay
from tuner.drift.compare import Drift, drift_between
from tuner.drift.retune import shadow_process
from tuner.errors import UsageError
from tuner.traffic.reshape import at_load
from tuner.traffic.sketch import TrafficSketch, sketch_of
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The present traffic, and within which time its arrivals were drawn at random."""

    trace: Trace
    sketch: TrafficSketch
    partial: str


def run_check(options: Mapping[str, Any]) -> int:
    """Check, print, and return the exit code. Raises: TunerError."""
    if not options["baseline"]:
        raise UsageError(
            "--baseline is missing", "name a run directory, or the profile.yaml of one"
        )
    path = Path(options["baseline"])
    own = Path(options["profile"]) if options["profile"] else None
    baseline = read_baseline(path, own)
    before = _sketch_before(baseline, path, options)
    traffic = _present(options, is_closed=before.is_closed)
    drift = Drift((), (), traffic.partial)
    if not traffic.partial:
        drift = drift_between(before, traffic.sketch, options["seed"])
    found = without_replay(drift, None if options["config"] else baseline.present)
    if found is None:
        found = _replayed(traffic.trace, baseline, drift, options)
    if options["as_json"]:
        encoded = msgspec.json.format(msgspec.json.encode(found.as_json()), indent=2)
        sys.stdout.write(encoded.decode() + "\n")
    else:
        sys.stdout.write("\n".join(found.lines()) + "\n")
    return found.exit_code


def _sketch_before(baseline: Baseline, path: Path, options: Mapping[str, Any]) -> TrafficSketch:
    """Return the sketch of what was tuned for: the named trace's, or the one that was kept."""
    if not options["baseline_trace"]:
        return baseline.check_has_traffic(path)
    trace = read_named(options["baseline_trace"], options)
    if baseline.sha256 and trace.sha256 != baseline.sha256:
        say(f"--baseline-trace is another file than the run's: it had {baseline.told}")
    return sketch_of(trace)


def _present(options: Mapping[str, Any], *, is_closed: bool) -> _Traffic:
    """Return the present traffic. Raises: TraceError, UsageError."""
    if bool(options["trace"]) == bool(options["prometheus"]):
        raise UsageError(
            "name the present traffic with either --trace or --prometheus",
            "for example --trace today.jsonl, or --prometheus http://prometheus:9090",
        )
    from tuner.traffic.prometheus import known_in_part, trace_from_prometheus

    if options["trace"]:
        trace, drawn_s = read_named(options["trace"], options), None
    else:
        trace = trace_from_prometheus(
            options["prometheus"],
            options["since"],
            options["step"],
            model=options["only_model"],
            seed=options["seed"],
            concurrency=is_closed,
            headers=credentials(options),
            verify=not options["no_verify"],
        )
        drawn_s = options["step"]
        for remark in trace.notes.remarks:
            say(remark)
    if options["load"] != 1:
        trace = at_load(trace, options["load"])
    return _Traffic(trace, sketch_of(trace, drawn_s), known_in_part(trace.notes.remarks))


def _replayed(
    read: Trace, baseline: Baseline, drift: Drift, options: Mapping[str, Any]
) -> Checked:
    """Replay the present traffic and decide. Raises: TunerError."""
    present = None if options["config"] else baseline.present
    profile, is_forced = baseline.profile, options["force_profile"]
    with (
        shadow_process(profile, is_forced=is_forced) as (host, run_dir),
        shadows_on(read, baseline, present, options, host, run_dir) as ready,
    ):
        space = ready.retune.space
        others = len(space.grid())
        say(f"traffic has shifted: replaying it at {space.present} and {others} others")
        found = check(drift, ready.trace, ready.retune, ready.aim)
        for remark in ready.retune.shadows.remarks:
            say(remark)
        return found
