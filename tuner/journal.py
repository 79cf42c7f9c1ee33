"""The trials of a run, kept in an Optuna study so that nothing measured is ever lost.

Answers what was measured so far, also after a crash. Which configuration to ask for is decided
in `search` and `confirm`; here it is enqueued, so that the study holds every trial with its
parameters, its value, its constraints and the whole measurement.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from tuner.confirm import RaceRun
from tuner.engine.protocol import EngineLimits
from tuner.errors import UsageError
from tuner.objective import Score, Tier
from tuner.observation import Observation, Phase

STUDY_NAME = "tune"
# Wide enough for any vLLM: a distribution must not change between the trials of a study.
_DISTRIBUTIONS = {
    "max_num_seqs": IntDistribution(1, 1 << 20),
    "max_num_batched_tokens": IntDistribution(1, 1 << 24),
}
_STATES = {Tier.CUT: TrialState.PRUNED, Tier.FAILED: TrialState.FAIL}


class Journal:
    """An Optuna study as the list of what was measured.

    A trial without a record was interrupted while it ran; it is marked failed when the journal
    is opened again and does not count as measured.

    Raises: UsageError if the storage cannot be opened.
    """

    def __init__(self, storage: str, study_name: str = STUDY_NAME) -> None:
        self._asked: dict[int, Trial] = {}
        optuna.logging.set_verbosity(logging.WARNING)
        try:
            self._study = optuna.create_study(
                storage=storage,
                study_name=study_name,
                direction="minimize",
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(seed=0),
            )
        except (SQLAlchemyError, ImportError, ValueError) as refused:
            raise UsageError(
                f"the study's storage cannot be opened: {str(refused).splitlines()[0]}",
                "--storage takes an SQLAlchemy URL, for example sqlite:///study.db",
            ) from refused
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    @property
    def study_name(self) -> str:
        """The name under which the storage knows this run."""
        return self._study.study_name

    def begin(self, limits: EngineLimits, phase: Phase, race_round: int = 0) -> int:
        """Note that a configuration is being measured and return the trial's number."""
        params = {
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
        }
        self._study.enqueue_trial(
            params, user_attrs={"phase": str(phase), "race_round": race_round}
        )
        trial = self._study.ask(fixed_distributions=dict(_DISTRIBUTIONS))
        self._asked[trial.number] = trial
        return trial.number

    def finish(
        self,
        number: int,
        score: Score,
        slacks: Mapping[str, float],
        record: Mapping[str, Any],
    ) -> None:
        """Keep what a trial measured, or why it did not."""
        trial = self._asked.pop(number)
        for name, slack in slacks.items():
            trial.set_constraint(name, slack)
        trial.set_user_attr("record", dict(record))
        state = _STATES.get(score.tier, TrialState.COMPLETE)
        values = score.value if state is TrialState.COMPLETE else None
        self._study.tell(trial, values, state=state)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of every trial that ended, in order."""
        trials = self._study.get_trials(deepcopy=False)
        return [dict(t.user_attrs["record"]) for t in trials if "record" in t.user_attrs]

    def observations(self) -> list[Observation]:
        """Return what the search needs to know of every trial that ended."""
        return [observation_of(record) for record in self.records()]

    def race_runs(self) -> list[RaceRun]:
        """Return the replays of the race."""
        return [
            RaceRun(o.limits, o.race_round, o.score)
            for o in self.observations()
            if o.phase is Phase.RACE
        ]


def record_of(
    number: int,
    limits: EngineLimits,
    phase: Phase,
    race_round: int,
    score: Score,
    measurement: Mapping[str, Any] | None,
    cause: str = "",
) -> dict[str, Any]:
    """Return a trial as JSON: what `trials.jsonl` and `result.json` hold."""
    return {
        "number": number,
        "phase": str(phase),
        "race_round": race_round,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "tier": str(score.tier),
        "value": score.value if score.tier not in (Tier.CUT, Tier.FAILED) else None,
        "metric": score.metric,
        "cause": cause,
        "measurement": measurement,
    }


def observation_of(record: Mapping[str, Any]) -> Observation:
    """Return a record as the search sees it."""
    measured = record["measurement"] or {}
    value = record["value"]
    step = measured.get("decode_step_s") or {}
    return Observation(
        number=int(record["number"]),
        limits=EngineLimits(int(record["max_num_seqs"]), int(record["max_num_batched_tokens"])),
        phase=Phase(record["phase"]),
        score=Score(
            Tier(record["tier"]),
            float("inf") if value is None else float(value),
            str(record["metric"]),
        ),
        peak_running=int((measured.get("running") or {}).get("max") or 0),
        peak_step_tokens=int(measured.get("max_step_tokens") or 0),
        decode_step_s=step.get("p50"),
        race_round=int(record["race_round"]),
    )


def race_records(
    records: Sequence[Mapping[str, Any]], limits: EngineLimits
) -> dict[int, Mapping[str, Any]]:
    """Return the race's measurements of one configuration by round."""
    return {
        int(r["race_round"]): r["measurement"]
        for r in records
        if r["phase"] == str(Phase.RACE)
        and r["measurement"] is not None
        and EngineLimits(r["max_num_seqs"], r["max_num_batched_tokens"]) == limits
    }
