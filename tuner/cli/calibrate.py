"""`tune calibrate`: correct a profile by what the engine does as it is served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import LimitOptions, ShadowOptions, TrafficOptions, announce
from tuner.cli.options import Params, path_of
from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, ShadowError, UsageError
from tuner.replay.timeline import Timelines
from tuner.run.inputs import engine_of_profile
from tuner.shadow.anchor import Anchor, anchored
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile, write_profile
from tuner.shadow.served import ServingOverhead, fit_serving_overhead
from tuner.shadow.step_model import StepModel
from tuner.traffic.traces import Aborted


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """Which profile is corrected by what, and where the new one goes.

    By a recording, or by one point where `anchor` is given. `config` is the configuration that
    was served, the profile's where it is None; `served` are its limits where they are named.

    Raises: UsageError for a recording that was not served as it is replayed.
    """

    shadow: ShadowOptions
    output: Path
    config: Path | None
    served: LimitOptions
    traffic: TrafficOptions
    as_json: bool
    anchor: Anchor | None = None

    def __post_init__(self) -> None:
        """Refuse what would not be compared like with like."""
        if self.anchor is not None and self.traffic.files:
            raise UsageError("--anchor and --trace are two ways to correct: name one of them")
        if self.traffic.load != 1:
            raise UsageError(
                "--load would change when requests came, which is what is compared"
            )

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        hint = "name the profile to correct: --profile FILE"
        shadow = ShadowOptions.parse(params, UsageError("--profile is missing", hint))
        if not params["output"]:
            raise UsageError("--output is missing", "name where it goes: --output FILE")
        return cls(
            shadow=shadow,
            output=Path(params["output"]),
            config=path_of(params["config"]),
            served=LimitOptions.parse(params),
            # What was served is compared: of an answer that was cut short no more was served.
            traffic=TrafficOptions.parse(params, aborted=Aborted.KEEP),
            as_json=params["as_json"],
            anchor=Anchor.parse(params["anchor"]) if params["anchor"] else None,
        )


def run_calibrate(options: CalibrateOptions) -> int:
    """Correct the profile, write it and say what changed. Raises: TunerError."""
    profile, source = options.shadow.load()
    if options.anchor is not None:
        corrected, found = anchored(profile, options.anchor)
        write_profile(options.output, corrected)
        show_result(
            {"engine": "shadow", **found.as_json()}, found.lines(), as_json=options.as_json
        )
        say(f"written: {options.output}")
        return 0
    corrected, limits, overhead = _corrected(profile, source, options)
    write_profile(options.output, corrected)
    content = {"engine": "shadow", "limits": limits, **overhead.as_json()}
    show_result(content, [f"served at {limits}", *overhead.lines()], as_json=options.as_json)
    say(f"written: {options.output}")
    return 0


def _corrected(
    profile: Profile, source: ProfiledEngine, options: CalibrateOptions
) -> tuple[Profile, EngineLimits, ServingOverhead]:
    """Replay the recording with one step model after the other until they agree."""
    engine = engine_of_profile(profile, options.config, None, {})
    traffic = options.traffic.read()
    announce(traffic)
    facts = source.facts(engine.values)
    trace = options.traffic.fitted(traffic.trace, facts.max_model_len)
    trace = options.traffic.part_of(trace)
    plan = options.traffic.plan(trace)
    limits = options.served.over(facts.current_limits)

    def replay(model: StepModel) -> Timelines:
        predictor = Predictor(replace(profile, step_model=model), seed=options.traffic.seed)
        try:
            return predictor.replay(trace, limits, plan).timelines
        except EngineError as error:
            raise ShadowError(
                f"the recording could not be replayed: {error.message}"
            ) from error

    corrected, overhead = fit_serving_overhead(profile, trace, limits, replay)
    return corrected, limits, overhead
