"""`tune calibrate`: correct a profile by what production does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import LimitOptions, ShadowOptions, TrafficOptions, announce
from tuner.cli.options import Params, path_of, profile_at
from tuner.cli.prometheus import PrometheusOptions
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import accepted_rates
from tuner.errors import EngineError, ShadowError, UsageError
from tuner.replay.timeline import Timelines
from tuner.run.inputs import engine_of_profile
from tuner.shadow.calibration import StatedError
from tuner.shadow.correction import Anchor, Correction, by_anchor, by_steps
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile, check_fits, write_profile
from tuner.shadow.rebuilt import rebuild_all
from tuner.shadow.recorded import RecordedRequests, Server, check_usable, read_steps
from tuner.shadow.served import by_recording
from tuner.shadow.step_model import StepModel
from tuner.traffic.prometheus.token_times import TokenTimes
from tuner.traffic.traces import Aborted


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """Which profile is corrected by what, and where the new one goes.

    By an anchor, by Prometheus, by recorded steps beside the recording, or by the recording
    itself. `config` is the configuration that was served, the profile's where it is None;
    `served` are its limits where they are named. Recorded steps name theirs.

    Raises: UsageError for none or several of these, or for a recording that was not served as
        it is replayed.
    """

    shadow: ShadowOptions
    output: Path
    config: Path | None
    served: LimitOptions
    traffic: TrafficOptions
    steps: tuple[Path, ...]
    as_json: bool
    anchor: Anchor | None
    prometheus: PrometheusOptions | None

    def __post_init__(self) -> None:
        """Refuse what would not be compared like with like."""
        sources = sum(map(bool, (self.anchor, self.prometheus, self.traffic.files)))
        if sources > 1:
            raise UsageError(
                "--anchor, --prometheus and --trace are three ways to correct: name one of them"
            )
        if self.steps and not self.traffic.files:
            raise UsageError("--steps needs the recording that they lie beside: --trace FILE")
        if not sources:
            raise UsageError(
                "nothing is named that the profile is corrected by",
                "name --anchor itl=TIME@running=N, --prometheus URL, or the recording of the "
                "server: --trace FILE, with its --steps FILE or without",
            )
        if self.steps and (self.config is not None or any(astuple(self.served))):
            raise UsageError(
                "--steps say themselves what was served: leave out --config, --max-num-seqs "
                "and --max-num-batched-tokens"
            )
        if self.traffic.load != 1:
            raise UsageError(
                "--load would change when requests came, which is what is compared"
            )

    @classmethod
    def parse(cls, params: Params, given: Collection[str]) -> Self:
        """Return what the command line says; `given` are those it names. Raises: UsageError."""
        hint = "name the profile to correct: --profile FILE"
        shadow = ShadowOptions.parse(params, UsageError("--profile is missing", hint))
        if not params["output"]:
            raise UsageError("--output is missing", "name where it goes: --output FILE")
        return cls(
            shadow=shadow,
            output=profile_at(params["output"]),
            config=path_of(params["config"]),
            served=LimitOptions.parse(params),
            # What was served is compared: of an answer that was cut short no more was served.
            traffic=TrafficOptions.parse(params, aborted=Aborted.KEEP),
            steps=tuple(map(Path, params["steps"])),
            as_json=params["as_json"],
            anchor=None if params["anchor"] is None else Anchor.parse(params["anchor"]),
            prometheus=PrometheusOptions.beside_a_trace(params, given),
        )


def run_calibrate(options: CalibrateOptions) -> int:
    """Correct the profile, write it and say what changed. Raises: TunerError."""
    corrected, found = _corrected(options.shadow.load(), options)
    write_profile(options.output, corrected)
    error = StatedError.of(corrected, is_forced=options.shadow.is_forced)
    content = {"engine": "shadow", **found.as_json(), **error.as_json()}
    lines = [*found.lines(), f"predictions by it are {error.words()}", *error.lines()]
    show_result(content, lines, as_json=options.as_json)
    say(f"written: {options.output}")
    return 0


def _corrected(source: ProfiledEngine, options: CalibrateOptions) -> tuple[Profile, Correction]:
    """Return the profile as what was named corrects it. Raises: TunerError."""
    profile = source.profile
    if options.prometheus is not None:
        seen = options.prometheus.token_times()
        return by_anchor(profile, _measured(seen), _served(source, options), seen.accepted)
    if options.anchor is not None:
        return by_anchor(profile, options.anchor, _served(source, options))
    if options.steps:
        requests = RecordedRequests.read(tuple(map(Path, options.traffic.files)))
        recorded = read_steps(options.steps)
        served = [check_usable(steps)[1] for steps in recorded]
        for steps in recorded:
            if not options.shadow.is_forced:
                _check_engine(profile, steps.server)
        found = zip(served, rebuild_all(recorded, requests), strict=True)
        stretches = [(limits, columns) for limits, one in found for columns in one.stretches()]
        brought = zip_longest(*(steps.brought for steps in recorded), fillvalue=0)
        return by_steps(profile, stretches, accepted_rates([sum(each) for each in brought]))
    return _by_recording(source, options)


def _served(source: ProfiledEngine, options: CalibrateOptions) -> EngineLimits:
    """Return the limits that a point was measured at. Raises: ShadowError, UsageError."""
    values = engine_of_profile(source.profile, options.config).values
    if not options.shadow.is_forced:
        source.check(values, None, None)
    return options.served.over(source.current_limits(values))


def _check_engine(profile: Profile, server: Server) -> None:
    """Refuse steps of another model or device; what the recorder did not keep is not compared.

    A model is the same by the last part of its name, wherever it lies.

    Raises: ShadowError with what differs.
    """
    names = [Path(name).name.casefold() for name in (server.model, profile.shape.model)]
    model = server.model if names[0] and names[0] != names[1] else None
    device = server.device or None
    if differing := check_fits(profile, vllm_version=None, device=device, model=model):
        raise ShadowError(
            f"the recorded steps are of another engine: {'; '.join(differing)}",
            "name the profile of what was served, or pass --force-profile if it is the same",
        )


def _measured(found: TokenTimes) -> Anchor:
    """Return the point that production's metrics show."""
    prompt = round(found.prompt_tokens)
    return Anchor(
        found.itl_s,
        found.running,
        max(1, round(found.cached_tokens + found.prompt_tokens + found.output_tokens / 2)),
        prompt,
        max(1, round(found.output_tokens)) if prompt else 0,
    )


def _by_recording(
    source: ProfiledEngine, options: CalibrateOptions
) -> tuple[Profile, Correction]:
    """Replay the recording with one step model after the other until they agree."""
    profile = source.profile
    engine = engine_of_profile(profile, options.config)
    traffic = options.traffic.read()
    announce(traffic)
    facts = source.facts(engine.values)
    whole = options.traffic.fitted(traffic.trace, facts.max_model_len)
    plan = options.traffic.plan(whole)
    trace = options.traffic.warm_part_of(whole, plan)
    limits = options.served.over(facts.current_limits)

    def replay(model: StepModel) -> Timelines:
        predictor = Predictor(replace(profile, step_model=model), seed=options.traffic.seed)
        try:
            return predictor.replay(trace, limits, plan).timelines
        except EngineError as error:
            raise ShadowError(
                f"the recording could not be replayed: {error.message}"
            ) from error

    return by_recording(profile, options.traffic.part_of(whole), limits, replay)
