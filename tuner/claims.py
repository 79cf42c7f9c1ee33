"""Read off a study's trials what of its queue is measured, waits, or was lost with a process.

Pure: trials in, keys out. Queueing and claiming is done by `journal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial

from tuner.engine.limits import EngineLimits
from tuner.search.trials import Phase

# Processes that may end while they have the same trial before it counts as failed: ours; a
# replay that takes the memory of all who touch it would go round for ever.
MOST_DEATHS = 3
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
    again = {key: cut for key, cut in gone.items() if deaths[key] < MOST_DEATHS}
    return again, [key for key in gone if key not in again]
