"""One tuning run from options to a result, with everything that it leaves in its directory.

Answers what `tune` and the library's `tune` do alike: read the trace, start the engine, run the
session, and keep what came of it, also after Ctrl-C and after an error.

A script that calls it guards its own start with `if __name__ == "__main__":`, because the
engine runs in a process of its own, which imports the script anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from tuner.engine.demo import DEMO_MODEL_DIR, is_demo_model
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts, EngineSource
from tuner.engine.serve_config import hyphenated
from tuner.errors import (
    Caveat,
    EngineError,
    NoFeasibleConfigError,
    RefusedConfigError,
    TunerError,
    UsageError,
)
from tuner.redact import REDACTED, redacted
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.run.calibrate import Calibrator
from tuner.run.directory import PROFILE_FILE, RESULT_FILE, RUN_FILE, RunDir, new_run_path
from tuner.run.inputs import (
    DEMO_NOTE,
    EngineChoice,
    Traffic,
    check_model,
    configured_engine,
    engine_of_profile,
    fit_lengths,
    plan_for,
    traffic_of,
)
from tuner.run.listener import Listener, NullListener, clock_text
from tuner.run.options import TuningOptions
from tuner.run.recovery import open_journal
from tuner.run.result import RunProvenance, RunResult, make_outcome
from tuner.run.session import AnySession, Method, Session, ShadowSession
from tuner.run.shadow_search import ShadowSearch
from tuner.run.state import RunState
from tuner.search.budget import Aim, Budget, window_text
from tuner.search.objective import Scoring
from tuner.search.race import RaceDecision, RaceVerdict, ratio
from tuner.search.space import PAST_LADDER, SearchSpace, search_space
from tuner.search.trials import decisive, leader
from tuner.shadow.pool import ShadowPool, SpareProcesses, default_jobs, spare_cores
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.shadow.source import ShadowSource
from tuner.traffic.describe import describe
from tuner.traffic.formats import read_traces
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch
from tuner.traffic.traces import LoadModel, TooLong, Trace
from tuner.traffic.windows import Window

WritePage = Callable[[Path], None]
"""Writes the page of the run in a directory. Raises: UsageError."""

RUNS = Path("runs")
"""Where runs are kept that are given no directory, below the working directory."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Options whose files were read and found good, before any engine starts."""

    options: TuningOptions
    engine: EngineChoice
    traffic: Traffic
    run_path: Path
    profile: Profile | None
    jobs: int


def prepare(options: TuningOptions) -> PreparedRun:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    profile = _profile(options)
    engine = _engine(options, profile)
    traffic = traffic_of(
        read_traffic(options),
        options.load,
        options.window_choice,
        largest_cap=max(options.ladder) * PAST_LADDER,
    )
    plan_of(options, traffic.trace)
    return PreparedRun(
        options,
        engine,
        traffic,
        Path(options.run_dir) if options.run_dir else new_run_path(RUNS),
        profile,
        options.jobs or default_jobs(),
    )


def read_traffic(options: TuningOptions) -> Trace:
    """Return the trace that the options hold or name. Raises: TraceError, UsageError."""
    trace, reading = options.trace, options.reading
    if isinstance(trace, Trace):
        return trace
    return read_traces(
        [trace] if isinstance(trace, (str, Path)) else trace,
        reading.format,
        reading.rows,
        spread_seed=reading.rows.seed if reading.is_spread else None,
        sessions_over_s=reading.sessions_over_s,
    )


def plan_of(options: TuningOptions, trace: Trace) -> ReplayPlan:
    """Return how the trace is replayed. Raises: UsageError, TraceError."""
    return plan_for(
        trace,
        load_model=options.load_model,
        concurrency=options.concurrency,
        clock=options.clock,
        timeout_s=options.request_timeout_s,
        sessions=options.sessions,
    )


def _profile(options: TuningOptions) -> Profile | None:
    """Return the profile that is named, where one is wanted. Raises: UsageError."""
    named = options.profile
    if named is None or isinstance(named, Profile):
        return named
    if options.is_resumed and options.run_dir:
        kept = Path(options.run_dir) / PROFILE_FILE
        # The run has its own copy; what was named may be gone, or another by now.
        return read_profile(kept if kept.exists() else Path(named))
    return read_profile(Path(named))


def _engine(options: TuningOptions, profile: Profile | None) -> EngineChoice:
    """Return what is to be measured, the profile's own engine where none is named."""
    given = (options.config, options.model, options.engine_args)
    if profile is None:
        return configured_engine(*given)
    kept = engine_of_profile(profile, *given)
    if options.method is Method.SHADOW:
        return kept
    if is_demo_model(kept.values.get("model")):
        values = {**kept.values, "model": str(DEMO_MODEL_DIR)}
        return replace(kept, values=values, is_demo=True)
    check_model(kept.values)
    there = {hyphenated(key) for key in options.engine_args}
    hidden = [key for key, value in profile.serve_values.items() if REDACTED in str(value)]
    missing = [key for key in hidden if options.config is None and hyphenated(key) not in there]
    if missing:
        raise UsageError(
            f"the profile keeps no secrets, so these are missing: {', '.join(missing)}",
            "give them again with --engine-arg, or the whole configuration with --config",
        )
    return kept


_TOO_LONG_CAVEATS = {
    TooLong.REFUSE: Caveat.REQUESTS_REFUSED,
    TooLong.CLIP: Caveat.REQUESTS_CLIPPED,
}


def run_record(
    prepared: PreparedRun,
    study: str,
    windows: tuple[Window, ...],
    ceiling: EngineLimits,
    parts: tuple[Window, ...] = (),
) -> dict[str, Any]:
    """Return what `--resume` and workers need, without secrets."""
    return {
        "study": study,
        "arguments": list(prepared.options.arguments),
        "trace_sha256": prepared.traffic.trace.sha256,
        "config_sha256": prepared.engine.config_sha256,
        "windows": [{"start_s": w.start_s, "end_s": w.end_s} for w in windows],
        "ceiling": {
            "max_num_seqs": ceiling.max_num_seqs,
            "max_num_batched_tokens": ceiling.max_num_batched_tokens,
        },
        "forecast_parts": [{"start_s": w.start_s, "end_s": w.end_s} for w in parts],
    }


class _Run:
    """Runs the session and keeps whatever comes of it."""

    def __init__(
        self,
        prepared: PreparedRun,
        session: AnySession,
        told: str,
        write_page: WritePage | None,
    ) -> None:
        self._prepared, self._session, self._write_page = prepared, session, write_page
        self._run = session.run_state
        too_long = prepared.options.too_long
        if told and too_long in _TOO_LONG_CAVEATS:
            self._run.caveats.add(_TOO_LONG_CAVEATS[too_long])
        self._parts: tuple[Window, ...] = ()
        self._began_s = time.monotonic()

    def to_the_end(self) -> RunResult:
        """Run to the end, or to Ctrl-C, and write what there is."""
        run = self._run
        run.on_windows = self._keep_windows
        run.on_forecast = self._keep_parts
        try:
            decision = self._session.run()
        except KeyboardInterrupt:
            self._interrupted()
            raise
        except BaseException:
            self._write(self._best_so_far(), "failed")
            raise
        finally:
            self._session.close()
        result = self._write(decision, "complete")
        if result is None or not result.feasible:
            raise self._nothing_feasible()
        return result

    def _keep_windows(self, windows: tuple[Window, ...]) -> None:
        """Put the choice on disk, so that a resumed run replays the same."""
        self._keep(windows)
        self._run.listener.note(f"replaying {window_text(windows, self._run.trace)}")

    def _keep_parts(self, parts: tuple[Window, ...], generation: int) -> None:
        """Put on disk what the shadow replays, so that workers replay the same."""
        self._parts = parts
        self._keep(self._run.windows)
        if generation == 0:
            self._run.listener.note(f"the shadow replays {window_text(parts, self._run.trace)}")

    def _keep(self, windows: tuple[Window, ...]) -> None:
        run = self._run
        study, ceiling = run.journal.study_name, run.space.ceiling
        record = run_record(self._prepared, study, windows, ceiling, self._parts)
        run.run_dir.write_json(RUN_FILE, record)

    def _best_so_far(self) -> RaceDecision:
        """Return the leader of an unfinished search, which nothing has confirmed."""
        run = self._run
        best = leader([t.observation for t in decisive(run.journal.records())])
        limits = best.limits if best else run.space.present
        kind = RaceVerdict.KEEP if limits == run.space.present else RaceVerdict.CHANGE
        runs = run.journal.race_runs()
        gain = ratio(runs, limits, run.space.present)
        return RaceDecision(kind, limits, limits, (), gain, 0, "unfinished")

    def _interrupted(self) -> None:
        if not self._run.journal.observations():
            self._run.listener.note("interrupted before anything was measured")
            return
        self._write(self._best_so_far(), "interrupted")

    def _write(self, decision: RaceDecision, state: str) -> RunResult | None:
        """Write result.json; None when nothing was measured yet."""
        run, prepared = self._run, self._prepared
        records = run.journal.records()
        windows = run.windows or self._parts
        if not decisive(records) or not windows:
            return None
        goal = run.goal if run.is_planned else Scoring(run.aim.objective, run.aim.slos, "p50")
        around = RunProvenance(
            trace=run.trace,
            replayed_requests=sum(len(w.of(run.trace)) for w in windows),
            window=window_text(windows, run.trace),
            info=run.bench.info,
            cold_blocks=run.bench.cold_blocks,
            ladder=run.space.caps(),
            present_source="configuration"
            if prepared.engine.names_limits
            else "vLLM's default",
            model=prepared.engine.model,
            options={"arguments": list(prepared.options.arguments)},
            engine_starts=run.bench.starts,
            wall_s=time.monotonic() - self._began_s,
            method=str(prepared.options.method),
            walls_s=run.walls_s,
            serve_values=redacted(prepared.engine.deployed_values),
            description=describe(run.trace).as_json(),
            **self._session.findings(),
        )
        doubts = self._session.doubts(decision)
        outcome = make_outcome(
            decision, run.space.present, goal, records, doubts, around, state
        )
        run.run_dir.write_json(RESULT_FILE, outcome)
        write_sketch(run.run_dir.path / TRAFFIC_FILE, sketch_of(prepared.traffic.trace))
        self._write_the_page()
        run.listener.result_written(outcome, run.run_dir.path)
        return outcome

    def _write_the_page(self) -> None:
        """Write the run's page; without it the run is no less good."""
        if self._write_page is None:
            return
        try:
            self._write_page(self._run.run_dir.path)
        except UsageError as error:
            self._run.listener.note(f"no report: {error.message}")

    def _nothing_feasible(self) -> NoFeasibleConfigError:
        run = self._run
        records = decisive(run.journal.records())
        best = leader([t.observation for t in records])
        if best is None:
            return NoFeasibleConfigError(
                "no configuration survived its replay",
                f"see the causes in {run.run_dir.path / 'trials.jsonl'}",
            )
        trial = next(t for t in records if t.number == best.number)
        broken = run.goal.broken_in(trial.measurement or {})
        return NoFeasibleConfigError(
            f"no configuration meets the SLOs; nearest is {best.limits} "
            f"(max_num_seqs/max_num_batched_tokens): {'; '.join(broken)}",
            f"relax an SLO, lower --load, or add replicas; all trials are in "
            f"{run.run_dir.path}",
        )


# How many processes import vLLM beside a live engine's start: ours. Each holds 0.7 GB, a few
# replay most traces in seconds, and long work starts more of them.
MAX_SPARES = 4


def tune(
    options: TuningOptions | PreparedRun,
    listener: Listener | None = None,
    *,
    source: EngineSource | None = None,
    spares: SpareProcesses | None = None,
    write_page: WritePage | None = None,
) -> RunResult:
    """Run to the end and return what came of it; everything is in the run directory by then.

    Where the engines come from and who else can be a shadow is the installed vLLM's matter
    unless given. `write_page` writes the run's page beside its result.

    Raises: UsageError, TraceError, ShadowError or TooFewSamplesError for what cannot be used;
        EngineError when the engine fails; NoFeasibleConfigError when nothing meets the SLOs;
        KeyboardInterrupt. What was measured by then is kept with the best so far, and can be
        resumed.
    """
    listener = listener or NullListener()
    prepared = options if isinstance(options, PreparedRun) else prepare(options)
    for line in prepared.traffic.lines:
        listener.note(line)
    if prepared.engine.is_demo and prepared.options.method is not Method.SHADOW:
        listener.note(DEMO_NOTE)
    run_dir = RunDir(prepared.run_path, resume=prepared.options.is_resumed)
    try:
        with (
            EngineProcess(source or _source_of(prepared), run_dir.engine_log) as host,
            closing(spares or SpareProcesses(_helpers(prepared), run_dir.shadow_log)) as others,
        ):
            run = _begun(prepared, run_dir, host, others, listener, write_page)
            return run.to_the_end()
    except (EngineError, RefusedConfigError):
        raise  # what the engine said is in the directory
    except (TunerError, KeyboardInterrupt):
        run_dir.discard()
        raise
    finally:
        run_dir.close()


def _source_of(prepared: PreparedRun) -> EngineSource:
    options = prepared.options
    if options.method is Method.SHADOW and prepared.profile is not None:
        return ShadowSource(prepared.profile, is_forced=options.is_forced)
    return LiveSource()


def _helpers(prepared: PreparedRun) -> int:
    """Return how many processes will be shadows beside the engine's own, or as one more."""
    if prepared.options.method is Method.LIVE:
        return 0
    if prepared.options.method is Method.SHADOW:
        return prepared.jobs - 1
    return min(prepared.jobs, spare_cores(), MAX_SPARES)


def _begun(
    prepared: PreparedRun,
    run_dir: RunDir,
    host: EngineProcess,
    spares: SpareProcesses,
    listener: Listener,
    write_page: WritePage | None,
) -> _Run:
    """Return the run, ready to go. Raises: TunerError."""
    options = prepared.options
    stored = run_dir.read_json(RUN_FILE) if options.is_resumed else {}
    _check_same(prepared, stored)
    facts = host.facts(prepared.engine.values)
    trace, told = fit_lengths(prepared.traffic.trace, facts.max_model_len, options.too_long)
    if told:
        listener.note(told)
    run = _run_state(prepared, run_dir, host, facts, trace, stored, listener)
    if prepared.profile is not None:
        _take_profile(prepared, prepared.profile, run, facts)
    if not options.is_resumed:
        record = run_record(prepared, run.journal.study_name, (), run.space.ceiling)
        run_dir.write_json(RUN_FILE, record)
    return _Run(prepared, _session(prepared, run, spares), told, write_page)


def _take_profile(
    prepared: PreparedRun, profile: Profile, run: RunState, facts: EngineFacts
) -> None:
    """Keep the profile that was given, if it speaks for this engine. Raises: ShadowError."""
    if prepared.options.is_forced:
        run.caveats.add(Caveat.PROFILE_FORCED)
    else:
        ShadowSource(profile).check(prepared.engine.values, facts.vllm_version, facts.device)
    if not prepared.options.is_resumed:
        write_profile(run.run_dir.path / PROFILE_FILE, profile)


def _session(prepared: PreparedRun, run: RunState, spares: SpareProcesses) -> AnySession:
    """Return the kind of run that was asked for."""

    def make_shadows(profile: Profile) -> ShadowPool:
        return ShadowPool(
            profile,
            run.space.ceiling,
            prepared.jobs,
            run.run_dir.shadow_log,
            prepared.options.seed,
            is_forced=prepared.options.is_forced,
            spares=spares,
        )

    if prepared.options.method is Method.SHADOW and prepared.profile is not None:
        shadows = make_shadows(prepared.profile)
        shadows.adopt(run.bench)
        return ShadowSession(run, shadows, is_forced=prepared.options.is_forced)
    shadow = ShadowSearch(
        run, make_shadows, Calibrator(run, redacted(prepared.engine.values)), spares
    )
    return Session(run, shadow, is_live=prepared.options.method is Method.LIVE)


def _run_state(
    prepared: PreparedRun,
    run_dir: RunDir,
    host: EngineProcess,
    facts: EngineFacts,
    trace: Trace,
    stored: Mapping[str, Any],
    listener: Listener,
) -> RunState:
    options = prepared.options
    space = search_space(facts, trace, tuple(options.ladder), facts.present_limits)
    aim = aim_of(options, trace)
    kept = tuple(Window(w["start_s"], w["end_s"]) for w in stored.get("windows", ()))
    # Storage may be shared, and another run may have a directory of the same name.
    study = stored.get("study") or f"tune {prepared.run_path.name} {uuid4().hex[:8]}"
    storage = options.storage or run_dir.storage_url
    journal, restored = open_journal(
        storage, study, run_dir, aim.slos, is_resumed=options.is_resumed
    )
    for line in restored:
        listener.note(line)
    for trial in journal.records():
        listener.trial_recalled(trial)
    bench = EngineRunner(host, prepared.engine.values, space.ceiling, options.seed)
    _tell_plan(prepared, facts, space, listener)
    run = RunState(trace, space, aim, bench, journal, run_dir, listener, windows=kept)
    run.caveats |= prepared.traffic.caveats & {Caveat.UNIFORM_TRACE, Caveat.QUANTISED_CLOCK}
    if prepared.engine.is_demo and options.method is not Method.SHADOW:
        run.caveats.add(Caveat.DEMO_MODEL)
    if aim.plan.load_model is LoadModel.CLOSED:
        run.caveats.add(Caveat.CLOSED_LOOP)
    return run


def aim_of(options: TuningOptions, trace: Trace) -> Aim:
    """Return what the run is after on this trace. Raises: UsageError, TraceError."""
    chosen = options.window_choice
    return Aim(
        options.objective,
        tuple(options.slos),
        plan_of(options, trace),
        Budget(options.budget_s),
        None if chosen is None else chosen.resolve(trace),
    )


def _tell_plan(
    prepared: PreparedRun, facts: EngineFacts, space: SearchSpace, listener: Listener
) -> None:
    """Say what will be done, and for how long at most."""
    origin = "the configuration" if prepared.engine.names_limits else "vLLM's default here"
    listener.note(
        f"present configuration {facts.present_limits} (max_num_seqs/max_num_batched_tokens), "
        f"from {origin}; "
        f"vLLM {facts.vllm_version} on {facts.device}"
    )
    caps = ", ".join(map(str, space.ladder))
    learnt = "a few settings live, " if prepared.profile is None else ""
    how = {
        Method.AUTO: f"{learnt}all of them in the shadow, the best live",
        Method.LIVE: "every setting live, on one engine start",
        Method.SHADOW: "in the shadow alone",
    }[prepared.options.method]
    listener.note(
        f"plan: caps {caps} and past the edge while it wins, token budgets "
        f"{', '.join(map(str, space.budgets))}; {how}; at most "
        f"{clock_text(prepared.options.budget_s)}; everything goes to {prepared.run_path}"
    )


def _check_same(prepared: PreparedRun, stored: Mapping[str, Any]) -> None:
    """Refuse to resume on another trace or another configuration."""
    if not stored:
        return
    for name, now in (
        ("trace_sha256", prepared.traffic.trace.sha256),
        ("config_sha256", prepared.engine.config_sha256),
    ):
        if stored[name] != now:
            what = name.removesuffix("_sha256")
            raise UsageError(
                f"the {what} is not the one that {prepared.run_path} was begun with",
                "resume with the same files, or start a new run",
            )
