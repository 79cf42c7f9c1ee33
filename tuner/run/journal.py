"""The trials of a run, kept in an Optuna study so that nothing measured is ever lost.

Answers what was measured so far, also after a crash, and hands the rounds that wait to the
processes and machines that share the study. The study holds every trial with its parameters,
its value, its constraints and the whole measurement.

Each trial is kept twice, in the study and in `trials.jsonl`. Where the study is gone or lacks
trials, as after a power loss, with a copied directory or another --storage, they are restored
from the file; the file is never overwritten with less than it holds.

A database server that goes away is waited for. What was asked of it then is asked again, so
every step does nothing that it has done already.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import optuna
from optuna.distributions import IntDistribution
from optuna.exceptions import (
    ExperimentalWarning,
    StorageInternalError,
    UpdateFinishedTrialError,
)
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.files import UNREADABLE
from tuner.replay.slo import Slo
from tuner.run.directory import TRIALS_FILE, RunDir
from tuner.run.storage import (
    Heart,
    Outages,
    is_damaged,
    opened,
    outlasting_methods,
    undisturbed_methods,
)
from tuner.search.objective import Tier, recorded_slacks
from tuner.search.race import RaceRun
from tuner.search.trials import Phase
from tuner.search.trials import Trial as Record
from tuner.shadow.design import Block
from tuner.traffic.windows import Window

# What a queued trial carries: the round that is to be replayed.
ROUND = "round"
# Marks a round whose replays are all kept, and each of those with the round's number.
DONE, PART_OF = "done", "part_of"
# By which a trial is known that was added just before the storage went away.
ONCE = "once"
# Marks a round that is wanted no more.
WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Round:
    """Replays of several settings in turns, to be made by one process on one engine.

    The settings in their order, each cut after its `max_wall_s`, on windows of the run's trace
    at a multiple of its load; to calibrate, on a block each of what is predicted.

    Units: seconds.
    """

    phase: Phase
    number: int
    settings: tuple[EngineLimits, ...]
    max_wall_s: tuple[float, ...]
    windows: tuple[Window, ...] = ()
    load: float = 1.0
    blocks: tuple[Block, ...] = ()

    @property
    def key(self) -> tuple[Phase, int]:
        """What tells it from all others of the run."""
        return self.phase, self.number


def _round_of(trial: FrozenTrial) -> Round:
    return msgspec.convert(trial.user_attrs[ROUND], Round)


def _is_alive(trial: FrozenTrial) -> bool:
    """Whether a round is done or still will be."""
    return DONE in trial.user_attrs or not trial.state.is_finished()


STUDY_NAME = "tune"


class NoStudyError(UsageError):
    """The storage holds no study of that name."""


# A claim beats this often, and is given up when it has not for so long: ours; five beats may
# be lost before a worker counts as dead, and a dead one costs seconds, not a replay.
HEARTBEAT_S = 2
GRACE_S = 10
# Wide enough for any vLLM: a distribution must not change between the trials of a study.
_DISTRIBUTIONS = {
    "max_num_seqs": IntDistribution(1, 1 << 20),
    "max_num_batched_tokens": IntDistribution(1, 1 << 24),
}
_STATES = {Tier.CUT: TrialState.PRUNED, Tier.FAILED: TrialState.FAIL}
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


def _ending(record: Record) -> tuple[TrialState, float | None]:
    """Return how a trial ends in the study, and with which value."""
    state = _STATES.get(record.tier, TrialState.COMPLETE)
    return state, record.score.value if state is TrialState.COMPLETE else None


@outlasting_methods
@undisturbed_methods
class Journal:
    """An Optuna study as the list of what was measured and the queue of what is to be.

    The run's main process opens it: a trial without a record was interrupted while it ran, is
    marked failed then and does not count as measured. Workers join it, claim rounds from the
    queue and leave those of others alone. A study that is to be there already (`must_exist`) is
    never made anew. `note` receives when the storage goes away, and when it is back.

    Units: heartbeat_s and grace_s in whole seconds, as SQLite's clock ticks.
    Raises: UsageError if the storage cannot be opened; NoStudyError if it holds no such study;
        StorageError, by every method, if it fails, stays away, or is damaged.
    """

    def __init__(
        self,
        storage: str,
        study_name: str = STUDY_NAME,
        slos: Sequence[Slo] = (),
        *,
        join: bool = False,
        must_exist: bool = False,
        heartbeat_s: int = HEARTBEAT_S,
        grace_s: int = GRACE_S,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.outages = Outages(note)
        self._slos, self._grace_s = slos, grace_s
        self._held: dict[int, tuple[Trial, Heart | None]] = {}
        self._heartbeat_s = heartbeat_s
        # What it warns of, it raises as well, and that is told below in our words.
        optuna.logging.set_verbosity(logging.ERROR)
        try:
            self._storage = opened(storage, heartbeat_s, grace_s, join=join or must_exist)
            if not (join or must_exist):
                optuna.create_study(
                    storage=self._storage, study_name=study_name, load_if_exists=True
                )
            self._study = optuna.load_study(storage=self._storage, study_name=study_name)
        except KeyError as missing:
            raise NoStudyError(
                f"the storage holds no study named {study_name!r}",
                "start the run first; its workers join it with the same --storage",
            ) from missing
        except (SQLAlchemyError, StorageInternalError, ImportError, ValueError) as refused:
            raise UsageError(
                f"the study's storage cannot be opened: {str(refused).splitlines()[0]}",
                "--storage takes an SQLAlchemy URL, for example sqlite:///study.db or, with the"
                " extra `postgres` installed, postgresql+psycopg://user@host/database",
            ) from refused
        self._study_id = self._storage.get_study_id_from_name(study_name)
        if not join:
            self.outages.outlast(self._fail_interrupted)

    def _fail_interrupted(self) -> None:
        """Mark what ran when the last process ended; workers may still be at theirs."""
        for trial in self._trials(TrialState.RUNNING):
            if ROUND not in trial.user_attrs:
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    @property
    def study_name(self) -> str:
        """The name under which the storage knows this run."""
        return self._study.study_name

    @property
    def state(self) -> str:
        """What the main process last said of the run; empty before it said anything."""
        return str(self._study.user_attrs.get("state", ""))

    def set_state(self, text: str) -> None:
        """Say where the run is, so that its workers hear when it is over."""
        self._study.set_user_attr("state", text)

    def begin(self, limits: EngineLimits) -> int:
        """Note that a configuration is being measured and return the trial's number.

        The trial never waits in the queue, so no worker can claim it.
        """
        trial = Trial(self._study, self._create(limits, TrialState.RUNNING, {}))
        self._held[trial.number] = trial, None
        return trial.number

    def _create(self, limits: EngineLimits, state: TrialState, attrs: Mapping[str, Any]) -> int:
        """Create a trial that has not ended, and return its id."""
        trial = optuna.create_trial(
            state=state,
            params=asdict(limits),
            distributions=dict(_DISTRIBUTIONS),
            user_attrs=dict(attrs),
        )
        return int(self._storage.create_new_trial(self._study_id, trial))

    def offer(self, rounds: Iterable[Round]) -> None:
        """Queue rounds for whoever is first to claim them, each once."""
        known = {_round_of(t).key for t in self._rounds() if _is_alive(t)}
        for one in rounds:
            if one.key not in known:
                attrs = {ROUND: msgspec.to_builtins(one)}
                self._create(one.settings[0], TrialState.WAITING, attrs)

    def withdraw(self, phase: Phase) -> None:
        """Take from the queue what nobody has claimed."""
        for trial in self._rounds(TrialState.WAITING):
            if _round_of(trial).phase is phase:
                trial_id = self._storage.get_trial_id_from_study_id_trial_number(
                    self._study_id, trial.number
                )
                # As a claim, so that a worker that claims it at this moment keeps it.
                if self._storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                    self._storage.set_trial_user_attr(trial_id, WITHDRAWN, True)  # noqa: FBT003
                    self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def claim(self, *phases: Phase) -> tuple[int, Round] | None:
        """Take the first waiting round of the phases for this process, None if none waits.

        The heart beats before the claim is made: a process that dies right after it leaves a
        round that can be told to be stale, and a beat on another's round does no harm.
        """
        for waiting in self._rounds(TrialState.WAITING):
            if (one := _round_of(waiting)).phase not in phases:
                continue
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(
                self._study_id, waiting.number
            )
            self._storage.record_heartbeat(trial_id)
            try:
                if not self._storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                    continue
            except UpdateFinishedTrialError:
                continue
            heart = Heart(partial(self._beat, trial_id), self._heartbeat_s)
            self._held[waiting.number] = Trial(self._study, trial_id), heart
            return waiting.number, one
        return None

    def _beat(self, trial_id: int) -> None:
        """Beat once; a storage out of reach for a moment is tried again at the next beat."""
        with suppress(StorageInternalError, SQLAlchemyError):
            self._storage.record_heartbeat(trial_id)

    def finish(self, number: int, record: Record) -> bool:
        """Keep what a trial measured, or why it did not; tell whether it counts.

        It does not when the trial was given up as dead meanwhile: another worker has it.
        """

        def keep(trial: Trial) -> None:
            for name, slack in _slacks(record, self._slos).items():
                trial.set_constraint(name, slack)
            trial.set_user_attr("record", msgspec.to_builtins(record))

        return self._end(number, keep, *_ending(record))

    def _end(
        self,
        number: int,
        keep: Callable[[Trial], None],
        state: TrialState,
        value: float | None = None,
    ) -> bool:
        """Keep what came of a claim, and end it; tell whether that counts."""
        trial, heart = self._held[number]
        counts = True
        try:
            keep(trial)
            # From here on it counts: give_back_stale leaves what has a record, or is done.
            with suppress(UpdateFinishedTrialError):
                self._study.tell(trial, value, state=state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            counts = False
        del self._held[number]
        if heart is not None:
            heart.stop()
        return counts

    def finish_round(
        self, number: int, replays: Sequence[Record], more: Mapping[str, Any] | None = None
    ) -> bool:
        """Keep a claimed round's replays, and `more` beside it; tell whether they count.

        All of them count or none: they do not when the round was given up as dead meanwhile,
        since another process has it then.
        """

        def keep(trial: Trial) -> None:
            self.add(replays, part_of=number)
            for name, value in (more or {}).items():
                trial.set_user_attr(name, value)
            trial.set_user_attr(DONE, value=True)

        return self._end(number, keep, TrialState.PRUNED)

    def give_back_stale(self) -> int:
        """Queue again the rounds that dead processes had claimed; return how many those were.

        What is missing is read off the study, so that a main process killed between the two
        steps loses nothing. Only the main process can call it: two would both queue. Right
        after the storage was away nothing is given back, as no heart could beat.
        """
        if self.outages.since_s() < self._grace_s:
            return 0
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            optuna.storages.fail_stale_trials(self._study)
        known = {_round_of(t).key for t in self._rounds() if _is_alive(t)}
        gone = {
            (one := _round_of(t)).key: one
            for t in self._rounds(TrialState.FAIL)
            if not {DONE, WITHDRAWN} & set(t.user_attrs)
        }
        lost = [one for key, one in gone.items() if key not in known]
        self.offer(lost)
        return len(lost)

    def rounds(self, phase: Phase) -> dict[int, Mapping[str, Any]]:
        """Return what is kept beside the rounds of a phase that are done, by their number."""
        done = [t for t in self._rounds() if DONE in t.user_attrs]
        return {_round_of(t).number: t.user_attrs for t in done if _round_of(t).phase is phase}

    def _rounds(self, *states: TrialState) -> list[FrozenTrial]:
        return [trial for trial in self._trials(*states) if ROUND in trial.user_attrs]

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the study's trials, of these states or all. Raises: StorageError."""
        try:
            return self._study.get_trials(deepcopy=False, states=states or None)
        except (ValueError, TypeError, LookupError) as damaged:
            raise is_damaged(str(damaged) or type(damaged).__name__) from damaged

    def add(self, records: Sequence[Record], part_of: int | None = None) -> None:
        """Keep trials that have ended; those that are part of a round count once it is done."""
        known = set()
        if self.outages.were_any:
            known = {trial.user_attrs.get(ONCE) for trial in self._trials()}
        for place, record in enumerate(records):
            encoded = msgspec.json.encode((place, part_of, record))
            attrs: dict[str, Any] = {ONCE: blake2b(encoded, digest_size=8).hexdigest()}
            if attrs[ONCE] in known:
                continue
            if part_of is not None:
                attrs[PART_OF] = part_of
            state, value = _ending(record)
            self._study.add_trial(
                optuna.create_trial(
                    state=state,
                    value=value,
                    params=asdict(record.limits),
                    distributions=dict(_DISTRIBUTIONS),
                    user_attrs={"record": msgspec.to_builtins(record), **attrs},
                    constraints=_slacks(record, self._slos),
                )
            )

    def restore(self, records: Sequence[Record]) -> set[int]:
        """Add the records that the study lacks, and return their numbers in the file.

        Those that come after all it holds become the trials that they were, under their own
        numbers; a number that no record has was one that was interrupted. One that could not be
        kept as the storage was away gets a new number. What the study holds stays as it is.
        The records' numbers ascend.
        """
        held = len(self._trials())
        interrupted = {t.number for t in self._trials(TrialState.FAIL) if not t.user_attrs}
        late = [record for record in records if record.number in interrupted]
        added = {record.number for record in late}
        for record in records:
            if record.number < held:
                continue
            while held < record.number:
                failed = optuna.create_trial(state=TrialState.FAIL)
                self._storage.create_new_trial(self._study_id, failed)
                held += 1
            self.add([record])
            held += 1
            added.add(record.number)
        self.add(late)
        return added

    def close(self) -> None:
        """Let the hearts of all claims stop, and the storage go."""
        for _, heart in self._held.values():
            if heart is not None:
                heart.stop()
        self._held.clear()
        self._storage.remove_session()
        self._storage.engine.dispose()

    def records(self) -> list[Record]:
        """Return the records of every trial that ended, in order and numbered as they are here.

        Optuna keeps the trials that ended and reads only the others again, so this is cheap to
        ask often.
        """
        done = {t.number for t in self._rounds() if DONE in t.user_attrs}
        ended = [
            trial
            for trial in self._trials(*_ENDED)
            if "record" in trial.user_attrs
            and trial.user_attrs.get(PART_OF, trial.number) in done | {trial.number}
        ]
        try:
            return [
                replace(msgspec.convert(one.user_attrs["record"], Record), number=one.number)
                for one in ended
            ]
        except (msgspec.MsgspecError, UsageError) as damaged:
            raise is_damaged(str(damaged) or type(damaged).__name__) from damaged

    def last_prediction(self) -> int:
        """Return how often the space was predicted by now."""
        return max((record.prediction for record in self.records()), default=0)

    def race_runs(self) -> list[RaceRun]:
        """Return the replays of the race."""
        return [
            RaceRun(r.limits, r.race_round, r.score, r.attempt)
            for r in self.records()
            if r.phase is Phase.RACE
        ]


# Beginning and going on.


def open_journal(
    storage: str,
    study: str,
    run_dir: RunDir,
    slos: Sequence[Slo],
    note: Callable[[str], None],
    *,
    is_resumed: bool,
) -> tuple[Journal, list[str]]:
    """Return the run's journal, and what has to be said of it.

    Raises: UsageError if the storage cannot be opened; NoStudyError if a run is to go on whose
        trials are nowhere.
    """
    records, damaged = _read_trials(run_dir, slos)
    messages = []
    restored: set[int] = set()
    if is_resumed:
        again = partial(Journal, storage, study, slos, note=note)
        journal, has_gone = _journal_again(again, run_dir, is_restorable=bool(records))
        restored = journal.restore(records)
        if restored:
            where = (
                "the storage has no study of this run" if has_gone else "the study lacked them"
            )
            messages.append(f"{len(restored)} trials were restored from {TRIALS_FILE}: {where}")
    else:
        journal = Journal(storage, study, slos, note=note)
    in_study = journal.records()
    known = {record.number for record in in_study} | restored
    lacking = sum(record.number not in known for record in records)
    if lacking or damaged:
        aside = run_dir.set_aside(TRIALS_FILE)
        what = [(lacking, "trials that the study does not know"), (damaged, "damaged lines")]
        said = " and ".join(f"{count} {words}" for count, words in what if count)
        messages.append(f"{TRIALS_FILE} held {said}: it is kept as {aside.name}")
    if lacking or damaged or restored:
        # Under the numbers of the study, so that the next to go on restores nothing again.
        run_dir.write_lines(TRIALS_FILE, in_study)
    return journal, messages


def _journal_again(
    again: Callable[..., Journal], run_dir: RunDir, *, is_restorable: bool
) -> tuple[Journal, bool]:
    """Return the study of a run that goes on, and whether it had to be made anew."""
    try:
        return again(must_exist=True), False
    except NoStudyError as gone:
        if not is_restorable:
            raise NoStudyError(
                f"{run_dir.path} cannot go on: {gone.message}, "
                f"and {TRIALS_FILE} holds no trial",
                "name the --storage that the run was begun with, or start a new run",
            ) from gone
    return again(), True


def _read_trials(run_dir: RunDir, slos: Sequence[Slo]) -> tuple[list[Record], int]:
    """Return the file's records by number, and how many lines are damaged."""
    path = run_dir.path / TRIALS_FILE
    found: list[Record] = []
    damaged = 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = msgspec.json.decode(line, type=Record)
            _slacks(record, slos)  # a measurement without what an SLO bounds is damaged too
            found.append(record)
        except (*UNREADABLE, UsageError, KeyError, TypeError):
            damaged += 1
    return sorted(found, key=lambda record: record.number), damaged


def _slacks(record: Record, slos: Sequence[Slo]) -> dict[str, float]:
    return {} if record.measurement is None else recorded_slacks(slos, record.measurement)
