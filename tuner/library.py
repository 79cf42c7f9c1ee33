"""What a Python program calls where the commands take options: thin, and typed.

Each function does what the command of the same purpose does, with the same numbers. The names
are exported by the package itself: `tuner.tune`, `tuner.read_trace` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuner.drift.baseline import read_baseline
from tuner.drift.check import Checked, check_traffic
from tuner.drift.retune import RetuneOptions
from tuner.emit.names import Format
from tuner.emit.registry import emit
from tuner.emit.sources import recommendation_of
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineSource
from tuner.engine.serve_config import read_config
from tuner.errors import UsageError
from tuner.files import log_folder
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.report.page import write_report
from tuner.run.inputs import ReplaySettings, configured_engine, engine_of_profile, fit_lengths
from tuner.run.listener import Listener
from tuner.run.options import TuningOptions
from tuner.run.result import RunResult
from tuner.run.start import PreparedRun
from tuner.run.variants import runs
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile
from tuner.traffic.formats import ReadOptions
from tuner.traffic.formats import read_traces as read_files
from tuner.traffic.resample import at_load
from tuner.traffic.sketch import sketch_of
from tuner.traffic.traces import TooLong, Trace


def read_trace(
    paths: str | Path | Sequence[str | Path],
    format: str | None = None,  # noqa: A002 - the user's own word, as in --trace-format
    rows: ReadOptions | None = None,
) -> Trace:
    """Return the recorded traffic in a file, a folder, or several of them together.

    `format` is one of those of traces/README.md, None for what the first bytes show. `rows`
    says what becomes of rows that can be read in more than one way. Files may be packed with
    gzip or zstd; "-" is standard input.

    Shapes: one row a request, in the order of arrival; `due_s`, `prompt_tokens` and
        `output_tokens` are [n].
    Units: seconds from the first arrival; tokens.
    Raises: TraceError if a file or a line of it is wrong; UsageError for an unknown format.
    """
    named = [paths] if isinstance(paths, (str, Path)) else paths
    return read_files(named, format, rows)


def replay_trace(
    trace: Trace,
    engine: EngineSource | Profile | str | Path | Mapping[str, object],
    limits: EngineLimits | None = None,
    plan: ReplayPlan | None = None,
    *,
    seed: int = 0,
) -> ReplayLog:
    """Replay a trace once and return every instant of it; `measure` makes figures of that.

    `engine` is a configuration of vLLM, as a file or as keys and values: then a live engine is
    measured. Or it is a profile: then its shadow predicts, and no engine is started. An
    EngineSource starts engines of another kind. It runs in a process of its own. `limits` are
    the engine's own unless given. Requests that exceed its max_model_len are refused.

    Units: seconds on the replay's clock, zero at the trace's own zero.
    Raises: UsageError for a configuration that vLLM refuses; ShadowError for a profile that
        does not fit here; EngineError when the engine fails; ReplayError when the replay itself
        is void.
    """
    wanted = plan or ReplaySettings().plan(trace)
    if isinstance(engine, Profile):
        return _predicted(engine, trace, limits, wanted, seed)
    source, values = _source_of(engine)
    with (
        log_folder("tune-replay-") as folder,
        EngineProcess(source, folder / "engine.log") as host,
    ):
        facts = host.facts(values)
        at = limits or facts.current_limits
        host.start(values, at)
        fitted, _ = fit_lengths(trace, facts.max_model_len, TooLong.REFUSE)
        host.load("trace", at_load(fitted, wanted.load) if wanted.load != 1 else fitted, seed)
        return host.replay("trace", at, wanted)


def _predicted(
    profile: Profile, trace: Trace, limits: EngineLimits | None, plan: ReplayPlan, seed: int
) -> ReplayLog:
    values = engine_of_profile(profile).values
    facts = ProfiledEngine(profile).facts(values)
    fitted, _ = fit_lengths(trace, facts.max_model_len, TooLong.REFUSE)
    return Predictor(profile, seed=seed).replay(fitted, limits or facts.current_limits, plan)


def _source_of(
    engine: EngineSource | str | Path | Mapping[str, object],
) -> tuple[EngineSource, dict[str, object]]:
    if isinstance(engine, (str, Path, Mapping)):
        return LiveSource(), configured_engine(engine, None, {}).values
    return engine, {}


def tune(
    options: TuningOptions | PreparedRun,
    listener: Listener | None = None,
    *,
    source: EngineSource | None = None,
) -> RunResult:
    """Find the limits that suit a trace best, as the command `tune` does, and return them.

    Everything that leads to the result is kept in the run directory as it is made: trials,
    profile, result and page; a run that Ctrl-C or an error has ended can be resumed there. Name
    it in the options, or learn it by `listener.result_written`. `listener` is told of each
    step. `source` starts engines of another kind than the installed vLLM.

    The engine runs in a process of its own, which imports the calling script anew if that
    defines the class of `source`: guard the call with `if __name__ == "__main__":` then.

    Raises: UsageError, TraceError, ShadowError or TooFewSamplesError for what cannot be used;
        EngineError when the engine fails; NoFeasibleConfigError when nothing meets the SLOs;
        KeyboardInterrupt.
    """
    return runs.tune(options, listener, source=source, write_page=write_report)


def render_config(
    result: RunResult,
    format: Format | str = Format.VLLM,  # noqa: A002 - the user's own word, as in --format
    config: str | Path | Mapping[str, object] | None = None,
    run_dir: str | Path | None = None,
) -> str:
    """Return the recommendation of a run as the file that a deployment takes.

    `format` is one of those of `tune emit`. A result holds no secrets: a configuration that
    has some is named again with `config`. `run_dir` is named in the file as its evidence, if
    it is given.

    Raises: UsageError if the format is unknown or cannot hold this, nothing met the SLOs, or
        its server would answer without the api-key that the configuration has.
    """
    try:
        chosen = Format(format)
    except ValueError:
        known = ", ".join(Format)
        raise UsageError(f"format must be one of {known}, got {format!r}") from None
    values: Mapping[str, object] = result.serve_values
    if config is not None:
        values = config if isinstance(config, Mapping) else read_config(Path(config))
    rec = recommendation_of(result, values, Path(run_dir or ""))
    if run_dir is None:
        facts = {name: fact for name, fact in rec.facts.items() if name != "run-id"}
        told = (line for line in rec.comments if not line.startswith("evidence: "))
        rec = replace(rec, facts=facts, comments=tuple(told))
    return emit(chosen, rec)


def check_drift(
    baseline: str | Path,
    trace: Trace,
    *,
    config: str | Path | Mapping[str, object] | None = None,
    profile: str | Path | None = None,
    options: RetuneOptions | None = None,
) -> Checked:
    """Return whether traffic has shifted since a run, and whether a re-tune would pay.

    `baseline` is a run directory or a profile's file. Its configuration is taken for the
    current one unless `config` names another, its profile for the engine's unless `profile`
    does. If something shifted that can be felt, its effect is predicted; no engine is
    started. `verdict` of what is returned is a DriftVerdict.

    Raises: UsageError if the baseline lacks what is needed; ShadowError if its profile does not
        fit here; TooFewSamplesError.
    """
    path, wanted = Path(baseline), options or RetuneOptions()
    stored = read_baseline(path, None if profile is None else Path(profile))
    sketches = stored.check_has_traffic(path), sketch_of(trace)
    current = None if config is not None else stored.current
    return check_traffic(trace, sketches, stored, current, config, wanted)
