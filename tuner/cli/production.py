"""`tune profile`: a profile without a spare machine, of production or of published tables."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from tuner.cli.console import say, show_result
from tuner.cli.doctor import RELEASES, is_known
from tuner.cli.inputs import check_output
from tuner.cli.options import Params, path_of
from tuner.engine.serve_config import read_config
from tuner.errors import EngineError, TooFewSamplesError, TraceError, UsageError
from tuner.replay.plan import ReplayPlan
from tuner.run.options import TraceReading
from tuner.shadow.calibration import StatedError
from tuner.shadow.derived.derive import derive
from tuner.shadow.derived.gpus import gpu_of
from tuner.shadow.derived.wanted import Served, Wanted
from tuner.shadow.learnt import learn_profile
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, write_profile
from tuner.shadow.recorded import (
    HOW,
    RecordedRequests,
    parts_not_named,
    read_steps,
    steps_beside,
)
from tuner.shadow.served import off_recorded
from tuner.traffic.formats import ReadOptions
from tuner.traffic.traces import Aborted

_RELEASE: Final = re.compile(
    r"\d+(?:\.\d+)+(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?(?:\+[a-z0-9.]+)?"
)
"""What vLLM's builds are called. Source: PEP 440."""


def wanted_of(params: Params) -> Wanted:
    """Return for which model on which GPU a profile is derived. Raises: UsageError."""
    if not _RELEASE.fullmatch(params["vllm"]):
        raise UsageError(
            f"--vllm {params['vllm']} is no version of vLLM: expected numbers as in 0.32.0",
            "name the release whose scheduling is predicted, or leave it out",
        )
    if not is_known(params["vllm"]):
        raise UsageError(
            f"--vllm {params['vllm']}: the scheduling of 0.{RELEASES[0]} to "
            f"0.{RELEASES[-1]} is known",
            "name the nearest of them, or measure: tune on such a GPU",
        )
    config = path_of(params["config"])
    values = {} if config is None else read_config(config)
    model = params["model"] or values.get("model")
    for name, value in (("--gpu", params["gpu"]), ("--model", model)):
        if not value:
            raise UsageError(
                f"{name} is missing",
                "for example --gpu h200_sxm --model meta-llama/Meta-Llama-3.1-8B",
            )
    gpu, served = gpu_of(params["gpu"]), Served.of(values)
    return Wanted(
        gpu=gpu,
        model=str(model),
        tensor_parallel=params["tp"] or served.tensor_parallel,
        limits=gpu.limits(params["vllm"], *served.limits),
        max_model_len=served.max_model_len,
        memory_share=served.memory_share,
        vllm_version=params["vllm"],
        serve_values=values,
    )


def run_profile_derive(wanted: Wanted, output: Path, *, as_json: bool) -> int:
    """Derive the profile, write it and say what to expect of it. Raises: TunerError."""
    check_output(output)
    profile = derive(wanted)
    write_profile(output, profile)
    at = profile.current_limits
    gpus = f"{wanted.tensor_parallel} x {profile.shape.device}"
    tables, version = wanted.gpu.tables, profile.shape.vllm_version
    lines = [
        f"{profile.shape.model} on {gpus}, vLLM {version}, at {at}",
        f"{profile.origin}; expect {StatedError.of(profile).expected}",
        *(
            [f"the tables were measured in vLLM {tables}; {version} schedules this profile"]
            if tables != version
            else []
        ),
        f"{profile.num_blocks_at(at):,} KV-cache blocks of {profile.shape.block_size} tokens",
        *(f"warning: {warning}" for warning in profile.doubts),
    ]
    content = {
        "limits": at,
        "origin": profile.origin,
        "tables_of_vllm": tables,
        "num_blocks": profile.num_blocks_at(at),
        "fit_error_ratio": profile.fit.step_mape_ratio,
        "warnings": list(profile.doubts),
    }
    show_result(content, lines, as_json=as_json)
    say(f"written: {output}")
    return 0


def run_profile_fit(
    recordings: tuple[Path, ...],
    steps: tuple[Path, ...],
    config: Path | None,
    output: Path,
    *,
    as_json: bool,
) -> int:
    """Learn the profile, hold it to the recording, write it and say so.

    From files of `steps`, or those beside the recordings; `config` is what was served.
    Raises: TunerError.
    """
    if not recordings:
        raise UsageError("--recording is missing", HOW)
    check_output(output)
    paths = steps or _steps_beside(recordings)
    recorded = read_steps(paths)
    requests = RecordedRequests.read(recordings)
    values = {} if config is None else read_config(config)
    profile, learnt = learn_profile(recorded, requests, values)
    named = {"model": profile.shape.model, **profile.shape.parallel_values}
    profile = replace(profile, serve_values={**named, **profile.serve_values})
    # What was served with other limits before is not what the current ones are held to.
    since_s = max((float(one.ended_s[-1]) for one in recorded[:-1]), default=None)
    learnt = replace(learnt, off=_off(profile, recordings, since_s))
    profile = replace(profile, metric_error_ratio=learnt.wrong_ratio)
    write_profile(output, profile)
    at = profile.current_limits
    head = (
        f"{profile.shape.model}, vLLM {profile.shape.vllm_version} on {profile.shape.device}, "
        f"served at {at}"
    )
    error = StatedError.of(profile)
    content = {
        "limits": at,
        "files": [str(path) for path in paths],
        **learnt.as_json(),
        "error_ratio": error.wrong_ratio,
    }
    lines = [head, *learnt.lines(), f"predictions by it are {error.words()}"]
    show_result(content, lines, as_json=as_json)
    say(f"written: {output}")
    return 0


def _steps_beside(recordings: tuple[Path, ...]) -> list[Path]:
    """Return the files of steps beside the recordings, and say what of those is not named."""
    paths = steps_beside(recordings)
    if left := parts_not_named(recordings):
        names = ", ".join(path.name for path in left)
        say(
            f"left out {names}: the recording goes on there, and its steps are read; name them "
            "with --recording too, or their folder"
        )
    return paths


def _off(
    profile: Profile, recordings: tuple[Path, ...], since_s: float | None
) -> dict[str, float]:
    """Return how far the recording's replay on its profile is off it, by metric.

    Nothing where the recording holds too few requests to compare, or a file of it none at all.

    Units: since_s is when the server began that is current, in seconds since 1970.
    """
    reading = TraceReading(rows=ReadOptions(aborted=Aborted.KEEP))
    at = profile.current_limits
    try:
        trace = reading.read(recordings)
        if since_s is not None:
            trace = trace.between(since_s - trace.zero_s, math.inf)
        lines = Predictor(profile).replay(trace, at, ReplayPlan()).timelines
        return off_recorded(trace, at, lines)
    except (EngineError, TooFewSamplesError, TraceError) as cause:
        say(f"the recording was not replayed on the profile: {cause}")
        return {}
