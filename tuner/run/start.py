"""What a run begins with: options whose files were read, and the session made of them.

Nothing here replays anything. What can be refused without an engine is refused by `prepare`,
what only the engine knows by `Start`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from tuner.engine.demo import DEMO_MODEL_DIR, is_demo_model
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts, EngineInfo
from tuner.engine.serve_config import changed, hyphenated
from tuner.errors import Caveat, RefusedConfigError, UsageError
from tuner.redact import REDACTED, redacted
from tuner.replay.plan import doubts
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.run.context import RunContext, Stopwatch
from tuner.run.directory import PROFILE_FILE, RunDir, new_run_path
from tuner.run.inputs import (
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
from tuner.run.sessions.live import Session
from tuner.run.sessions.shadow import ShadowSession
from tuner.run.stored import RunRecord, StoredOptions
from tuner.run.trial_runner import TrialRunner
from tuner.search.budget import RATE_INSTEAD, Aim, Budget, asked_window
from tuner.search.objective import make_scoring
from tuner.search.space import PAST_LADDER, SearchSpace, search_space
from tuner.shadow.calibration import StatedError
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiled import ProfiledEngine
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.traffic.traces import LoadModel, TooLong, Trace
from tuner.traffic.windows import Window

_TOO_LONG_CAVEATS = {
    TooLong.REFUSE: Caveat.REQUESTS_REFUSED,
    TooLong.CLIP: Caveat.REQUESTS_CLIPPED,
}
RUNS = Path("runs")
"""Where runs are kept that are given no directory, below the working directory."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Options whose files were read and found good, before any engine starts.

    `budget_share` is how much of its time this run may take, where others follow. `windows` are
    those to replay where nothing can be predicted, chosen by the run that it is compared with;
    `is_compared` says whether there is one, or others are compared with this one.
    """

    options: TuningOptions
    engine: EngineChoice
    traffic: Traffic
    run_path: Path
    profile: Profile | None
    budget_share: float = 1.0
    windows: tuple[Window, ...] = ()
    is_compared: bool = False

    @property
    def budget_s(self) -> float:
        """How long this run may take, in seconds."""
        return self.options.budget_s * self.budget_share


def prepare(options: TuningOptions, *, serves: bool = True) -> PreparedRun:
    """Check everything that can be checked without an engine.

    Where nobody `serves` with what comes of it, as a worker, no secret of the configuration is
    needed.

    Raises: TunerError.
    """
    profile = _profile(options)
    engine = _engine(options, profile, serves=serves)
    engine = _started_from(options, engine, profile)
    traffic = traffic_of(
        read_traffic(options),
        options.load,
        options.window_choice,
        largest_cap=max(options.ladder) * PAST_LADDER,
        concurrency=options.concurrency,
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


def _engine(options: TuningOptions, profile: Profile | None, *, serves: bool) -> EngineChoice:
    """Return what is to be measured, the profile's own engine where none is named."""
    given = (options.config, options.model, options.engine_args)
    if profile is None:
        return configured_engine(*given)
    engine = engine_of_profile(profile, *given)
    if options.method is Method.SHADOW:
        return engine
    if is_demo_model(engine.values.get("model")):
        values = {**engine.values, "model": str(DEMO_MODEL_DIR)}
        is_named = options.config is not None or options.model is not None
        return replace(engine, values=values, is_demo=not is_named)
    check_model(engine.values)
    there = {hyphenated(key) for key in options.engine_args}
    hidden = [key for key, value in profile.serve_values.items() if REDACTED in str(value)]
    missing = [key for key in hidden if options.config is None and hyphenated(key) not in there]
    if missing and serves:
        raise UsageError(
            f"the profile keeps no secrets, so these are missing: {', '.join(missing)}",
            "give them again with --engine-arg, or the whole configuration with --config",
        )
    return engine


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


def aim_of(options: TuningOptions, trace: Trace) -> Aim:
    """Return what the run is after on this trace.

    Raises: UsageError, TraceError; TooFewSamplesError where the trace, or the window that was
        asked for, cannot carry it.
    """
    slos, plan = tuple(options.slos), options.plan(trace)
    window = asked_window(options.window_choice, trace, plan)
    requests = (trace if window is None else window.of(trace)).measured
    aim = Aim(options.objective, slos, plan, window, options.confidence)
    make_scoring(aim.objective, slos, requests)
    return aim


def origin_of(prepared: PreparedRun) -> str:
    """Return who had set the current limits."""
    if prepared.options.start is not None:
        return f"starting point {prepared.options.start}"
    return "configuration" if prepared.engine.names_limits else "vLLM's default"


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


@dataclass(frozen=True, slots=True)
class Start:
    """What a session is made of, whatever its method."""

    prepared: PreparedRun
    run_dir: RunDir
    stored: RunRecord | None
    listener: Listener

    def predicted(self, profile: Profile) -> ShadowSession:
        """Return a run on predictions alone.

        Raises: ShadowError if the profile was made elsewhere; UsageError.
        """
        options = self.prepared.options
        source = ProfiledEngine(profile, is_forced=options.is_forced)
        facts = source.facts(self.prepared.engine.values)
        check_has(options.knobs, facts.vllm_version)
        context = self._context(facts)
        predictor = self._predictor(profile, context.space.ceiling).as_deployed()
        return ShadowSession(context, predictor, is_forced=options.is_forced)

    def live(self, host: EngineProcess) -> Session:
        """Return a run on a live engine. Raises: TunerError."""
        prepared, options = self.prepared, self.prepared.options
        facts = host.facts(prepared.engine.values)
        check_has(options.knobs, facts.vllm_version)
        self._check_variants(host, facts)
        context = self._context(facts)
        engine = EngineRunner(
            host,
            prepared.engine.values,
            context.space.ceiling,
            options.seed,
            self.listener.note,
        )
        return Session.of(
            TrialRunner(context, engine),
            redacted(prepared.engine.values),
            lambda profile: self._predictor(profile, engine.ceiling, engine.info),
            options.method,
            chosen=self.stored.windows if self.stored else prepared.windows,
            is_compared=prepared.is_compared,
        )

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
        has_own_graphs = info is None or info.has_own_graphs
        return Predictor(profile, ceiling, self.prepared.options.seed, has_own_graphs)

    def _context(self, facts: EngineFacts) -> RunContext:
        """Return what the run's stages are given. Raises: TunerError."""
        prepared, options, listener = self.prepared, self.prepared.options, self.listener
        trace, message = fit_lengths(
            prepared.traffic.trace, facts.max_model_len, options.too_long
        )
        if message:
            listener.note(message)
        space = _space_of(prepared, facts, trace)
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
        _tell_plan(prepared, aim, facts, space, listener)
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
            caveats=_first_caveats(prepared, aim, facts, has_too_long=bool(message)),
        )
        if prepared.profile is not None:
            context.caveat_texts.update(StatedError.of(prepared.profile).texts)
            _take_profile(prepared, prepared.profile, context, facts)
        return self._begun(context)

    def _begun(self, context: RunContext) -> RunContext:
        """Put a new run on disk; one that goes on starts no higher than it did."""
        if self.stored is None:
            context.keep_windows()
        elif self.stored.ceiling != context.space.ceiling:
            return context.below(self.stored.ceiling)
        return context


def _space_of(prepared: PreparedRun, facts: EngineFacts, trace: Trace) -> SearchSpace:
    """Return what may be tried; without an engine larger caps, as far as they may win."""
    options, profile, now = prepared.options, prepared.profile, facts.current_limits
    is_alone = options.method is Method.SHADOW
    may_grow = is_alone and profile is not None and profile.tells_beyond
    return search_space(facts, trace, tuple(options.ladder), now, may_grow=may_grow)


def _first_caveats(
    prepared: PreparedRun, aim: Aim, facts: EngineFacts, *, has_too_long: bool
) -> set[Caveat]:
    found = set(prepared.traffic.caveats - {Caveat.LOW_DEMAND})
    found |= doubts(facts, aim.plan, prepared.traffic.trace.output_tokens)
    if prepared.engine.is_demo and prepared.options.method is not Method.SHADOW:
        found.add(Caveat.DEMO_MODEL)
    if aim.plan.load_model is LoadModel.CLOSED:
        found.add(Caveat.CLOSED_LOOP)
    if has_too_long and prepared.options.too_long in _TOO_LONG_CAVEATS:
        found.add(_TOO_LONG_CAVEATS[prepared.options.too_long])
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


def _tell_plan(
    prepared: PreparedRun,
    aim: Aim,
    facts: EngineFacts,
    space: SearchSpace,
    listener: Listener,
) -> None:
    """Say what will be done, and for how long at most."""
    listener.current_known(facts.current_limits)
    listener.note(
        f"current configuration {facts.current_limits} (max_num_seqs/max_num_batched_tokens), "
        f"from {origin_of(prepared)}; "
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
    if aim.objective is not prepared.options.objective:
        listener.note(RATE_INSTEAD)
