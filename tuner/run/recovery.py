"""A run's study when the run begins or goes on: nothing that was measured is lost on the way.

Each trial is kept twice, in the study and in `trials.jsonl`. Where the study is gone or lacks
trials, as after a power loss, with a copied directory or another --storage, they are restored
from the file; the file is never overwritten with less than it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tuner.errors import UsageError
from tuner.replay.slo import Slo
from tuner.run.directory import TRIALS_FILE, RunDir
from tuner.run.journal import Journal, NoStudyError, Recorded
from tuner.search.trials import Trial


def open_journal(
    storage: str, study: str, run_dir: RunDir, slos: Sequence[Slo], *, is_resumed: bool
) -> tuple[Journal, list[str]]:
    """Return the run's journal, and what has to be said of it.

    Raises: UsageError if the storage cannot be opened; NoStudyError if a run is to go on whose
        trials are nowhere.
    """
    trials, damaged = _read_trials(run_dir, slos)
    records = [record for record, _ in trials]
    messages = []
    if is_resumed:
        journal, has_gone = _journal_again(storage, study, run_dir, is_restorable=bool(records))
        restored = journal.restore(trials)
        if restored:
            where = (
                "the storage has no study of this run" if has_gone else "the study lacked them"
            )
            messages.append(f"{restored} trials were restored from {TRIALS_FILE}: {where}")
    else:
        journal = Journal(storage, study)
    in_study = journal.records()
    known = {record.number for record in in_study}
    lacking = sum(record.number not in known for record in records)
    if lacking or damaged:
        aside = run_dir.set_aside(TRIALS_FILE)
        what = [(lacking, "trials that the study does not know"), (damaged, "damaged lines")]
        said = " and ".join(f"{count} {words}" for count, words in what if count)
        messages.append(f"{TRIALS_FILE} held {said}: it is kept as {aside.name}")
        run_dir.write_lines(TRIALS_FILE, in_study)
    return journal, messages


def _journal_again(
    storage: str, study: str, run_dir: RunDir, *, is_restorable: bool
) -> tuple[Journal, bool]:
    """Return the study of a run that goes on, and whether it had to be made anew."""
    try:
        return Journal(storage, study, must_exist=True), False
    except NoStudyError as gone:
        if not is_restorable:
            raise NoStudyError(
                f"{run_dir.path} cannot go on: {gone.message}, "
                f"and {TRIALS_FILE} holds no trial",
                "name the --storage that the run was begun with, or start a new run",
            ) from gone
    return Journal(storage, study), True


def _read_trials(run_dir: RunDir, slos: Sequence[Slo]) -> tuple[list[Recorded], int]:
    """Return the file's records by number with their slacks, and how many lines are damaged."""
    path = run_dir.path / TRIALS_FILE
    found: list[Recorded] = []
    damaged = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = msgspec.json.decode(line, type=Trial)
            found.append((record, _slacks(record, slos)))
        except (msgspec.MsgspecError, UsageError, KeyError, TypeError):
            damaged += 1
    return sorted(found, key=lambda one: one[0].number), damaged


def _slacks(record: Trial, slos: Sequence[Slo]) -> dict[str, float]:
    """Return the SLOs' slacks of a record, as they were kept with the measurement."""
    measured = record.measurement
    if measured is None:
        return {}
    values = {slo: measured[slo.metric][slo.statistic] for slo in slos}
    return {
        slo.name: 0.0 if value is None else value / slo.bound_s - 1.0
        for slo, value in values.items()
    }
