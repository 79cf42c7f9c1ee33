"""One tuning run from options to a result, with everything that it leaves in its directory.

Answers what `tune` and the library's `tune` do alike: read the trace, start the engine, run the
session, and keep what came of it, also after Ctrl-C and after an error.

A script that calls it guards its own start with `if __name__ == "__main__":`, because the
engine runs in a process of its own, which imports the script anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import msgspec

from tuner.engine.demo import DEMO_MODEL_DIR, is_demo_model
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts, EngineInfo, EngineSource
from tuner.engine.serve_config import changed, hyphenated
from tuner.errors import (
    Caveat,
    EngineError,
    NoFeasibleConfigError,
    RefusedConfigError,
    StorageError,
    TunerError,
    UsageError,
)
from tuner.redact import REDACTED, redacted, redacted_text
from tuner.replay.plan import doubts
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.run.context import RunContext, Stopwatch
from tuner.run.directory import PROFILE_FILE, RESULT_FILE, RunDir, new_run_path
from tuner.run.inputs import (
    DEMO_NOTE,
    EngineChoice,
    Traffic,
    check_model,
    configured_engine,
    engine_of_profile,
    fit_lengths,
    traffic_of,
)
from tuner.run.journal import open_journal
from tuner.run.knobs.known import check_has
from tuner.run.listener import Listener, clock_text
from tuner.run.options import STARTING_POINTS, Method, TuningOptions
from tuner.run.result import RunProvenance, RunResult, make_outcome
from tuner.run.session import AnySession, Session
from tuner.run.shadow_session import RunFindings, ShadowSession
from tuner.run.stored import RunRecord, StoredOptions, read_record
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import Aim, Budget, window_text
from tuner.search.objective import Scoring
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.space import PAST_LADDER, SearchSpace, search_space
from tuner.search.trials import decisive, leader
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.traffic.describe import describe
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch
from tuner.traffic.traces import LoadModel, TooLong, Trace
from tuner.traffic.windows import Window

WritePage = Callable[[Path], None]
"""Writes the page of the run in a directory. Raises: UsageError."""

RUNS = Path("runs")
"""Where runs are kept that are given no directory, below the working directory."""

# What meets the SLOs at least so probably may yet turn out to: ours.
MAYBE_MEETS = 0.1


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Options whose files were read and found good, before any engine starts.

    `budget_share` is how much of its time this run may take, where others follow. `windows` are
    those to replay where nothing can be predicted, chosen by the run that it is compared with.
    """

    options: TuningOptions
    engine: EngineChoice
    traffic: Traffic
    run_path: Path
    profile: Profile | None
    budget_share: float = 1.0
    windows: tuple[Window, ...] = ()

    @property
    def budget_s(self) -> float:
        """How long this run may take, in seconds."""
        return self.options.budget_s * self.budget_share


def prepare(options: TuningOptions) -> PreparedRun:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    profile = _profile(options)
    engine = _started_from(options, _engine(options, profile), profile)
    traffic = traffic_of(
        read_traffic(options),
        options.load,
        options.window_choice,
        largest_cap=max(options.ladder) * PAST_LADDER,
    )
    options.plan(traffic.trace)
    return PreparedRun(
        options,
        engine,
        traffic,
        Path(options.run_dir) if options.run_dir else new_run_path(RUNS),
        profile,
    )


def _started_from(
    options: TuningOptions, engine: EngineChoice, profile: Profile | None
) -> EngineChoice:
    """Return the configuration with the limits of the starting point, if one is named.

    A profile speaks for the memory that it was made with, which then stays.
    """
    if options.start is None:
        return engine
    point = STARTING_POINTS[options.start].values(with_memory=profile is None)
    return replace(engine, values=changed(engine.values, point), names_limits=True)


def read_traffic(options: TuningOptions) -> Trace:
    """Return the trace that the options hold or name. Raises: TraceError, UsageError."""
    trace = options.trace
    if isinstance(trace, Trace):
        return trace
    return options.reading.read([trace] if isinstance(trace, (str, Path)) else trace)


def _profile(options: TuningOptions) -> Profile | None:
    """Return the profile that is named, where one is wanted. Raises: UsageError."""
    named = options.profile
    if named is None or isinstance(named, Profile):
        return named
    if options.is_resumed and options.run_dir:
        copy = Path(options.run_dir) / PROFILE_FILE
        # The run has its own copy; what was named may be gone, or another by now.
        return read_profile(copy if copy.exists() else Path(named))
    return read_profile(Path(named))


def _engine(options: TuningOptions, profile: Profile | None) -> EngineChoice:
    """Return what is to be measured, the profile's own engine where none is named."""
    given = (options.config, options.model, options.engine_args)
    if profile is None:
        return configured_engine(*given)
    engine = engine_of_profile(profile, *given)
    if options.method is Method.SHADOW:
        return engine
    if is_demo_model(engine.values.get("model")):
        values = {**engine.values, "model": str(DEMO_MODEL_DIR)}
        return replace(engine, values=values, is_demo=True)
    check_model(engine.values)
    there = {hyphenated(key) for key in options.engine_args}
    hidden = [key for key, value in profile.serve_values.items() if REDACTED in str(value)]
    missing = [key for key in hidden if options.config is None and hyphenated(key) not in there]
    if missing:
        raise UsageError(
            f"the profile keeps no secrets, so these are missing: {', '.join(missing)}",
            "give them again with --engine-arg, or the whole configuration with --config",
        )
    return engine


_TOO_LONG_CAVEATS = {
    TooLong.REFUSE: Caveat.REQUESTS_REFUSED,
    TooLong.CLIP: Caveat.REQUESTS_CLIPPED,
}


def run_record(
    prepared: PreparedRun, study: str, ceiling: EngineLimits, facts: EngineFacts
) -> RunRecord:
    """Return what the run is begun with."""
    return RunRecord(
        study=study,
        options=StoredOptions.of(prepared.options),
        trace_sha256=prepared.traffic.trace.sha256,
        config_sha256=prepared.engine.config_sha256,
        ceiling=ceiling,
        vllm_version=facts.vllm_version,
        device=facts.device,
    )


class _Run:
    """Runs the session and keeps whatever comes of it."""

    def __init__(
        self,
        prepared: PreparedRun,
        session: AnySession,
        message: str,
        write_page: WritePage | None,
    ) -> None:
        self._prepared, self._session, self._write_page = prepared, session, write_page
        too_long = prepared.options.too_long
        if message and too_long in _TOO_LONG_CAVEATS:
            self._context.caveats.add(_TOO_LONG_CAVEATS[too_long])
        self._began_s = time.monotonic()

    @property
    def _context(self) -> RunContext:
        return self._session.context

    def to_the_end(self) -> RunResult:
        """Run to the end, or to Ctrl-C, and write what there is."""
        try:
            decision = self._session.run()
        except KeyboardInterrupt:
            self._interrupted()
            raise
        except StorageError:
            raise  # nothing can be told of the trials; what was measured is on disk
        except BaseException:
            self._write(self._best_so_far(), "failed")
            raise
        result = self._write(decision, "complete")
        if result is None or not result.feasible:
            raise self._nothing_feasible(decision)
        return result

    def _best_so_far(self) -> RaceDecision:
        """Return the leader of an unfinished search, which nothing has confirmed."""
        context = self._context
        best = leader([t.observation for t in decisive(context.journal.records())])
        limits = best.limits if best else context.space.current
        kind = RaceVerdict.KEEP if limits == context.space.current else RaceVerdict.CHANGE
        return RaceDecision(kind, limits, limits, (), None, 0, "unfinished")

    def _interrupted(self) -> None:
        if not self._context.journal.observations():
            self._context.listener.note("interrupted before anything was measured")
            return
        self._write(self._best_so_far(), "interrupted")

    def _write(self, decision: RaceDecision, state: str) -> RunResult | None:
        """Write result.json; None when nothing was measured yet."""
        context, found = self._context, self._session.findings()
        records, aim = context.journal.records(), context.aim
        if not decisive(records) or not found.windows:
            return None
        scoring = found.scoring or Scoring(aim.objective, aim.slos, "p50")
        caveats = self._session.caveats(decision)
        around = self._provenance(found)
        outcome = make_outcome(
            decision, context.space.current, scoring, records, caveats, around, state
        )
        context.run_dir.write_json(RESULT_FILE, outcome)
        trace = self._prepared.traffic.trace
        write_sketch(context.run_dir.path / TRAFFIC_FILE, sketch_of(trace))
        write_the_page(self._write_page, context.run_dir.path, context.listener)
        context.listener.result_written(outcome, context.run_dir.path)
        return outcome

    def _provenance(self, found: RunFindings) -> RunProvenance:
        """Return what surrounds the decision."""
        context, prepared = self._context, self._prepared
        return RunProvenance(
            trace=context.trace,
            replayed_requests=sum(len(w.of(context.trace)) for w in found.windows),
            window=window_text(found.windows, context.trace),
            info=found.info,
            cold_blocks=found.cold_blocks,
            ladder=context.space.caps(),
            current_source=_origin(prepared),
            model=redacted_text(prepared.engine.model),
            options=msgspec.to_builtins(StoredOptions.of(prepared.options)),
            engine_starts=found.engine_starts,
            wall_s=time.monotonic() - self._began_s,
            method=str(prepared.options.method),
            walls_s=context.stopwatch.stages_s,
            serve_values=redacted(prepared.engine.deployed_values),
            description=describe(context.trace).as_json(),
            cold=found.cold,
            capacity=found.capacity,
            profile=found.profile,
            compared=found.compared,
            predicted=found.predicted,
            knobs=found.knobs,
            starting_points=found.starting_points,
            clients=found.clients,
        )

    def _nothing_feasible(self, decision: RaceDecision) -> NoFeasibleConfigError:
        """Say who is nearest to the SLOs, how probably it meets them, and what it breaks."""
        context = self._context
        records = decisive(context.journal.records())
        best = leader([t.observation for t in records])
        if best is None:
            return NoFeasibleConfigError(
                "no configuration survived its replay",
                f"see the causes in {context.run_dir.path / 'trials.jsonl'}",
            )
        nearest, p_slo = best.limits, None
        if decision.odds is not None and decision.odds.p_slo is not None:
            nearest, p_slo = decision.best, decision.odds.p_slo
        own = [t for t in records if t.limits == nearest]
        trial = own[-1] if own else next(t for t in records if t.number == best.number)
        scoring = Scoring(context.aim.objective, context.aim.slos, "p50")
        said = [] if p_slo is None else [f"meets them with probability {p_slo:.2f}"]
        said += scoring.broken_in(trial.measurement or {}) if own else []
        hint = "relax an SLO, lower --load, or add replicas"
        if p_slo is not None and p_slo >= MAYBE_MEETS:
            hint += "; it may meet them yet, which a longer --budget would tell"
        return NoFeasibleConfigError(
            f"no configuration is likely to meet the SLOs; nearest is {nearest} "
            f"(max_num_seqs/max_num_batched_tokens): {'; '.join(said)}",
            f"{hint}; all trials are in {context.run_dir.path}",
        )


def write_the_page(write_page: WritePage | None, path: Path, listener: Listener) -> None:
    """Write a run's page, if somebody can; without it the run is no less good."""
    if write_page is None:
        return
    try:
        write_page(path)
    except UsageError as error:
        listener.note(f"no report: {error.message}")


def tune(
    options: TuningOptions | PreparedRun,
    listener: Listener | None = None,
    *,
    source: EngineSource | None = None,
    predictor_of: Callable[[Profile], Predictor] | None = None,
    write_page: WritePage | None = None,
    run_dir: RunDir | None = None,
) -> RunResult:
    """Run to the end and return what came of it; everything is in the run directory by then.

    Of the configuration as it is: variants are left to `tuner.run.variants.runs`. Where the
    engines come from, and what predicts, is the installed vLLM's matter unless given.
    `write_page` writes the run's page beside its result. `run_dir` is the run's directory where
    the caller holds it open.

    Raises: UsageError, TraceError, ShadowError or TooFewSamplesError for what cannot be used;
        EngineError when the engine fails; NoFeasibleConfigError when nothing meets the SLOs;
        KeyboardInterrupt. What was measured by then is kept with the best so far, and can be
        resumed.
    """
    listener = listener or Listener()
    prepared = options if isinstance(options, PreparedRun) else prepare(options)
    for line in prepared.traffic.lines:
        listener.note(line)
    if prepared.engine.is_demo and prepared.options.method is not Method.SHADOW:
        listener.note(DEMO_NOTE)
    held_dir = run_dir or RunDir(prepared.run_path, resume=prepared.options.is_resumed)
    try:
        stored = read_record(held_dir.path) if prepared.options.is_resumed else None
        if stored is not None:
            check_same(prepared, stored)
        start = _Start(prepared, held_dir, stored, listener, predictor_of)
        with ExitStack() as held:
            if prepared.options.method is Method.SHADOW and prepared.profile is not None:
                session, message = start.predicted(prepared.profile)
            else:
                log, asked = held_dir.engine_log, prepared.options
                live = source or LiveSource(asked.is_greedy)
                host = held.enter_context(EngineProcess(live, log, asked.start_timeout_s))
                session, message = start.live(host)
            return _Run(prepared, session, message, write_page).to_the_end()
    except (EngineError, RefusedConfigError):
        raise  # what the engine said is in the directory
    except (TunerError, KeyboardInterrupt):
        held_dir.discard()
        raise
    finally:
        if run_dir is None:
            held_dir.close()


@dataclass(frozen=True, slots=True)
class _Start:
    """What a session is made of, whatever its method."""

    prepared: PreparedRun
    run_dir: RunDir
    stored: RunRecord | None
    listener: Listener
    predictor_of: Callable[[Profile], Predictor] | None

    def predicted(self, profile: Profile) -> tuple[AnySession, str]:
        """Return a run on predictions alone, and what is said of the trace.

        Raises: ShadowError if the profile was made elsewhere; UsageError.
        """
        options = self.prepared.options
        source = ProfiledEngine(profile, is_forced=options.is_forced)
        facts = source.facts(self.prepared.engine.values)
        check_has(options.knobs, facts.vllm_version)
        context, message = self._context(facts)
        predictor = self._predictor(profile, context.space.ceiling).as_deployed()
        return ShadowSession(context, predictor, is_forced=options.is_forced), message

    def live(self, host: EngineProcess) -> tuple[AnySession, str]:
        """Return a run on a live engine, and what is said of the trace. Raises: TunerError."""
        prepared, options = self.prepared, self.prepared.options
        facts = host.facts(prepared.engine.values)
        check_has(options.knobs, facts.vllm_version)
        self._check_variants(host, facts)
        context, message = self._context(facts)
        engine = EngineRunner(
            host,
            prepared.engine.values,
            context.space.ceiling,
            options.seed,
            self.listener.note,
        )
        session = Session(
            TrialRunner(context, engine),
            redacted(prepared.engine.values),
            lambda profile: self._predictor(profile, engine.ceiling, engine.info),
            options.method,
            chosen=self.stored.windows if self.stored else prepared.windows,
        )
        return session, message

    def _check_variants(self, host: EngineProcess, facts: EngineFacts) -> None:
        """Refuse what no vLLM would take, and other requests, before anything is measured.

        A variant that this vLLM refuses on this device may be one that does not run.

        Raises: UsageError.
        """
        for name, values in self.prepared.options.variants.items():
            try:
                found = host.facts(changed(self.prepared.engine.values, values))
            except RefusedConfigError:
                continue
            except UsageError as error:
                raise UsageError(f"variant {name}: {error.message}", error.hint) from error
            if found.max_model_len != facts.max_model_len:
                raise UsageError(
                    f"variant {name} takes requests of {found.max_model_len} tokens, the "
                    f"configuration as it is of {facts.max_model_len}",
                    "set max-model-len in the configuration to what both can take",
                )

    def _predictor(
        self, profile: Profile, ceiling: EngineLimits, info: EngineInfo | None = None
    ) -> Predictor:
        if self.predictor_of is not None:
            return self.predictor_of(profile)
        has_own_graphs = info is None or info.has_own_graphs
        return Predictor(profile, ceiling, self.prepared.options.seed, has_own_graphs)

    def _context(self, facts: EngineFacts) -> tuple[RunContext, str]:
        """Return what the run's stages are given. Raises: TunerError."""
        prepared, options, listener = self.prepared, self.prepared.options, self.listener
        trace, message = fit_lengths(
            prepared.traffic.trace, facts.max_model_len, options.too_long
        )
        if message:
            listener.note(message)
        space = search_space(facts, trace, tuple(options.ladder), facts.current_limits)
        aim, budget = aim_of(options, trace), Budget(prepared.budget_s)
        # Storage may be shared, and another run may have a directory of the same name.
        new_study = f"tune {prepared.run_path.name} {uuid4().hex[:8]}"
        study = self.stored.study if self.stored else new_study
        storage = options.storage or self.run_dir.storage_url
        journal, restored = open_journal(
            storage, study, self.run_dir, aim.slos, listener.note, is_resumed=options.is_resumed
        )
        for line in restored:
            listener.note(line)
        for trial in journal.records():
            listener.trial_recalled(trial)
        _tell_plan(prepared, facts, space, listener)
        context = RunContext(
            trace,
            space,
            aim,
            budget,
            Stopwatch(budget.total_s),
            journal,
            self.run_dir,
            listener,
            run_record(prepared, journal.study_name, space.ceiling, facts),
            is_shared=options.storage is not None and options.method is not Method.SHADOW,
            caveats=_first_caveats(prepared, aim, facts),
        )
        if prepared.profile is not None:
            _take_profile(prepared, prepared.profile, context, facts)
        return self._begun(context), message

    def _begun(self, context: RunContext) -> RunContext:
        """Put a new run on disk; one that goes on starts no higher than it did."""
        if self.stored is None:
            context.keep_windows()
        elif self.stored.ceiling != context.space.ceiling:
            return context.below(self.stored.ceiling)
        return context


def _first_caveats(prepared: PreparedRun, aim: Aim, facts: EngineFacts) -> set[Caveat]:
    """Return what is doubtful before anything is replayed."""
    found = {Caveat.UNIFORM_TRACE, Caveat.QUANTISED_CLOCK} & prepared.traffic.caveats
    found |= doubts(facts, aim.plan)
    if prepared.engine.is_demo and prepared.options.method is not Method.SHADOW:
        found.add(Caveat.DEMO_MODEL)
    if aim.plan.load_model is LoadModel.CLOSED:
        found.add(Caveat.CLOSED_LOOP)
    return found


def _take_profile(
    prepared: PreparedRun, profile: Profile, context: RunContext, facts: EngineFacts
) -> None:
    """Keep the profile that was given, if it speaks for this engine. Raises: ShadowError."""
    if prepared.options.is_forced:
        context.caveats.add(Caveat.PROFILE_FORCED)
    else:
        ProfiledEngine(profile).check(prepared.engine.values, facts.vllm_version, facts.device)
    if not prepared.options.is_resumed:
        write_profile(context.run_dir.path / PROFILE_FILE, profile)


def aim_of(options: TuningOptions, trace: Trace) -> Aim:
    """Return what the run is after on this trace. Raises: UsageError, TraceError."""
    chosen = options.window_choice
    return Aim(
        options.objective,
        tuple(options.slos),
        options.plan(trace),
        None if chosen is None else chosen.resolve(trace),
        options.confidence,
    )


def _origin(prepared: PreparedRun) -> str:
    """Return who had set the current limits."""
    if prepared.options.start is not None:
        return f"starting point {prepared.options.start}"
    return "configuration" if prepared.engine.names_limits else "vLLM's default"


def _tell_plan(
    prepared: PreparedRun, facts: EngineFacts, space: SearchSpace, listener: Listener
) -> None:
    """Say what will be done, and for how long at most."""
    listener.current_known(facts.current_limits)
    listener.note(
        f"current configuration {facts.current_limits} (max_num_seqs/max_num_batched_tokens), "
        f"from {_origin(prepared)}; "
        f"vLLM {facts.vllm_version} on {facts.device}"
    )
    caps = ", ".join(map(str, space.ladder))
    learnt = "a few settings live, " if prepared.profile is None else ""
    how = {
        Method.AUTO: f"{learnt}all of them predicted, the best live",
        Method.CALIBRATED: f"{learnt}all of them predicted, none raced",
        Method.LIVE: "every setting live, on one engine start",
        Method.SHADOW: "predicted alone, nothing is measured",
    }[prepared.options.method]
    listener.note(
        f"plan: caps {caps} and past the edge while it wins, token budgets "
        f"{', '.join(map(str, space.budgets))}; {how}; at most "
        f"{clock_text(prepared.budget_s)}; everything goes to {prepared.run_path}"
    )


def check_same(prepared: PreparedRun, stored: RunRecord) -> None:
    """Refuse to resume on another trace, another configuration or with other options."""
    stored.options.check_goes_on(prepared.options)
    for what, before, now in (
        ("trace", stored.trace_sha256, prepared.traffic.trace.sha256),
        ("config", stored.config_sha256, prepared.engine.config_sha256),
    ):
        if before != now:
            raise UsageError(
                f"the {what} is not the one that {prepared.run_path} was begun with",
                "resume with the same files, or start a new run",
            )
