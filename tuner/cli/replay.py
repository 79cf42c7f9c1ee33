"""`tune replay`: measure one configuration and print it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.displays import ReplayDisplay
from tuner.cli.inputs import (
    WHERE_PROFILES_ARE,
    EngineOptions,
    LimitOptions,
    ShadowOptions,
    TrafficOptions,
    announce,
)
from tuner.cli.options import Params
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts, EngineSource
from tuner.errors import Caveat, UsageError
from tuner.files import log_folder
from tuner.replay.arrivals import ClockKind, check_lead_in
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan, doubts
from tuner.replay.process import EngineProcess
from tuner.replay.slo import LATENCIES
from tuner.run.inputs import EngineChoice, Traffic
from tuner.shadow.calibration import StatedError
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.stats import short
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import Window, whole

_STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is measured: traffic, an engine or the shadow of one, and at which limits.

    `limits` are those of the current configuration where they are not named; without `shadow` a
    live engine is measured. What came in the `lead_in_s` before the window warms the engine up.

    Units: seconds.
    """

    traffic: TrafficOptions
    engine: EngineOptions
    limits: LimitOptions
    shadow: ShadowOptions | None
    lead_in_s: float
    as_json: bool

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        is_shadow, shadow = params["engine_kind"] == "shadow", None
        if is_shadow:
            is_wall = params["clock"] == ClockKind.WALL
            is_for_engine = {"--greedy": params["greedy"], "--clock wall": is_wall}
            for option in (name for name, is_given in is_for_engine.items() if is_given):
                raise UsageError(
                    f"{option} is for a live engine, and --engine shadow starts none",
                    f"leave {option} out",
                )
            missing = UsageError("--engine shadow needs --profile FILE", WHERE_PROFILES_ARE)
            shadow = ShadowOptions.parse(params, missing)
        elif params["profile"]:
            raise UsageError("--profile is for --engine shadow", "add --engine shadow")
        return cls(
            traffic=TrafficOptions.parse(params),
            engine=EngineOptions.parse(params),
            limits=LimitOptions.parse(params),
            shadow=shadow,
            lead_in_s=params["lead_in"],
            as_json=params["as_json"],
        )


def run_replay(options: ReplayOptions, source: EngineSource | None = None) -> int:
    """Replay the trace once and print the measurement. Raises: TunerError."""
    shadow = None if options.shadow is None else options.shadow.load()
    engine = options.engine.choose(shadow)
    traffic = options.traffic.read()
    plan = options.traffic.plan(traffic.trace)
    check_lead_in(options.lead_in_s, plan.load_model)
    announce(traffic, is_demo=engine.is_demo)
    job = _Job(options, engine, traffic, plan)
    if shadow is not None:
        limits, measured = job.predicted(shadow)
    else:
        live = source or LiveSource(options.traffic.is_greedy)
        patience_s = options.traffic.start_timeout_s
        with (
            log_folder("tune-replay-") as folder,
            EngineProcess(live, folder / "engine.log", patience_s) as host,
        ):
            limits, measured = job.measured(host)
    content = {
        "engine": "live" if shadow is None else "shadow",
        "limits": limits,
        "load_model": str(plan.load_model),
        **measured.as_json(),
    }
    texts = {} if shadow is None else StatedError.of(shadow.profile).texts
    show_result(content, _lines(limits, measured, texts), as_json=options.as_json)
    return 0


@dataclass(frozen=True, slots=True)
class _Job:
    options: ReplayOptions
    engine: EngineChoice
    traffic: Traffic
    plan: ReplayPlan

    def measured(self, host: EngineProcess) -> tuple[EngineLimits, Measurement]:
        """Start the engine at the limits and replay."""
        facts, plan = host.facts(self.engine.values), self.plan
        trace, window, limits = self._fitted(facts)
        started = host.start(self.engine.values, limits)
        say(
            f"engine started in {started.start_s:.1f} s; if it fails its log is {host.log_path}"
        )
        for line in started.notes:
            say(line)
        host.load("trace", window.of(plan.on(trace)), self.options.traffic.seed)
        with ReplayDisplay() as display:
            measured = measure([host.replay("trace", limits, plan, display.progress)])
        shared = {Caveat.GPU_SHARED} if started.others else set()
        found = sorted(shared | doubts(facts, plan, trace.output_tokens))
        return limits, self._with_caveats(measured, trace, window, found)

    def predicted(self, profiled: ProfiledEngine) -> tuple[EngineLimits, Measurement]:
        """Predict a replay at the limits."""
        facts, plan = profiled.facts(self.engine.values), self.plan
        trace, window, limits = self._fitted(facts)
        predictor = Predictor(profiled.profile, seed=self.options.traffic.seed)
        if remark := predictor.info(limits).remark:
            say(remark)
        measured = measure([predictor.replay(window.of(plan.on(trace)), limits, plan)])
        found = sorted(doubts(facts, plan, trace.output_tokens))
        return limits, self._with_caveats(measured, trace, window, found)

    def _fitted(self, facts: EngineFacts) -> tuple[Trace, Window, EngineLimits]:
        """Return the trace as the engine takes it, what of it is replayed, and the limits."""
        options = self.options
        trace = options.traffic.fitted(self.traffic.trace, facts.max_model_len)
        window = options.traffic.window_of(trace).with_lead_in(options.lead_in_s)
        if window.lead_in_s < options.lead_in_s:
            had_s = window.lead_in_s
            say(f"lead-in: {had_s:g} s of the trace come before the window, and no more")
        return trace, window, options.limits.over(facts.current_limits)

    def _with_caveats(
        self, measured: Measurement, trace: Trace, window: Window, found: Sequence[Caveat]
    ) -> Measurement:
        """Return the measurement with what follows from what was asked for, and was found."""
        shadow = self.options.shadow
        applies = [
            (Caveat.SHADOW_ONLY, shadow is not None),
            (Caveat.PROFILE_FORCED, shadow is not None and shadow.is_forced),
            (Caveat.CLOSED_LOOP, self.plan.load_model is LoadModel.CLOSED),
            (Caveat.DEMO_MODEL, self.engine.is_demo),
            (Caveat.WINDOWED, window != whole(trace)),
            (Caveat.REQUESTS_CLIPPED, bool(trace.notes.clipped)),
            *((one, one is not Caveat.LOW_DEMAND) for one in sorted(self.traffic.caveats)),
        ]
        asked = [caveat for caveat, holds in applies if holds]
        return replace(measured, caveats=(*measured.caveats, *asked, *found))


def _lines(limits: EngineLimits, m: Measurement, texts: Mapping[Caveat, str]) -> list[str]:
    """Return the measurement for people; `texts` are of caveats that a profile's error says."""
    hit = m.prefix_cache_hit_ratio
    usage = m.kv_usage
    rows = [
        ("max_num_seqs", f"{limits.max_num_seqs}"),
        ("max_num_batched_tokens", f"{limits.max_num_batched_tokens}"),
        ("requests offered", f"{m.offered} = {m.completed} completed + {m.refused} refused"),
        ("", f"+ {m.timed_out} timed out + {m.aborted} aborted ({m.lost_ratio:.1%} lost)"),
        *([("", f"+ {m.unfinished} unfinished at the recording's end")] * bool(m.unfinished)),
        ("throughput", f"{short(m.requests_per_s)} requests/s"),
        ("", f"{m.output_tokens_per_s:.0f} output tokens/s"),
        *((name.removesuffix("_s"), _spread(m, name)) for name in LATENCIES),
        ("queue depth", f"mean {m.queue_depth.mean:.2f}, max {m.queue_depth.max:.0f}"),
        ("running", f"mean {m.running.mean:.2f}, max {m.running.max:.0f}"),
        ("gpu_cache_usage_perc", f"mean {usage.mean:.3f}, p99 {usage.p99:.3f}"),
        ("(kv_cache_usage_perc)", f"max {usage.max:.3f}"),
        ("preemptions", f"{m.preemptions}"),
        ("prefix-cache hits", "no prompt" if hit is None else f"{hit:.1%} of prompt tokens"),
        ("sustained", "yes" if m.is_sustained else "no"),
        ("utilisation", m.load_text or "unknown"),
        (
            "steps",
            f"{m.steps} in {m.clock_s:.2f} s of the replay's clock, {m.wall_s:.2f} s real",
        ),
        *([] if m.gpu is None else [("GPU", m.gpu.text)]),
    ]
    lines = [f"{name:<23} {text}" for name, text in rows]
    return lines + [f"caveat: {texts.get(caveat, caveat.text)}" for caveat in m.caveats]


def _spread(m: Measurement, name: str) -> str:
    """Return one latency's statistics in milliseconds."""
    spread = m.latencies[name]
    if spread is None:
        return "nothing measured"
    cells = (f"{stat} {spread.value(stat) * 1000:.1f}" for stat in _STATISTICS)
    return f"{'  '.join(cells)}  ms (n {spread.n})"
