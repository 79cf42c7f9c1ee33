"""`tune --trace …`: the main job, from options to an emitted file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

from tuner.cli.console import RunDisplay, clock_text, say, show_outcome
from tuner.cli.emit import holds_secrets
from tuner.cli.inputs import DEMO_NOTE, fit_lengths
from tuner.cli.inputs import replay_plan as plan_of
from tuner.cli.job import Job
from tuner.cli.report import write_report
from tuner.emit.names import Format
from tuner.emit.registry import emit
from tuner.emit.sources import recommendation_of
from tuner.emit.target import Names
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts, EngineSource
from tuner.errors import (
    Caveat,
    EngineError,
    NoFeasibleConfigError,
    RefusedConfigError,
    TunerError,
    UsageError,
)
from tuner.files import write_atomic
from tuner.redact import redacted
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.report.page import REPORT_FILE
from tuner.run.calibrate import Calibrator
from tuner.run.directory import PROFILE_FILE, RESULT_FILE, RUN_FILE, RunDir
from tuner.run.recovery import open_journal
from tuner.run.result import RunProvenance, RunResult, make_outcome
from tuner.run.session import AnySession, Method, Session, ShadowSession
from tuner.run.shadow_search import ShadowSearch
from tuner.run.state import RunState
from tuner.search.budget import Aim, window_text
from tuner.search.objective import Objective, Scoring
from tuner.search.race import RaceDecision, RaceVerdict, ratio
from tuner.search.space import SearchSpace, search_space
from tuner.search.trials import decisive, leader
from tuner.shadow.pool import ShadowPool, SpareProcesses, spare_cores
from tuner.shadow.profiles import Profile, write_profile
from tuner.shadow.source import ShadowSource
from tuner.traffic.describe import describe
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import Window

_TOO_LONG_CAVEATS = {"refuse": Caveat.REQUESTS_REFUSED, "clip": Caveat.REQUESTS_CLIPPED}


def run_record(
    job: Job,
    study: str,
    windows: tuple[Window, ...],
    ceiling: EngineLimits,
    parts: tuple[Window, ...] = (),
) -> dict[str, Any]:
    """Return what `--resume` and workers need, without secrets."""
    return {
        "study": study,
        "arguments": list(job.arguments),
        "trace_sha256": job.traffic.trace.sha256,
        "config_sha256": job.engine.config_sha256,
        "windows": [{"start_s": w.start_s, "end_s": w.end_s} for w in windows],
        "ceiling": {
            "max_num_seqs": ceiling.max_num_seqs,
            "max_num_batched_tokens": ceiling.max_num_batched_tokens,
        },
        "forecast_parts": [{"start_s": w.start_s, "end_s": w.end_s} for w in parts],
    }


class Finish:
    """Runs the session and turns whatever came of it into files and an exit code."""

    def __init__(self, job: Job, session: AnySession, facts: EngineFacts, told: str) -> None:
        self._job, self._session, self._facts = job, session, facts
        self._run = session.run_state
        if told and job.options["too_long"] in _TOO_LONG_CAVEATS:
            self._run.caveats.add(_TOO_LONG_CAVEATS[job.options["too_long"]])
        self._parts: tuple[Window, ...] = ()
        self._began_s = time.monotonic()

    def run(self) -> int:
        """Run to the end, or to Ctrl-C, and write what there is."""
        run = self._run
        run.on_windows = self._keep_windows
        run.on_forecast = self._keep_parts
        display = run.listener
        try:
            with display if isinstance(display, RunDisplay) else RunDisplay("p95", 0):
                decision = self._session.run()
        except KeyboardInterrupt:
            self._interrupted()
            raise
        except BaseException:
            self._write(self._best_so_far(), "failed")
            raise
        finally:
            self._session.close()
        outcome = self._write(decision, "complete")
        if outcome is None or not outcome.feasible:
            raise self._nothing_feasible()
        self._emit(outcome)
        return 0

    def _keep_windows(self, windows: tuple[Window, ...]) -> None:
        """Put the choice on disk, so that a resumed run replays the same."""
        self._keep(windows)
        say(f"replaying {window_text(windows, self._run.trace)}")

    def _keep_parts(self, parts: tuple[Window, ...], generation: int) -> None:
        """Put on disk what the shadow replays, so that workers replay the same."""
        self._parts = parts
        self._keep(self._run.windows)
        if generation == 0:
            say(f"the shadow replays {window_text(parts, self._run.trace)}")

    def _keep(self, windows: tuple[Window, ...]) -> None:
        run = self._run
        study, ceiling = run.journal.study_name, run.space.ceiling
        record = run_record(self._job, study, windows, ceiling, self._parts)
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
            say("interrupted before anything was measured")
            return
        outcome = self._write(self._best_so_far(), "interrupted")
        if outcome is not None and outcome.feasible:
            self._emit(outcome)
        say(f"go on with: tune --resume {self._run.run_dir.path}")

    def _write(self, decision: RaceDecision, state: str) -> RunResult | None:
        """Write result.json; None when nothing was measured yet."""
        run, job = self._run, self._job
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
            present_source="configuration" if job.engine.names_limits else "vLLM's default",
            model=job.engine.model,
            options={"arguments": list(job.arguments)},
            engine_starts=run.bench.starts,
            wall_s=time.monotonic() - self._began_s,
            method=str(job.method),
            walls_s=run.walls_s,
            serve_values=redacted(job.engine.deployed_values),
            description=describe(run.trace).as_json(),
            **self._session.findings(),
        )
        doubts = self._session.doubts(decision)
        outcome = make_outcome(
            decision, run.space.present, goal, records, doubts, around, state
        )
        run.run_dir.write_json(RESULT_FILE, outcome)
        write_sketch(run.run_dir.path / TRAFFIC_FILE, sketch_of(job.traffic.trace))
        self._report()
        return outcome

    def _nothing_feasible(self) -> NoFeasibleConfigError:
        run = self._run
        records = decisive(run.journal.records())
        best = leader([t.observation for t in records])
        if best is None:
            return NoFeasibleConfigError(
                "no configuration survived its replay",
                f"see the causes in {run.run_dir.path / 'trials.jsonl'}",
            )
        record = next(t for t in records if t.number == best.number)
        broken = run.goal.broken_in(record.measurement or {})
        return NoFeasibleConfigError(
            f"no configuration meets the SLOs; nearest is {best.limits} "
            f"(max_num_seqs/max_num_batched_tokens): {'; '.join(broken)}",
            f"relax an SLO, lower --load, or add replicas; all trials are in "
            f"{run.run_dir.path}",
        )

    def _emit(self, outcome: RunResult) -> None:
        """Write what was asked for to -o or standard output."""
        options, values = self._job.options, self._job.engine.deployed_values
        output, path = options["output"], self._run.run_dir.path
        chosen = Format(options["emit_format"])
        kept = f"evidence in {path}, to look at: {path / REPORT_FILE}"
        rec = recommendation_of(outcome, values, path)
        text = emit(chosen, rec, Names(Path(output).name if output else ""))
        if output:
            write_atomic(Path(output), text, secret=holds_secrets(chosen, rec))
            show_outcome(outcome, f"written to {output}; {kept}")
        else:
            sys.stdout.write(text)
            show_outcome(outcome, kept)

    def _report(self) -> None:
        """Write the run's page; without it the run is no less good."""
        path = self._run.run_dir.path
        try:
            write_report(path, path / REPORT_FILE)
        except UsageError as error:
            say(f"no report: {error.message}")


# How many processes import vLLM beside a live engine's start: ours. Each holds 0.7 GB, a few
# replay most traces in seconds, and long work starts more of them.
MAX_SPARES = 4


def run_job(
    job: Job, source: EngineSource | None = None, spares: SpareProcesses | None = None
) -> int:
    """Run the main job and return the exit code. Raises: TunerError, KeyboardInterrupt.

    Where the engines come from and who else can be a shadow is the installed vLLM's matter
    unless given.
    """
    for line in job.traffic.lines:
        say(line)
    if job.engine.is_demo and job.method is not Method.SHADOW:
        say(DEMO_NOTE)
    run_dir = RunDir(job.run_path, resume=job.is_resumed)
    try:
        with (
            EngineProcess(source or _source_of(job), run_dir.engine_log) as host,
            closing(spares or SpareProcesses(_helpers(job), run_dir.shadow_log)) as others,
        ):
            return _run_in(job, run_dir, host, others)
    except (EngineError, RefusedConfigError):
        raise  # what the engine said is in the directory
    except (TunerError, KeyboardInterrupt):
        run_dir.discard()
        raise
    finally:
        run_dir.close()


def _source_of(job: Job) -> EngineSource:
    if job.method is Method.SHADOW and job.profile is not None:
        return ShadowSource(job.profile, is_forced=job.is_forced)
    return LiveSource()


def _helpers(job: Job) -> int:
    """Return how many processes will be shadows beside the engine's own, or as one more."""
    if job.method is Method.LIVE:
        return 0
    if job.method is Method.SHADOW:
        return job.jobs - 1
    return min(job.jobs, spare_cores(), MAX_SPARES)


def _run_in(job: Job, run_dir: RunDir, host: EngineProcess, spares: SpareProcesses) -> int:
    stored = run_dir.read_json(RUN_FILE) if job.is_resumed else {}
    _check_same(job, stored)
    facts = host.facts(job.engine.values)
    trace, told = fit_lengths(job.traffic.trace, facts.max_model_len, job.options["too_long"])
    if told:
        say(told)
    run = _run_state(job, run_dir, host, facts, trace, stored)
    if job.profile is not None:
        _take_profile(job, job.profile, run, facts)
    if not job.is_resumed:
        run_dir.write_json(
            RUN_FILE, run_record(job, run.journal.study_name, (), run.space.ceiling)
        )
    return Finish(job, _session(job, run, spares), facts, told).run()


def _take_profile(job: Job, profile: Profile, run: RunState, facts: EngineFacts) -> None:
    """Keep the profile that was given, if it speaks for this engine. Raises: ShadowError."""
    if job.is_forced:
        run.caveats.add(Caveat.PROFILE_FORCED)
    else:
        ShadowSource(profile).check(job.engine.values, facts.vllm_version, facts.device)
    if not job.is_resumed:
        write_profile(run.run_dir.path / PROFILE_FILE, profile)


def _session(job: Job, run: RunState, spares: SpareProcesses) -> AnySession:
    """Return the kind of run that was asked for."""

    def make_shadows(profile: Profile) -> ShadowPool:
        return ShadowPool(
            profile,
            run.space.ceiling,
            job.jobs,
            run.run_dir.shadow_log,
            job.options["seed"],
            is_forced=job.is_forced,
            spares=spares,
        )

    if job.method is Method.SHADOW and job.profile is not None:
        shadows = make_shadows(job.profile)
        shadows.adopt(run.bench)
        return ShadowSession(run, shadows, is_forced=job.is_forced)
    shadow = ShadowSearch(
        run, make_shadows, Calibrator(run, redacted(job.engine.values)), spares
    )
    return Session(run, shadow, is_live=job.method is Method.LIVE)


def _run_state(
    job: Job,
    run_dir: RunDir,
    host: EngineProcess,
    facts: EngineFacts,
    trace: Trace,
    stored: Mapping[str, Any],
) -> RunState:
    options = job.options
    space = search_space(facts, trace, job.ladder, facts.present_limits)
    chosen: Window | None = options["window"].resolve(trace) if options["window"] else None
    aim = Aim(
        Objective(options["objective"]),
        tuple(options["slo"]),
        plan_of(options, trace),
        job.budget,
        chosen,
    )
    kept = tuple(Window(w["start_s"], w["end_s"]) for w in stored.get("windows", ()))
    display = RunDisplay("p95", job.budget.total_s)
    # Storage may be shared, and another run may have a directory of the same name.
    study = stored.get("study") or f"tune {job.run_path.name} {uuid4().hex[:8]}"
    storage = options["storage"] or run_dir.storage_url
    journal, restored = open_journal(
        storage, study, run_dir, aim.slos, is_resumed=job.is_resumed
    )
    for line in restored:
        say(line)
    for record in journal.records():
        display.recall(record)
    bench = EngineRunner(host, job.engine.values, space.ceiling, options["seed"])
    _say_plan(job, facts, space, run_dir)
    run = RunState(trace, space, aim, bench, journal, run_dir, display, windows=kept)
    run.caveats |= job.traffic.caveats & {Caveat.UNIFORM_TRACE, Caveat.QUANTISED_CLOCK}
    if job.engine.is_demo and job.method is not Method.SHADOW:
        run.caveats.add(Caveat.DEMO_MODEL)
    if aim.plan.load_model is LoadModel.CLOSED:
        run.caveats.add(Caveat.CLOSED_LOOP)
    return run


def _say_plan(job: Job, facts: EngineFacts, space: SearchSpace, run_dir: RunDir) -> None:
    """Say what will be done, and for how long at most."""
    origin = "the configuration" if job.engine.names_limits else "vLLM's default here"
    say(
        f"present configuration {facts.present_limits} (max_num_seqs/max_num_batched_tokens), "
        f"from {origin}; "
        f"vLLM {facts.vllm_version} on {facts.device}"
    )
    caps = ", ".join(map(str, space.ladder))
    learnt = "a few settings live, " if job.profile is None else ""
    how = {
        Method.AUTO: f"{learnt}all of them in the shadow, the best live",
        Method.LIVE: "every setting live, on one engine start",
        Method.SHADOW: "in the shadow alone",
    }[job.method]
    say(
        f"plan: caps {caps} and past the edge while it wins, token budgets "
        f"{', '.join(map(str, space.budgets))}; {how}; at most "
        f"{clock_text(job.budget.total_s)}; everything goes to {run_dir.path}"
    )


def _check_same(job: Job, stored: Mapping[str, Any]) -> None:
    """Refuse to resume on another trace or another configuration."""
    if not stored:
        return
    for name, now in (
        ("trace_sha256", job.traffic.trace.sha256),
        ("config_sha256", job.engine.config_sha256),
    ):
        if stored[name] != now:
            what = name.removesuffix("_sha256")
            raise UsageError(
                f"the {what} is not the one that {job.run_path} was begun with",
                "resume with the same files, or start a new run",
            )
