"""One tuning run from options to a result, with everything that it leaves in its directory.

Answers what `tune` and the library's `tune` do alike: read the trace, start the engine, run the
session, and keep what came of it, also after Ctrl-C and after an error.

A script that defines the class of `source` guards its own start with `if __name__ ==
"__main__":`, because the engine runs in a process of its own, which imports that class.
"""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineSource
from tuner.errors import (
    Caveat,
    EngineError,
    NoFeasibleConfigError,
    RefusedConfigError,
    StorageError,
    TunerError,
    UsageError,
)
from tuner.redact import redacted, redacted_text
from tuner.replay.process import EngineProcess
from tuner.run.context import RunContext
from tuner.run.directory import RESULT_FILE, RunDir
from tuner.run.inputs import DEMO_NOTE
from tuner.run.listener import Listener
from tuner.run.loads.alone import Hopeless, hopeless, with_widest
from tuner.run.options import Method, TuningOptions
from tuner.run.outcome import Given, RunFindings, make_outcome, nearest_of, own_version
from tuner.run.records import (
    CaveatRecord,
    ColdEngine,
    CurrentConfiguration,
    EngineRecord,
    Provenance,
    TraceRecord,
)
from tuner.run.result import RunResult
from tuner.run.sessions.live import AnySession
from tuner.run.start import PreparedRun, Start, check_same, origin_of, prepare
from tuner.run.stored import StoredOptions, read_record
from tuner.search.budget import window_text
from tuner.search.objective import Scoring, Tier, broken_in
from tuner.search.race import UNFINISHED, RaceDecision, RaceVerdict
from tuner.search.trials import decisive, leader, predictions
from tuner.stats import one_thread
from tuner.traffic.describe import describe
from tuner.traffic.sketch import TRAFFIC_FILE, sketch_of, write_sketch
from tuner.traffic.windows import whole

WritePage = Callable[[Path], object]
"""Writes the page of the run in a directory. Raises: UsageError."""

# What meets the SLOs at least so probably may yet turn out to: ours.
MAYBE_MEETS = 0.1

_MEDIAN_DECIDED = (
    "the median decided, as the requests are too few for a tail: what keeps most of them short "
    "at the expense of others, or of requests/s, counts as better"
)


class _Run:
    """Runs the session and keeps whatever comes of it."""

    def __init__(
        self, prepared: PreparedRun, session: AnySession, write_page: WritePage | None
    ) -> None:
        self._prepared, self._session, self._write_page = prepared, session, write_page
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
        except NoFeasibleConfigError as error:
            self._failed()
            raise self._none_survived() from error
        except BaseException:
            self._failed()
            raise
        result = self._write(decision, "complete")
        if result is None or not result.feasible:
            raise self._nothing_feasible(decision)
        return result

    def _so_far(self) -> RaceDecision:
        """Return what was decided, or the leader of an unfinished search.

        Nothing has confirmed that one.
        """
        context = self._context
        if self._session.decision is not None:
            return self._session.decision
        records = context.journal.records()
        best = leader([t.observation for t in decisive(records)])
        limits = best.limits if best else context.space.current
        kind = RaceVerdict.KEEP if limits == context.space.current else RaceVerdict.CHANGE
        return RaceDecision(
            verdict=kind,
            winner=limits,
            best=limits,
            tied=(),
            gain=None,
            rounds=0,
            why=UNFINISHED,
            is_predicted=not any(trial.phase.is_on_windows for trial in records),
        )

    def _failed(self) -> None:
        """Let the workers go, and write what there is; what failed first is what is told."""
        with suppress(StorageError):
            self._context.journal.set_state("failed")
        with suppress(StorageError):
            self._write(self._so_far(), "failed")

    def _interrupted(self) -> None:
        with suppress(StorageError):
            if self._context.journal.records():
                self._write(self._so_far(), "interrupted")
            else:
                self._context.listener.note("interrupted before anything was measured")

    def _write(self, decision: RaceDecision, state: str) -> RunResult | None:
        """Write result.json; None when nothing was measured yet."""
        context, found = self._context, self._session.findings()
        records, aim = context.journal.records(), context.aim
        if not decisive(records) or not found.windows:
            return None
        scoring = found.scoring or Scoring(aim.objective, aim.slos, "p50")
        # A window may be too short for the tail that was predicted of all, and decided by.
        if scoring.has_no_tail and decision.metric == f"e2e_{scoring.tail}":
            context.caveats.add(Caveat.FEW_SAMPLES)
            context.caveat_texts[Caveat.FEW_SAMPLES] = _MEDIAN_DECIDED
        told = self._session.caveats(decision)
        caveats = [CaveatRecord(str(one), text) for one, text in told.items()]
        given = self._given(found, has_predicted=bool(predictions(records)))
        outcome = make_outcome(decision, scoring, records, caveats, found, given, state)
        context.run_dir.write_json(RESULT_FILE, outcome)
        trace = self._prepared.traffic.trace
        write_sketch(context.run_dir.path / TRAFFIC_FILE, sketch_of(trace))
        write_the_page(self._write_page, context.run_dir.path, context.listener)
        context.listener.result_written(outcome, context.run_dir.path)
        return outcome

    def _given(self, found: RunFindings, *, has_predicted: bool) -> Given:
        context, prepared = self._context, self._prepared
        current = context.space.current
        return Given(
            self._provenance(found, has_predicted=has_predicted),
            CurrentConfiguration(**asdict(current), source=origin_of(prepared)),
            redacted(prepared.engine.deployed_values),
            describe(context.trace).as_json(),
            tuple(context.space.caps()),
        )

    def _provenance(self, found: RunFindings, *, has_predicted: bool) -> Provenance:
        context, prepared, trace = self._context, self._prepared, self._context.trace
        predicted = context.aim.window or whole(trace)
        return Provenance(
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            tuner_version=own_version(),
            python=platform.python_version(),
            trace=TraceRecord(
                source=trace.source,
                format=trace.format,
                sha256=trace.sha256,
                rows=trace.notes.rows,
                requests=len(trace),
                replayed_requests=sum(w.of(trace).measured for w in found.windows),
                window=window_text(found.windows, trace),
                predicted_requests=predicted.of(trace).measured if has_predicted else 0,
                predicted=window_text((predicted,), trace) if has_predicted else "",
            ),
            engine=None if found.info is None else EngineRecord.of(found.info),
            cold_engines=tuple(
                ColdEngine(**asdict(limits), num_blocks=blocks)
                for limits, blocks in found.cold_blocks.items()
            ),
            model=redacted_text(prepared.engine.model),
            options=msgspec.to_builtins(StoredOptions.of(prepared.options)),
            engine_starts=found.engine_starts,
            wall_s=time.monotonic() - self._began_s,
            stages_s=dict(context.stopwatch.stages_s),
            profile=found.profile,
        )

    def _nothing_feasible(self, decision: RaceDecision) -> NoFeasibleConfigError:
        """Say who is nearest to the SLOs, how probably it meets them, and what it breaks."""
        context = self._context
        records = decisive(context.journal.records())
        best = leader([t.observation for t in records])
        if best is None:
            return self._none_survived()
        known = nearest_of(decision)
        nearest = best.limits if known is None else known.limits
        own = [t for t in records if t.limits == nearest]
        said = [] if known is None else [known.text]
        said += broken_in(context.aim.slos, own[-1].measurement or {}) if own else []
        alone, borne = self._alone(nearest), self._session.findings().capacity
        said += [] if alone is None else [alone.text]
        said += [] if borne is None or alone else [f"capacity at the SLOs: {borne.text}"]
        hint = "relax an SLO, lower --load, or add replicas" if alone is None else alone.hint
        if known is not None and known.p_slo >= MAYBE_MEETS:
            is_shadow = self._prepared.options.method is Method.SHADOW
            more = "a run on the engine" if is_shadow else "a longer --budget"
            hint += f"; it may meet them yet, which {more} would tell"
        missed = "meet the SLOs" if known is None else known.missed
        return NoFeasibleConfigError(
            f"no configuration is likely to {missed}; nearest is {nearest} "
            f"(max_num_seqs/max_num_batched_tokens): {'; '.join(said)}",
            f"{hint}; all trials are in {context.run_dir.path}",
        )

    def _alone(self, nearest: EngineLimits) -> Hopeless | None:
        """Return which SLOs no load is low enough for, as far as it can be predicted."""
        known, context = self._session.foretold, self._context
        if known is None:
            return None
        deployed, workload = known.predictor.as_deployed(), known.predictions.workload
        settings = with_widest(nearest, context.space)
        try:
            return hopeless(deployed, settings, workload.pieces, workload.slos)
        except UsageError:
            return None

    def _none_survived(self) -> NoFeasibleConfigError:
        """Say why nothing was answered anywhere: who lost least, or what mostly went wrong."""
        records = decisive(self._context.journal.records())
        best = leader([t.observation for t in records])
        is_known = best is not None and math.isfinite(best.score.value)
        if best is not None and best.score.tier is Tier.BREAKS_SLO and is_known:
            return self._nothing_feasible(self._so_far())
        trials = f"all trials are in {self._context.run_dir.path}"
        lost = [(t.measurement["lost_ratio"], t) for t in records if t.measurement]
        ratio, least = min(lost, key=lambda one: (one[0], one[1].number), default=(0.0, None))
        if least is not None and ratio > 0:
            return NoFeasibleConfigError(
                f"no configuration answers its requests; {least.limits} "
                f"(max_num_seqs/max_num_batched_tokens) loses least, {ratio:.0%} of them",
                f"allow a longer --request-timeout, lower --load, or add replicas; {trials}",
            )
        causes = Counter(t.cause for t in records if t.cause).most_common(1)
        told = "".join(f": {cause} ({n} of {len(records)} trials)" for cause, n in causes)
        return NoFeasibleConfigError(f"no configuration survived its replay{told}", trials)


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
    write_page: WritePage | None = None,
    run_dir: RunDir | None = None,
) -> RunResult:
    """Run to the end and return what came of it; everything is in the run directory by then.

    Of the configuration as it is: variants are left to `tuner.run.variants.runs`. Where the
    engines come from is the installed vLLM's matter unless given.
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
        start = Start(prepared, held_dir, stored, listener)
        with ExitStack() as held:
            held.enter_context(one_thread())
            session: AnySession
            if prepared.options.method is Method.SHADOW and prepared.profile is not None:
                session = start.predicted(prepared.profile)
            else:
                log, asked = held_dir.engine_log, prepared.options
                live = source or LiveSource(asked.is_greedy)
                host = held.enter_context(EngineProcess(live, log, asked.start_timeout_s))
                session = start.live(host)
            return _Run(prepared, session, write_page).to_the_end()
    except (EngineError, RefusedConfigError):
        raise  # what the engine said is in the directory
    except (TunerError, KeyboardInterrupt):
        held_dir.discard()
        raise
    finally:
        if run_dir is None:
            held_dir.close()
