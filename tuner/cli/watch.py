"""What `tune watch` does, once its options are read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.cli.console import say
from tuner.cli.doctor import installed_vllm
from tuner.cli.emit import check_ending
from tuner.cli.inputs import read_named
from tuner.cli.options import credentials
from tuner.cli.shadows import PrometheusTraffic, ShadowCheck
from tuner.drift.baseline import Baseline, read_baseline
from tuner.drift.compare import MIN_S
from tuner.drift.watch.guard import Guard
from tuner.drift.watch.handover import Clock, Rollout, StateStore, run_hook
from tuner.drift.watch.health import serving
from tuner.drift.watch.loop import Watcher
from tuner.drift.watch.policy import Policy
from tuner.drift.watch.publish import Publisher
from tuner.drift.watch.state import StateDir
from tuner.emit.names import Format
from tuner.emit.recommendation import without_lost
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import limits as limits_of
from tuner.engine.serve_config import read_config
from tuner.errors import UsageError
from tuner.run.directory import PROFILE_FILE
from tuner.shadow.calibration import error_ratio
from tuner.shadow.profiles import Profile
from tuner.traffic.prometheus.client import Prometheus
from tuner.traffic.sketch import TrafficSketch, sketch_of

_NEEDED = {
    "prometheus": ("--prometheus", "for example --prometheus http://prometheus:9090"),
    "profile": ("--profile", "name a run directory, or the profile.yaml of one"),
    "output": ("--emit", "name the file that is served from: --emit best.yaml"),
}
# What reading --baseline-trace needs to know besides.
_READING: Mapping[str, Any] = {
    "trace_format": None,
    "only_model": None,
    "time_unit": None,
    "hash_block_size": None,
    "spread": False,
    "sessions_over": None,
    "sample": None,
    "zero_output": "drop",
    "aborted": None,
    "skip_invalid": False,
    "max_invalid": None,
}


class WallClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        """Return the Unix time."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def run_watch(options: Mapping[str, Any], clock: Clock | None = None) -> int:
    """Watch, until it is stopped or for one round. Raises: TunerError."""
    for key, (name, hint) in _NEEDED.items():
        if not options[key]:
            raise UsageError(f"{name} is missing", hint)
    _check_times(options)
    # Nothing is asked: what is wrong with the address would be wrong in every round.
    with Prometheus(options["prometheus"]):
        pass
    path = Path(options["profile"])
    baseline = read_baseline(path)
    _check_version(baseline.profile, is_forced=options["force_profile"])
    before = _tuned_for(baseline, path, options)
    output = Path(options["output"])
    publisher = _publisher(options, baseline)
    state_path = Path(options["state"] or f"{output}.watch")
    with ExitStack() as held:
        store = _notebook(held.enter_context(StateDir(state_path)), path)
        watcher = _watcher(options, baseline, before, store, publisher, clock or WallClock())
        present = watcher.present
        if options["listen"]:
            held.enter_context(serving(options["listen"], watcher))
        say(f"watching {output} at {present}, state in {state_path}")
        if options["once"]:
            error = watcher.round()
            if error is not None:
                raise error
            return 0
        try:
            watcher.run()
        except KeyboardInterrupt:
            say("stopped; the state carries on from here")
    return 0


def _check_times(options: Mapping[str, Any]) -> None:
    """Refuse times that make no sense. Raises: UsageError."""
    for key, least_s in (("every", 1.0), ("guard", 60.0), ("hook_timeout", 0.1)):
        if options[key] < least_s:
            name = key.replace("_", "-")
            hint = "--no-guard lets every change stand" if key == "guard" else ""
            raise UsageError(
                f"--{name} must be at least {least_s:g} s, got {options[key]:g} s", hint
            )
    step_s = options["step"]
    if not (step_s >= 1 and step_s == int(step_s)):
        raise UsageError(f"--step must be a whole number of seconds, got {step_s:g} s")
    for key in ("since", "guard"):
        if options[key] < 2 * step_s:
            raise UsageError(
                f"--{key} must be at least two steps of {step_s:g} s, got {options[key]:g} s",
                f"take a shorter --step, or a longer --{key}",
            )


def _check_version(profile: Profile, *, is_forced: bool) -> None:
    """Refuse a profile of another vLLM now, and not weeks later, when traffic has shifted.

    Raises: UsageError.
    """
    if is_forced:
        return
    _, here = installed_vllm()
    there = profile.shape.vllm_version
    if here.partition("+")[0] != there.partition("+")[0]:
        raise UsageError(
            f"the profile was made with vLLM {there}, here is {here or 'none'}",
            f"install vLLM {there} beside tune, make a profile with this one, or pass "
            "--force-profile",
        )


def _tuned_for(baseline: Baseline, path: Path, options: Mapping[str, Any]) -> TrafficSketch:
    """Return the traffic that the profile's configuration was tuned for."""
    if not options["baseline_trace"]:
        return baseline.check_has_traffic(path)
    reading = {**_READING, "seed": options["seed"]}
    return sketch_of(read_named(options["baseline_trace"], reading))


def _notebook(kept: StateDir, path: Path) -> StateStore:
    """Return the state as it stands for the profile."""
    state, told = kept.load()
    if told:
        say(told)
    profile = path / PROFILE_FILE if path.is_dir() else path
    sha256 = hashlib.sha256(profile.read_bytes()).hexdigest()
    if told:
        last = replace(state.last, error=told, error_s=time.time())
        counts = replace(state.counts, errors=state.counts.errors + 1)
        state = replace(state, last=last, counts=counts)
    return StateStore(kept, state.for_profile(sha256))


def _watcher(
    options: Mapping[str, Any],
    baseline: Baseline,
    before: TrafficSketch,
    store: StateStore,
    publisher: Publisher,
    clock: Clock,
) -> Watcher:
    policy = Policy(
        options["min_gain"],
        options["min_interval"],
        options["confirmations"],
        options["since"],
        # Two readings tell of traffic, and no shorter traffic is compared.
        max(MIN_S, 2 * options["step"]),
    )
    traffic = PrometheusTraffic(options, clock, is_closed=before.is_closed)
    credentials(options)  # A file that cannot be read is told now, not in the first round.
    shadow = ShadowCheck(options, baseline, before, traffic)
    guard = None
    if not options["no_guard"]:
        wrong_ratio = error_ratio(baseline.profile)
        guard = Guard(options["guard"], shadow.guard_sample, wrong_ratio)
    hook = None
    if options["hook"]:
        hook = partial(run_hook, options["hook"], timeout_s=options["hook_timeout"])
    return Watcher(
        store=store,
        rollout=Rollout(store, publisher, hook, guard, clock, say),
        policy=policy,
        every_s=options["every"],
        tuned_for=_configured(options) or baseline.present,
        sample=traffic.since,
        sketch=traffic.sketch,
        check=shadow.check,
        clock=clock,
        notify=say,
        began_s=clock.now_s(),
    )


def _publisher(options: Mapping[str, Any], baseline: Baseline) -> Publisher:
    """Return what writes the file. Raises: UsageError."""
    chosen, output = Format(options["emit_format"]), Path(options["output"])
    check_ending(chosen, str(output))
    if not output.resolve().parent.is_dir():
        raise UsageError(f"the folder of --emit {output} does not exist", "make it first")
    kept: Mapping[str, object] = baseline.profile.serve_values
    if options["config"]:
        kept = read_config(Path(options["config"])).values
    values, lost = without_lost(kept)
    return Publisher(output, chosen, baseline.profile, values, lost)


def _configured(options: Mapping[str, Any]) -> EngineLimits | None:
    """Return the limits that --config names, None where it names none or one of them."""
    if not options["config"]:
        return None
    seqs, tokens = limits_of(read_config(Path(options["config"])).values)
    return None if seqs is None or tokens is None else EngineLimits(seqs, tokens)
