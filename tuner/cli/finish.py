"""The end of the main job: result.json, the emitted file, and the exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner import confirm
from tuner.cli.job import Job
from tuner.confirm import Decision, Verdict
from tuner.console import RunDisplay, say, show_outcome
from tuner.emit.vllm import render, write_atomic
from tuner.engine.protocol import EngineFacts, EngineLimits
from tuner.errors import Caveat, NoFeasibleConfigError
from tuner.observation import leader
from tuner.outcome import Circumstances, Outcome, comments, make_outcome
from tuner.plan import window_text
from tuner.redact import has_secrets
from tuner.rundir import RESULT_FILE, RUN_FILE
from tuner.session import Session
from tuner.windows import Window

_TOO_LONG_CAVEATS = {"refuse": Caveat.REQUESTS_REFUSED, "clip": Caveat.REQUESTS_CLIPPED}


def run_record(job: Job, study: str, windows: tuple[Window, ...]) -> dict[str, Any]:
    """Return what `--resume` needs, without secrets."""
    return {
        "study": study,
        "arguments": list(job.arguments),
        "trace_sha256": job.traffic.trace.sha256,
        "config_sha256": job.engine.config_sha256,
        "windows": [{"start_s": w.start_s, "end_s": w.end_s} for w in windows],
    }


class Finish:
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
        record = run_record(self._job, session.journal.study_name, windows)
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
