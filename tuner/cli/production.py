"""`tune profile fit`: learn a profile from what production recorded of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.inputs import check_folder
from tuner.cli.options import Params, path_of
from tuner.engine.serve_config import read_config
from tuner.errors import EngineError, TooFewSamplesError, UsageError
from tuner.replay.plan import ReplayPlan
from tuner.run.options import TraceReading
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, write_profile
from tuner.shadow.recorded import (
    HOW,
    RecordedRequests,
    learn_profile,
    read_steps,
    steps_beside,
)
from tuner.shadow.served import off_recorded
from tuner.traffic.formats import ReadOptions
from tuner.traffic.traces import Aborted


@dataclass(frozen=True, slots=True)
class ProfileFitOptions:
    """Which recording teaches, and where the profile goes.

    `steps` are the files of steps, those beside the recording where none is named; `config` is
    the configuration that was served.

    Raises: UsageError if no recording is named, or the folder of the output is missing.
    """

    recordings: tuple[Path, ...]
    steps: tuple[Path, ...]
    config: Path | None
    output: Path
    as_json: bool

    def __post_init__(self) -> None:
        """Refuse what could not be written later."""
        if not self.recordings:
            raise UsageError("--recording is missing", HOW)
        check_folder(self.output)

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        return cls(
            recordings=tuple(map(Path, params["recording"])),
            steps=tuple(map(Path, params["steps"])),
            config=path_of(params["config"]),
            output=Path(params["output"]),
            as_json=params["as_json"],
        )


def run_profile_fit(options: ProfileFitOptions) -> int:
    """Learn the profile, hold it to the recording, write it and say so. Raises: TunerError."""
    paths = options.steps or steps_beside(options.recordings)
    recorded = read_steps(paths)
    requests = RecordedRequests.read(options.recordings)
    values = {} if options.config is None else read_config(options.config).values
    profile, learnt = learn_profile(recorded, requests, values)
    named = {"model": profile.shape.model}
    profile = replace(profile, serve_values={**named, **profile.serve_values})
    profile, off = _checked(profile, options)
    learnt = replace(learnt, off=off)
    write_profile(options.output, profile)
    limits = profile.current_limits
    head = (
        f"{profile.shape.model}, vLLM {profile.shape.vllm_version} on {profile.shape.device}, "
        f"served at {limits}"
    )
    content = {"limits": limits, "files": [str(path) for path in paths], **learnt.as_json()}
    show_result(content, [head, *learnt.lines()], as_json=options.as_json)
    say(f"written: {options.output}")
    return 0


def _checked(profile: Profile, options: ProfileFitOptions) -> tuple[Profile, dict[str, float]]:
    """Return the profile with its error on the recording itself, and that by metric.

    Both as they were where the recording holds too few requests to compare.
    """
    reading = TraceReading(rows=ReadOptions(aborted=Aborted.KEEP))
    trace, limits = reading.read(options.recordings), profile.current_limits
    try:
        lines = Predictor(profile).replay(trace, limits, ReplayPlan()).timelines
        off = off_recorded(trace, limits, lines)
    except (EngineError, TooFewSamplesError) as cause:
        say(f"the recording was not replayed on the profile: {cause}")
        return profile, {}
    wrong = max(abs(off["tpot p50"]), abs(off["e2e p50"]))
    return replace(profile, metric_error_ratio=wrong), off
