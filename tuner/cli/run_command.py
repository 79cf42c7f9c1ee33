"""`tune --trace …`: the main job, from options to an emitted file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tuner import confirm
from tuner.bench import Bench
from tuner.cli.inputs import EngineChoice, Traffic, choose_engine, fit_lengths, read_traffic
from tuner.cli.inputs import replay_plan as plan_of
from tuner.cli.replay_command import DEMO_NOTE
from tuner.confirm import Decision, Verdict
from tuner.console import RunDisplay, clock_text, say, show_outcome
from tuner.emit.vllm import render, write_atomic
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts, EngineLimits, EngineSource
from tuner.errors import Caveat, NoFeasibleConfigError, UsageError
from tuner.host import Host
from tuner.journal import Journal, observation_of
from tuner.objective import Goal, Objective
from tuner.observation import leader
from tuner.outcome import Circumstances, Outcome, comments, make_outcome
from tuner.plan import DEFAULT_LADDER, PAST_LADDER, Budget, search_space, window_text
from tuner.redact import has_secrets
from tuner.rundir import RESULT_FILE, RUN_FILE, RunDir, new_run_path
from tuner.session import Aim, Session
from tuner.traces import LoadModel, Trace
from tuner.windows import Window

DEFAULT_BUDGET_S = 1800.0
_TOO_LONG_CAVEATS = {"refuse": Caveat.REQUESTS_REFUSED, "clip": Caveat.REQUESTS_CLIPPED}


@dataclass(frozen=True, slots=True)
class Job:
    """Options that were read and found good, before any engine starts."""

    options: Mapping[str, Any]
    arguments: tuple[str, ...]
    engine: EngineChoice
    traffic: Traffic
    budget: Budget
    ladder: tuple[int, ...]
    run_path: Path

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier run goes on."""
        return bool(self.options["resume"])


def read_job(options: Mapping[str, Any], arguments: Sequence[str]) -> Job:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    budget = Budget(options["budget"] or DEFAULT_BUDGET_S)
    ladder = options["max_num_seqs"] or DEFAULT_LADDER
    slos = tuple(options["slo"])
    Goal(Objective(options["objective"]), slos, "p99")
    engine = choose_engine(options)
    traffic = read_traffic(options, largest_cap=max(ladder) * PAST_LADDER)
    plan_of(options, traffic.trace)
    if options["window"]:
        options["window"].resolve(traffic.trace).of(traffic.trace)
    if options["output"] and not Path(options["output"]).resolve().parent.is_dir():
        raise UsageError(
            f"-o {options['output']}: its folder does not exist", "make it, or name another"
        )
    run_path = Path(options["resume"] or options["run_dir"] or new_run_path(Path("runs")))
    return Job(options, tuple(arguments), engine, traffic, budget, ladder, run_path)


def run_job(job: Job, source: EngineSource | None = None) -> int:
    """Run the main job and return the exit code. Raises: TunerError, KeyboardInterrupt."""
    for line in job.traffic.lines:
        say(line)
    if job.engine.is_demo:
        say(DEMO_NOTE)
    run_dir = RunDir(job.run_path, resume=job.is_resumed)
    try:
        with Host(source or LiveSource(), run_dir.engine_log) as host:
            return _run_in(job, run_dir, host)
    finally:
        run_dir.close()


def _run_in(job: Job, run_dir: RunDir, host: Host) -> int:
    stored = run_dir.read_json(RUN_FILE) if job.is_resumed else {}
    _check_same(job, stored)
    facts = host.facts(job.engine.values)
    trace, told = fit_lengths(job.traffic.trace, facts.max_model_len, job.options["too_long"])
    if told:
        say(told)
    session = _session(job, run_dir, host, facts, trace, stored)
    if not job.is_resumed:
        run_dir.write_json(RUN_FILE, _run_record(job, session.journal.study_name, ()))
    return _Finish(job, session, facts, told).run()


def _session(
    job: Job,
    run_dir: RunDir,
    host: Host,
    facts: EngineFacts,
    trace: Trace,
    stored: Mapping[str, Any],
) -> Session:
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
    journal = Journal(options["storage"] or run_dir.storage_url, study)
    for record in journal.records():
        display.recall(observation_of(record), record)
    bench = Bench(host, job.engine.values, space.ceiling, options["seed"])
    origin = "the configuration" if job.engine.names_limits else "vLLM's default here"
    say(
        f"present configuration {facts.present_limits} (max_num_seqs/max_num_batched_tokens), "
        f"from {origin}; "
        f"vLLM {facts.vllm_version} on {facts.device}"
    )
    caps = ", ".join(map(str, space.ladder))
    say(
        f"plan: caps {caps} and past the edge while it wins, token budgets "
        f"{', '.join(map(str, space.budgets))}; one engine start; at most "
        f"{clock_text(job.budget.total_s)}; everything goes to {run_dir.path}"
    )
    session = Session(trace, space, aim, bench, journal, run_dir, display, windows=kept)
    session.caveats |= job.traffic.caveats & {Caveat.UNIFORM_TRACE, Caveat.QUANTISED_CLOCK}
    if job.engine.is_demo:
        session.caveats.add(Caveat.DEMO_MODEL)
    if aim.plan.load_model is LoadModel.CLOSED:
        session.caveats.add(Caveat.CLOSED_LOOP)
    return session


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


def _run_record(job: Job, study: str, windows: tuple[Window, ...]) -> dict[str, Any]:
    """Return what `--resume` needs, without secrets."""
    return {
        "study": study,
        "arguments": list(job.arguments),
        "trace_sha256": job.traffic.trace.sha256,
        "config_sha256": job.engine.config_sha256,
        "windows": [{"start_s": w.start_s, "end_s": w.end_s} for w in windows],
    }


class _Finish:
    """Runs the session and turns whatever came of it into files and an exit code."""

    def __init__(self, job: Job, session: Session, facts: EngineFacts, told: str) -> None:
        self._job, self._session, self._facts = job, session, facts
        if told and job.options["too_long"] in _TOO_LONG_CAVEATS:
            session.caveats.add(_TOO_LONG_CAVEATS[job.options["too_long"]])
        self._began_s = time.monotonic()

    def run(self) -> int:
        """Run to the end, or to Ctrl-C, and write what there is."""
        session = self._session
        session.on_windows = self._keep_windows
        display = session.listener
        try:
            with display if isinstance(display, RunDisplay) else RunDisplay("p95", 0):
                decision = session.run()
        except KeyboardInterrupt:
            self._interrupted()
            raise
        except BaseException:
            self._write(self._best_so_far(), "failed")
            raise
        outcome = self._write(decision, "complete")
        if outcome is None or not outcome.feasible:
            raise self._nothing_feasible()
        self._emit(outcome)
        return 0

    def _keep_windows(self, windows: tuple[Window, ...]) -> None:
        """Put the choice on disk, so that a resumed run replays the same."""
        session = self._session
        record = _run_record(self._job, session.journal.study_name, windows)
        session.run_dir.write_json(RUN_FILE, record)
        say(f"replaying {window_text(windows, session.trace)}")

    def _best_so_far(self) -> Decision:
        """Return the leader of an unfinished search, which nothing has confirmed."""
        session = self._session
        best = leader(session.journal.observations())
        limits = best.limits if best else session.space.present
        kind = Verdict.KEEP if limits == session.space.present else Verdict.CHANGE
        runs = session.journal.race_runs()
        gain = confirm.ratio(runs, limits, session.space.present)
        return Decision(kind, limits, limits, (), gain, 0, "unfinished")

    def _interrupted(self) -> None:
        if not self._session.journal.observations():
            say("interrupted before anything was measured")
            return
        outcome = self._write(self._best_so_far(), "interrupted")
        if outcome is not None and outcome.feasible:
            self._emit(outcome)
        say(f"go on with: tune --resume {self._session.run_dir.path}")

    def _write(self, decision: Decision, state: str) -> Outcome | None:
        """Write result.json; None when nothing was measured yet."""
        session, job = self._session, self._job
        records = session.journal.records()
        if not records or not session.is_planned:
            return None
        windows = session.windows
        started = session.bench.started
        around = Circumstances(
            trace=session.trace,
            replayed_requests=sum(len(w.of(session.trace)) for w in windows),
            window=window_text(windows, session.trace),
            info=started.info if started else None,
            present_source="configuration" if job.engine.names_limits else "vLLM's default",
            model=job.engine.model,
            options={"arguments": list(job.arguments)},
            engine_starts=session.bench.starts,
            wall_s=time.monotonic() - self._began_s,
        )
        doubts = session.doubts(decision)
        outcome = make_outcome(
            decision, session.space.present, session.goal, records, doubts, around, state
        )
        session.run_dir.write_json(RESULT_FILE, outcome.content)
        return outcome

    def _nothing_feasible(self) -> NoFeasibleConfigError:
        session = self._session
        best = leader(session.journal.observations())
        if best is None:
            return NoFeasibleConfigError(
                "no configuration survived its replay",
                f"see the causes in {session.run_dir.path / 'trials.jsonl'}",
            )
        record = next(r for r in session.journal.records() if r["number"] == best.number)
        broken = session.goal.broken_in(record["measurement"])
        return NoFeasibleConfigError(
            f"no configuration meets the SLOs; nearest is {best.limits} "
            f"(max_num_seqs/max_num_batched_tokens): {'; '.join(broken)}",
            f"relax an SLO, lower --load, or add replicas; all trials are in "
            f"{session.run_dir.path}",
        )

    def _emit(self, outcome: Outcome) -> None:
        """Write the YAML to -o or standard output."""
        output, limits = self._job.options["output"], outcome.decision.winner
        name = Path(output).name if output else "best.yaml"
        values = self._job.engine.values
        text = _yaml(values, limits, outcome, name, self._session.run_dir.path)
        if output:
            write_atomic(Path(output), text, secret=has_secrets(values))
            show_outcome(
                outcome, f"written to {output}; evidence in {self._session.run_dir.path}"
            )
        else:
            sys.stdout.write(text)
            show_outcome(outcome, f"evidence in {self._session.run_dir.path}")


def _yaml(
    values: Mapping[str, object],
    limits: EngineLimits,
    outcome: Outcome,
    name: str,
    run_dir: Path,
) -> str:
    above = comments(outcome, name, str(run_dir))
    return render(values, limits.max_num_seqs, limits.max_num_batched_tokens, above)
