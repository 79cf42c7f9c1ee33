"""`tune watch`: keep a configuration tuned while traffic moves."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from tuner.cli.check import retune_of
from tuner.cli.console import say
from tuner.cli.emit import check_ending
from tuner.cli.options import Params, path_of
from tuner.cli.prometheus import PrometheusOptions
from tuner.cli.shadows import PrometheusTraffic, ShadowCheck
from tuner.drift.baseline import Baseline, read_baseline
from tuner.drift.compare import MIN_S
from tuner.drift.retune import RetuneOptions
from tuner.drift.watch.guard import Guard
from tuner.drift.watch.handover import Clock, Rollout, run_hook
from tuner.drift.watch.health import serving
from tuner.drift.watch.loop import Watcher
from tuner.drift.watch.policy import Policy
from tuner.drift.watch.publish import Publisher
from tuner.drift.watch.state import StateDir
from tuner.emit.names import Format
from tuner.emit.recommendation import without_lost
from tuner.engine.compat.serve import installed_vllm
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import read_config
from tuner.errors import UsageError
from tuner.run.directory import PROFILE_FILE, folder_of_run
from tuner.run.options import TraceReading
from tuner.search.space import Reach
from tuner.shadow.calibration import error_ratio
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile
from tuner.traffic.formats import ReadOptions
from tuner.traffic.prometheus.client import Prometheus
from tuner.traffic.reshape import of_middle_engine
from tuner.traffic.sketch import TrafficSketch, sketch_of

FLOOR_SHARE = 16
"""Ours: two of the largest steps; what asks for less still is for a person to decide."""

_NEEDED = {
    "prometheus": ("--prometheus", "for example --prometheus http://prometheus:9090"),
    "profile": ("--profile", "name a run directory, or the profile.yaml of one"),
    "output": ("--emit", "name the file that is served from: --emit best.yaml"),
}


class WallClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        """Return the Unix time."""
        return time.time()

    def elapsed_s(self) -> float:
        """Return seconds that nobody sets back or forward."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What is watched, what is written when a re-tune pays, and how that is rolled out.

    `profile` is a run directory or a profile's file; `baseline_files` hold the traffic that was
    tuned for where nothing else does. `output` is the file that is served from, `config` the
    configuration until that file exists. No change of a limit is larger than `max_change`
    times, and no cap is lower than `min_max_num_seqs`, None for a share of what was tuned.
    `hook` are the words of the command that rolls it out; none where it is empty. `guard_s` is
    how long a change is on probation, None for no time. `listen` is a HOST:PORT for metrics.

    Units: seconds.
    Raises: UsageError for times that make no sense.
    """

    prometheus: PrometheusOptions
    profile: Path
    baseline_files: tuple[str, ...]
    config: Path | None
    output: Path
    format: Format
    state: Path
    policy: Policy
    retune: RetuneOptions
    max_change: float
    min_max_num_seqs: int | None
    every_s: float
    is_once: bool
    hook: tuple[str, ...]
    hook_timeout_s: float
    guard_s: float | None
    listen: str | None

    def __post_init__(self) -> None:
        """Refuse times that make no sense."""
        _check_least("every", self.every_s, 1.0)
        _check_least("hook-timeout", self.hook_timeout_s, 0.1)
        if self.guard_s is not None:
            hint = "--no-guard lets every change stand"
            _check_least("guard", self.guard_s, 60.0, hint)
        step_s = self.prometheus.step_s
        if not (step_s >= 1 and step_s == int(step_s)):
            raise UsageError(f"--step must be a whole number of seconds, got {step_s:g} s")
        for name, length_s in (("since", self.prometheus.since_s), ("guard", self.guard_s)):
            if length_s is not None and length_s < 2 * step_s:
                raise UsageError(
                    f"--{name} must be at least two steps of {step_s:g} s, got {length_s:g} s",
                    f"take a shorter --step, or a longer --{name}",
                )

    @classmethod
    def parse(cls, params: Params, given: Collection[str]) -> Self:
        """Return what the command line says; `given` are those it names. Raises: UsageError."""
        if params["no_guard"] and "guard" in given:
            raise UsageError("--no-guard and --guard contradict each other", "give one of them")
        for key, (name, hint) in _NEEDED.items():
            if not params[key]:
                raise UsageError(f"{name} is missing", hint)
        url, output = params["prometheus"], Path(params["output"])
        prometheus = PrometheusOptions.parse(params, url, params["only_model"])
        return cls(
            prometheus=prometheus,
            profile=Path(params["profile"]),
            baseline_files=tuple(params["baseline_trace"]),
            config=path_of(params["config"]),
            output=output,
            format=Format(params["emit_format"]),
            state=Path(params["state"] or f"{output}.watch"),
            policy=Policy(
                params["min_gain"],
                params["min_interval"],
                params["confirmations"],
                prometheus.since_s,
                # Traffic takes two readings, and no shorter traffic is compared.
                max(MIN_S, 2 * prometheus.step_s),
            ),
            retune=retune_of(params),
            max_change=params["max_change"],
            min_max_num_seqs=params["min_max_num_seqs"],
            every_s=params["every"],
            is_once=params["once"],
            hook=tuple(params["hook"]),
            hook_timeout_s=params["hook_timeout"],
            guard_s=None if params["no_guard"] else params["guard"],
            listen=params["listen"],
        )


def _check_least(name: str, length_s: float, least_s: float, hint: str = "") -> None:
    if length_s < least_s:
        raise UsageError(f"--{name} must be at least {least_s:g} s, got {length_s:g} s", hint)


def run_watch(options: WatchOptions, clock: Clock | None = None) -> int:
    """Watch, until it is stopped or for one round. Raises: TunerError."""
    # Nothing is queried: what is wrong with the address would be wrong in every round.
    with Prometheus(options.prometheus.url):
        pass
    baseline = read_baseline(options.profile)
    _check_version(baseline.profile, is_forced=options.retune.is_forced)
    before = _tuned_for(baseline, options)
    publisher = _publisher(options, baseline)
    with ExitStack() as held:
        store = held.enter_context(StateDir(options.state))
        _take_up(store, options.profile)
        watcher = _watcher(options, baseline, before, store, publisher, clock or WallClock())
        current = watcher.current
        if options.listen:
            held.enter_context(serving(options.listen, watcher))
        reach = _reach(options, watcher.tuned_for)
        say(
            f"watching {options.output} at {current}, state in {options.state}; a change is at "
            f"most {reach.times:g}x, and max-num-seqs at least {reach.min_max_num_seqs}"
        )
        if options.is_once:
            error = watcher.round()
            if error is not None:
                raise error
            return 0
        try:
            watcher.run()
        except KeyboardInterrupt:
            say("stopped; the state carries on from here")
    return 0


def _check_version(profile: Profile, *, is_forced: bool) -> None:
    """Refuse a profile of another vLLM now, and not weeks later, when traffic has shifted.

    Raises: UsageError.
    """
    if is_forced:
        return
    _, here = installed_vllm()
    there = profile.shape.vllm_version
    if here and here.partition("+")[0] != there.partition("+")[0]:
        raise UsageError(
            f"the profile was made with vLLM {there}, here is {here}",
            f"install vLLM {there} or none beside tune, make a profile with this one, or pass "
            "--force-profile",
        )


def _tuned_for(baseline: Baseline, options: WatchOptions) -> TrafficSketch:
    """Return the traffic that the profile's configuration was tuned for."""
    if not options.baseline_files:
        return baseline.check_has_traffic(options.profile)
    reading = TraceReading(rows=ReadOptions(seed=options.retune.seed))
    return sketch_of(of_middle_engine(reading.read(options.baseline_files)))


def _take_up(store: StateDir, path: Path) -> None:
    """Go by the state that was kept, as it stands for the profile."""
    state, damage = store.load()
    if damage:
        say(damage)
        last = replace(state.last, error=damage, error_s=time.time())
        counts = replace(state.counts, errors=state.counts.errors + 1)
        state = replace(state, last=last, counts=counts)
    folder = folder_of_run(path)
    profile = folder / PROFILE_FILE if folder.is_dir() else path
    sha256 = hashlib.sha256(profile.read_bytes()).hexdigest()
    store.state = state.for_profile(sha256)


def _watcher(
    options: WatchOptions,
    baseline: Baseline,
    before: TrafficSketch,
    store: StateDir,
    publisher: Publisher,
    clock: Clock,
) -> Watcher:
    server, retune = options.prometheus, options.retune
    traffic = PrometheusTraffic(server, retune.seed, clock, is_closed=before.is_closed)
    server.credentials()  # A file that cannot be read is refused now, not in the first round.
    tuned_for = _served(options.config, baseline)
    retune = replace(retune, reach=_reach(options, tuned_for))
    shadow = ShadowCheck(retune, options.config, baseline, before, traffic)
    guard = None
    if options.guard_s is not None:
        guard = Guard(options.guard_s, shadow.guard_sample, error_ratio(baseline.profile))
    hook = None
    if options.hook:
        hook = partial(run_hook, options.hook, timeout_s=options.hook_timeout_s)
    return Watcher(
        store=store,
        rollout=Rollout(store, publisher, hook, guard, clock, _say_if_anybody_listens),
        policy=options.policy,
        every_s=options.every_s,
        tuned_for=tuned_for,
        sample=traffic.since,
        sketch=traffic.sketch,
        check=shadow.check,
        clock=clock,
        notify=_say_if_anybody_listens,
        began_s=clock.elapsed_s(),
    )


def _say_if_anybody_listens(text: str) -> None:
    """Write a line to standard error; the watch outlives a log whose disk is full."""
    with suppress(OSError):
        say(text)


def _reach(options: WatchOptions, tuned_for: EngineLimits) -> Reach:
    floor = options.min_max_num_seqs or max(1, tuned_for.max_num_seqs // FLOOR_SHARE)
    return Reach(options.max_change, floor)


def _publisher(options: WatchOptions, baseline: Baseline) -> Publisher:
    """Return what writes the file. Raises: UsageError."""
    output = options.output
    check_ending(options.format, output)
    if not output.resolve().parent.is_dir():
        raise UsageError(f"the folder of --emit {output} does not exist", "make it first")
    served = baseline.profile.serve_values
    if options.config is not None:
        served = read_config(options.config)
    values, lost = without_lost(served)
    return Publisher(output, options.format, baseline.profile, values, lost)


def _served(config: Path | None, baseline: Baseline) -> EngineLimits:
    """Return the limits that --config serves; without it those that the baseline has."""
    if config is None:
        return baseline.current
    return ProfiledEngine(baseline.profile).current_limits(read_config(config))
