"""The trials of a run, kept in an Optuna study so that nothing measured is ever lost.

Answers what was measured so far, also after a crash, and hands the trials that wait to the
processes and machines that share the study. Which configuration to ask for is decided in
`search` and `confirm`; here it is enqueued, so that the study holds every trial with its
parameters, its value, its constraints and the whole measurement.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
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
from tuner.replay.plan import CutRule
from tuner.run.storage import Heart, opened, undisturbed_methods
from tuner.search.objective import Score, Tier
from tuner.search.race import RaceRun
from tuner.search.trials import Observation, Phase
from tuner.search.trials import Trial as Record

# Processes that may end while they have the same trial before it counts as failed: ours; a
# replay that takes the memory of all who touch it would go round for ever.
MAX_DEATHS = 3
# What a queued trial carries: the rule by which its replay may be cut.
QUEUED = "queued"
# Marks a claim whose process ended in order before it had measured.
RETURNED = "returned"

Key = tuple[EngineLimits, Phase, int]


def is_of(trial: FrozenTrial, phase: Phase) -> bool:
    """Whether a trial belongs to a phase."""
    return trial.user_attrs.get("phase") == str(phase)


def key_of(trial: FrozenTrial) -> Key:
    """Return what a trial is for."""
    attrs = trial.user_attrs
    return EngineLimits(**trial.params), Phase(attrs["phase"]), int(attrs["race_round"])


def present(trials: Iterable[FrozenTrial]) -> set[Key]:
    """Return what is measured or still will be; a trial given up is neither."""
    kept = (t for t in trials if "record" in t.user_attrs or not t.state.is_finished())
    return {key_of(t) for t in kept if t.params}


def lost(trials: Sequence[FrozenTrial]) -> tuple[dict[Key, Mapping[str, Any]], list[Key]]:
    """Return what was queued and is gone: what to queue again with its cut, what to give up."""
    queued = [t for t in trials if QUEUED in t.user_attrs]
    kept = present(trials)
    deaths = Counter(key_of(t) for t in queued if RETURNED not in t.user_attrs)
    gone = {key_of(t): t.user_attrs[QUEUED] for t in queued if key_of(t) not in kept}
    again = {key: cut for key, cut in gone.items() if deaths[key] < MAX_DEATHS}
    return again, [key for key in gone if key not in again]


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


@undisturbed_methods
class Journal:
    """An Optuna study as the list of what was measured and the queue of what is to be.

    The run's main process opens it: a trial without a record was interrupted while it ran, is
    marked failed then and does not count as measured. Workers join it, claim trials from the
    queue and leave those of others alone. A study that is to be there already (`must_exist`) is
    never made anew.

    Units: heartbeat_s and grace_s in whole seconds, as SQLite's clock ticks.
    Raises: UsageError if the storage cannot be opened; NoStudyError if it holds no such study.
    """

    def __init__(
        self,
        storage: str,
        study_name: str = STUDY_NAME,
        *,
        join: bool = False,
        must_exist: bool = False,
        heartbeat_s: int = HEARTBEAT_S,
        grace_s: int = GRACE_S,
    ) -> None:
        self._held: dict[int, tuple[Trial, Heart | None]] = {}
        self._known: set[Key] | None = None
        self._heartbeat_s = heartbeat_s
        optuna.logging.set_verbosity(logging.WARNING)
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
            self._fail_interrupted()

    def _fail_interrupted(self) -> None:
        """Mark what ran when the last process ended; workers may still be at theirs."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not (is_of(trial, Phase.SHADOW) and QUEUED in trial.user_attrs):
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

    def begin(self, limits: EngineLimits, phase: Phase, race_round: int = 0) -> int:
        """Note that a configuration is being measured and return the trial's number.

        The trial never waits in the queue, so no worker can claim it.
        """
        trial_id = self._add(limits, phase, race_round, TrialState.RUNNING)
        trial = Trial(self._study, trial_id)
        self._held[trial.number] = trial, None
        return trial.number

    def enqueue(
        self,
        limits: EngineLimits,
        phase: Phase,
        race_round: int = 0,
        cut: CutRule = CutRule(),  # noqa: B008 - frozen
    ) -> None:
        """Queue a configuration with its cut, unless it is there or measured already."""
        if self._known is None:
            self._known = present(self._study.get_trials(deepcopy=False))
        if (limits, phase, race_round) not in self._known:
            self._add(limits, phase, race_round, TrialState.WAITING, asdict(cut))

    def cut_of(self, number: int) -> CutRule:
        """Return when the replay of a trial that this process has claimed may be cut short."""
        trial, _ = self._held[number]
        return CutRule(**trial.user_attrs[QUEUED])

    def _add(
        self,
        limits: EngineLimits,
        phase: Phase,
        race_round: int,
        state: TrialState,
        cut: Mapping[str, Any] | None = None,
    ) -> int:
        """Add a trial and return its id; one that waits is marked as queued, with its cut."""
        queued = {QUEUED: dict(cut or {})} if state is TrialState.WAITING else {}
        trial = optuna.create_trial(
            state=state,
            params=asdict(limits),
            distributions=dict(_DISTRIBUTIONS),
            user_attrs={"phase": str(phase), "race_round": race_round, **queued},
        )
        trial_id = self._storage.create_new_trial(self._study_id, trial)
        if self._known is not None:
            self._known.add((limits, phase, race_round))
        return trial_id

    def claim(self, phase: Phase) -> tuple[int, EngineLimits] | None:
        """Take the first waiting trial of a phase for this process, or None if none waits.

        The heart beats before the claim is made: a process that dies right after it leaves a
        trial that can be told to be stale, and a beat on another's trial does no harm.
        """
        for waiting in self._of(phase, TrialState.WAITING):
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
            return waiting.number, EngineLimits(**waiting.params)
        return None

    def _beat(self, trial_id: int) -> None:
        """Beat once; a storage out of reach for a moment is tried again at the next beat."""
        with suppress(StorageInternalError, SQLAlchemyError):
            self._storage.record_heartbeat(trial_id)

    def finish(
        self,
        number: int,
        score: Score,
        slacks: Mapping[str, float],
        record: Record,
    ) -> bool:
        """Keep what a trial measured, or why it did not; tell whether it counts.

        It does not when the trial was given up as dead meanwhile: another worker has it.
        """
        trial, heart = self._held.pop(number)
        state = _STATES.get(score.tier, TrialState.COMPLETE)
        values = score.value if state is TrialState.COMPLETE else None
        try:
            for name, slack in slacks.items():
                trial.set_constraint(name, slack)
            trial.set_user_attr("record", msgspec.to_builtins(record))
            # From here on it counts: give_back_stale leaves a trial with a record alone.
            with suppress(UpdateFinishedTrialError):
                self._study.tell(trial, values, state=state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            return False
        finally:
            if heart is not None:
                heart.stop()
        return True

    def give_back_stale(self) -> int:
        """Enqueue again what a dead process had claimed, and return how many those were.

        What several died of is given up and counts as failed. What is missing is read off the
        study, so that a main process killed between the two steps loses nothing. Only the main
        process can call it: two would both enqueue.
        """
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            optuna.storages.fail_stale_trials(self._study)
        again, hopeless = lost(self._study.get_trials(deepcopy=False))
        for key, cut in again.items():
            self._add(*key, TrialState.WAITING, cut)
        for key in hopeless:
            self._give_up(*key)
        return len(again) + len(hopeless)

    def _give_up(self, limits: EngineLimits, phase: Phase, race_round: int) -> None:
        """Record that a configuration ended every process that replayed it."""
        number = self.begin(limits, phase, race_round)
        score = Score(Tier.FAILED, math.inf, "failed")
        cause = f"{MAX_DEATHS} processes ended while they replayed it, most likely of memory"
        record = Record.of(number, limits, phase, race_round, score, None, cause)
        self.finish(number, score, {}, record)

    def restore(self, trials: Iterable[tuple[Record, Mapping[str, float]]]) -> int:
        """Add the records that come after all the study holds, and return how many those were.

        Each becomes the trial that it was, under its own number; a number that no record has
        was one that was interrupted. What the study holds stays as it is. A trial is its record
        and the slacks of its SLOs; their numbers ascend.
        """
        held = len(self._study.get_trials(deepcopy=False))
        added = 0
        for record, slacks in trials:
            if record.number < held:
                continue
            while held < record.number:
                interrupted = optuna.create_trial(state=TrialState.FAIL)
                self._storage.create_new_trial(self._study_id, interrupted)
                held += 1
            number = self.begin(record.limits, record.phase, record.race_round)
            self.finish(number, record.score, slacks, record)
            held, added = number + 1, added + 1
        return added

    def waiting(self, phase: Phase) -> int:
        """Return how many trials of a phase nobody has claimed yet."""
        return len(self._of(phase, TrialState.WAITING))

    def unfinished(self, phase: Phase) -> int:
        """Return how many trials of a phase wait or run."""
        return len(self._of(phase, TrialState.WAITING, TrialState.RUNNING))

    def _of(self, phase: Phase, *states: TrialState) -> list[FrozenTrial]:
        trials = self._study.get_trials(deepcopy=False, states=states)
        return [trial for trial in trials if is_of(trial, phase)]

    def close(self) -> None:
        """Let the hearts of all claims stop, return what they hold, and the storage go."""
        for trial, heart in self._held.values():
            if heart is not None:
                heart.stop()
                with suppress(StorageInternalError, SQLAlchemyError, UpdateFinishedTrialError):
                    trial.set_user_attr(RETURNED, value=True)
        self._held.clear()
        self._storage.remove_session()
        self._storage.engine.dispose()

    def records(self) -> list[Record]:
        """Return the records of every trial that ended, in order.

        A shadow's trial counts once, however often it was measured. Optuna keeps the trials
        that ended and reads only the others again, so this is cheap to ask often.
        """
        kept: dict[object, Record] = {}
        for trial in self._study.get_trials(deepcopy=False, states=_ENDED):
            if "record" in trial.user_attrs:
                key = key_of(trial) if is_of(trial, Phase.SHADOW) else trial.number
                if key not in kept:
                    kept[key] = msgspec.convert(trial.user_attrs["record"], Record)
        return list(kept.values())

    def observations(self) -> list[Observation]:
        """Return what the search needs to know of every trial that ended."""
        return [record.observation for record in self.records()]

    def race_runs(self) -> list[RaceRun]:
        """Return the replays of the race."""
        return [
            RaceRun(r.limits, r.race_round, r.score, r.attempt)
            for r in self.records()
            if r.phase is Phase.RACE
        ]
