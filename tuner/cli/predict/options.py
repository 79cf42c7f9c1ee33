"""What both commands are asked alike: a profile, traffic, loads, an aim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tuner.cli.console import say
from tuner.cli.inputs import (
    ShadowOptions,
    TrafficOptions,
    announce,
    say_missed,
)
from tuner.cli.options import Params
from tuner.drift.retune import Retune
from tuner.engine.limits import EngineLimits
from tuner.replay.slo import Slo
from tuner.run.context import Workload
from tuner.run.inputs import engine_of_profile
from tuner.run.knobs.known import check_has
from tuner.run.loads.alone import hopeless, with_widest
from tuner.run.loads.surface import Surface, predict_surface
from tuner.search.budget import RATE_INSTEAD, Aim, asked_window
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER, PAST_LADDER, search_space
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.traffic.resample import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window


@dataclass(frozen=True, slots=True)
class LoadsOptions:
    """Of which engine and traffic, at which loads and settings, for which aim.

    `ladder` are the caps of max_num_seqs to try, `loads` ascending multiples of the recorded
    arrivals, `knobs` what else may be turned.
    """

    shadow: ShadowOptions
    traffic: TrafficOptions
    loads: tuple[float, ...]
    slos: tuple[Slo, ...]
    objective: Objective
    ladder: tuple[int, ...]
    knobs: tuple[str, ...]

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        return cls(
            shadow=ShadowOptions.parse(params),
            traffic=TrafficOptions.parse(params),
            loads=params["loads"],
            slos=tuple(params["slo"]),
            objective=Objective(params["objective"]),
            ladder=params["max_num_seqs"] or DEFAULT_LADDER,
            knobs=params.get("knobs", ()),
        )

    def aim(self, trace: Trace, window: Window | None = None) -> Aim:
        """Return what is aimed at; if that was not asked for, say so. Raises: UsageError."""
        aim = Aim(self.objective, self.slos, self.traffic.plan(trace), window)
        if aim.objective is not self.objective:
            say(f"note: {RATE_INSTEAD}")
        return aim

    def retune(
        self, source: ProfiledEngine, recorded: Trace, load: float
    ) -> tuple[Trace, Retune]:
        """Return the trace as the engine takes it, and what predicts it up to a load.

        Raises: ShadowError if the profile does not fit here; TraceError, UsageError.
        """
        profile = source.profile
        facts = source.facts(engine_of_profile(profile).values)
        trace = self.traffic.fitted(recorded, facts.max_model_len)
        busiest = at_load(trace, load)
        now, may_grow = facts.current_limits, profile.tells_beyond
        space = search_space(facts, busiest, self.ladder, now, may_grow=may_grow)
        seed, is_forced = self.traffic.seed, self.shadow.is_forced
        predictor = Predictor(profile, seed=seed, is_forced=is_forced)
        return trace, Retune(space, predictor)

    def surface(self, source: ProfiledEngine) -> tuple[Trace, Surface]:
        """Return the trace, and what is predicted of it at every load. Raises: TunerError."""
        check_has(self.knobs, source.profile.shape.vllm_version)
        trace, retune, workload = self._read(source)
        loads = self.loads
        if len(loads) > 1 and not workload.plan.bears_loads:
            say("note: a closed loop keeps as many in flight at every load: one is predicted")
            loads = (self.traffic.load,)
        found = predict_surface(
            retune.predictor, retune.space, workload, loads, say, self.knobs
        )
        self._say_what_no_load_mends(retune, workload, found)
        return trace, found

    def _say_what_no_load_mends(
        self, retune: Retune, workload: Workload, found: Surface
    ) -> None:
        """Say which SLOs break at every load, however low. Raises: UsageError."""
        lowest = found.loads[0].best
        if lowest.broken:
            settings = with_widest(lowest.limits, retune.space)
            predictor = retune.predictor
            alone = hopeless(predictor, settings, workload.pieces, self.slos)
            if alone is not None:
                say(f"note: {alone.text}; {alone.hint}")

    def current(self, source: ProfiledEngine) -> tuple[Predictor, EngineLimits, Workload]:
        """Return what predicts the current limits as they are deployed, and the traffic.

        Raises: TunerError.
        """
        _, retune, workload = self._read(source)
        return retune.predictor, retune.space.current, workload

    def _read(self, source: ProfiledEngine) -> tuple[Trace, Retune, Workload]:
        """Return the trace, what predicts it, and the window that was asked for, or all.

        At another load what leads in to a window is multiplied with it, as for a capacity.
        """
        traffic = self.traffic.read(max(self.ladder) * PAST_LADDER)
        announce(traffic)
        trace, retune = self.retune(source, traffic.trace, self.loads[-1])
        say_missed(trace, self.loads)
        window = asked_window(self.traffic.window, trace, self.traffic.plan(trace))
        if remark := retune.predictor.info(retune.space.current).remark:
            say(remark)
        return trace, retune, Workload.of_whole(trace, self.aim(trace, window))
