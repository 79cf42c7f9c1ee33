"""The end of the main job: result.json, the emitted file, and the exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tuner.cli.emit_command import holds_secrets
from tuner.cli.job import Job
from tuner.cli.report_command import write_report
from tuner.console import RunDisplay, say, show_outcome
from tuner.emit.names import Format
from tuner.emit.registry import emit
from tuner.emit.sources import recommendation_of
from tuner.emit.target import Names
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineFacts
from tuner.errors import Caveat, NoFeasibleConfigError, UsageError
from tuner.files import write_atomic
from tuner.redact import redacted
from tuner.report.page import REPORT_FILE
from tuner.run.directory import RESULT_FILE, RUN_FILE
from tuner.run.result import Circumstances, Outcome, make_outcome
from tuner.run.session import AnySession
from tuner.search.budget import window_text
from tuner.search.objective import Goal
from tuner.search.race import Decision, Verdict, ratio
from tuner.search.trials import decisive, leader, observation_of
from tuner.traffic.describe import describe
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch
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

    def _best_so_far(self) -> Decision:
        """Return the leader of an unfinished search, which nothing has confirmed."""
        run = self._run
        best = leader([observation_of(r) for r in decisive(run.journal.records())])
        limits = best.limits if best else run.space.present
        kind = Verdict.KEEP if limits == run.space.present else Verdict.CHANGE
        runs = run.journal.race_runs()
        gain = ratio(runs, limits, run.space.present)
        return Decision(kind, limits, limits, (), gain, 0, "unfinished")

    def _interrupted(self) -> None:
        if not self._run.journal.observations():
            say("interrupted before anything was measured")
            return
        outcome = self._write(self._best_so_far(), "interrupted")
        if outcome is not None and outcome.feasible:
            self._emit(outcome)
        say(f"go on with: tune --resume {self._run.run_dir.path}")

    def _write(self, decision: Decision, state: str) -> Outcome | None:
        """Write result.json; None when nothing was measured yet."""
        run, job = self._run, self._job
        records = run.journal.records()
        windows = run.windows or self._parts
        if not decisive(records) or not windows:
            return None
        goal = run.goal if run.is_planned else Goal(run.aim.objective, run.aim.slos, "p50")
        around = Circumstances(
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
        run.run_dir.write_json(RESULT_FILE, outcome.content)
        write_sketch(run.run_dir.path / TRAFFIC_FILE, sketch_of(job.traffic.trace))
        self._report()
        return outcome

    def _nothing_feasible(self) -> NoFeasibleConfigError:
        run = self._run
        records = decisive(run.journal.records())
        best = leader([observation_of(r) for r in records])
        if best is None:
            return NoFeasibleConfigError(
                "no configuration survived its replay",
                f"see the causes in {run.run_dir.path / 'trials.jsonl'}",
            )
        record = next(r for r in records if r["number"] == best.number)
        broken = run.goal.broken_in(record["measurement"])
        return NoFeasibleConfigError(
            f"no configuration meets the SLOs; nearest is {best.limits} "
            f"(max_num_seqs/max_num_batched_tokens): {'; '.join(broken)}",
            f"relax an SLO, lower --load, or add replicas; all trials are in "
            f"{run.run_dir.path}",
        )

    def _emit(self, outcome: Outcome) -> None:
        """Write what was asked for to -o or standard output."""
        options, values = self._job.options, self._job.engine.deployed_values
        output, path = options["output"], self._run.run_dir.path
        chosen = Format(options["emit_format"])
        kept = f"evidence in {path}, to look at: {path / REPORT_FILE}"
        rec = recommendation_of(outcome.content, values, path)
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
