"""A worker of a run: an engine of its own that takes whole rounds of calibration and race."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts, EngineSource
from tuner.errors import EngineError, TraceError, UsageError
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.run.inputs import fit_lengths
from tuner.run.journal import Journal
from tuner.run.options import Method
from tuner.run.rounds import POLL_S, STEPS, packed, replay_round, workloads_of
from tuner.run.start import PreparedRun, aim_of, prepare
from tuner.run.stored import RunRecord, read_record
from tuner.search.budget import Aim
from tuner.search.trials import Phase
from tuner.traffic.traces import Trace

# After how long without a round a worker goes: ours; a run offers rounds within minutes, and a
# dead one never does.
PATIENCE_S = 900.0

_ENDED = {
    "done": "the run is over",
    "failed": "the run ended with an error; if it is resumed (tune --resume {folder}), start "
    "its workers anew",
}
"""What a run says of itself once it offers no more rounds, and what that means."""


def work(
    folder: Path,
    storage: str,
    files: Sequence[str],
    note: Callable[[str], None],
    source: EngineSource | None = None,
    config: Path | None = None,
) -> None:
    """Replay rounds of the run in a folder until it is over; note how many, and why it ends.

    `files` are its trace on this machine and `config` its configuration, none where they lie at
    the same place.

    Raises: UsageError if it is another run's trace or configuration, another kind of machine,
        or a run without rounds; EngineError.
    """
    record = read_record(folder)
    if record.options.method is Method.SHADOW:
        raise UsageError(f"{folder} is a run of predictions alone, which has no rounds to take")
    given: dict[str, object] = {"trace": tuple(files)} if files else {}
    given |= {} if config is None else {"config": str(config)}
    options = record.options.without_secrets().restored(folder, given)
    prepared = prepare(options, serves=False)
    _check_same(record, prepared)
    journal = Journal(storage, record.study, options.slos, join=True, note=note)
    try:
        done = 0
        if journal.state not in _ENDED:
            log = folder / f"worker-{socket.gethostname()}-{os.getpid()}.log"
            live = source or LiveSource(options.is_greedy)
            with EngineProcess(live, log, options.start_timeout_s) as host:
                done = _started(host, record, prepared, journal, note).work()
        note(f"{done} rounds were replayed here")
        if why := _ENDED.get(journal.state):
            note(why.format(folder=folder))
    finally:
        journal.close()


def _check_same(record: RunRecord, prepared: PreparedRun) -> None:
    """Refuse the trace or the configuration of another run. Raises: TraceError, UsageError."""
    if prepared.traffic.trace.sha256 != record.trace_sha256:
        raise TraceError(
            f"{prepared.traffic.trace.source} is not the trace that the run was begun with",
            "name its place on this machine with --trace",
        )
    config = prepared.options.config
    # What a program gave as data comes with the run, without its secrets.
    if isinstance(config, str) and prepared.engine.config_sha256 != record.config_sha256:
        raise UsageError(
            f"{config} is not the configuration that the run was begun with",
            "name its place on this machine with --config",
        )


def _check_alike(record: RunRecord, facts: EngineFacts) -> None:
    """Refuse a machine whose replays do not compare with the run's. Raises: UsageError."""
    for what, before, here in (
        ("vLLM", record.vllm_version, facts.vllm_version),
        ("device", record.device, facts.device),
    ):
        if before != here:
            raise UsageError(
                f"the run was begun with {what} {before}, here is {here}",
                "workers need the same vLLM and the same device",
            )


@dataclass(slots=True)
class _Worker:
    """One engine's share of a run's rounds."""

    journal: Journal
    engine: EngineRunner
    trace: Trace
    aim: Aim
    note: Callable[[str], None]

    def work(self) -> int:
        """Take rounds until the run is over; return how many were made here."""
        attempt, done, idle_since_s = uuid4().hex[:8], 0, time.monotonic()
        while self.journal.state not in _ENDED:
            if self._round(attempt):
                done, idle_since_s = done + 1, time.monotonic()
            elif time.monotonic() - idle_since_s > PATIENCE_S:
                self.note(f"nothing to do for {PATIENCE_S / 60:.0f} minutes")
                break
            else:
                time.sleep(POLL_S)
        return done

    def _round(self, attempt: str) -> bool:
        """Replay a round if there is one; tell whether it counts. Raises: EngineError."""
        claimed = self.journal.claim(Phase.CALIBRATE, Phase.RACE)
        if claimed is None:
            return False
        number, one = claimed
        workloads = workloads_of(one, self.trace, self.aim)
        found = replay_round(self.engine, one, workloads, attempt)
        if all(record.cause for record in found.records):
            # What nothing survives here says nothing of the run's own engine.
            raise EngineError(f"no setting survived its replay: {found.records[0].cause}")
        counts = self.journal.finish_round(number, found.records, {STEPS: packed(found.steps)})
        settings = ", ".join(map(str, one.settings))
        late = "" if counts else ", too late to count"
        self.note(f"{one.phase} round {one.number}: {settings}{late}")
        return counts


def _started(
    host: EngineProcess,
    record: RunRecord,
    prepared: PreparedRun,
    journal: Journal,
    note: Callable[[str], None],
) -> _Worker:
    """Start an engine as the run's. Raises: UsageError on another machine; EngineError."""
    options, values = prepared.options, prepared.engine.values
    facts = host.facts(values)
    _check_alike(record, facts)
    trace, _ = fit_lengths(prepared.traffic.trace, facts.max_model_len, options.too_long)
    engine = EngineRunner(host, values, record.ceiling, options.seed, note)
    engine.ensure_started()
    note(f"engine started, waiting for rounds of {prepared.run_path}")
    return _Worker(journal, engine, trace, aim_of(options, trace), note)
