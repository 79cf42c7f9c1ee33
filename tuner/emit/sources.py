"""Read a recommendation: from a run directory, or from a file that a run wrote.

Answers what was recommended, for which configuration, and on what evidence. A run directory
knows all of it but the secrets; a file knows its values, and its evidence as comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tuner.emit.comments import SET_BESIDE, comments
from tuner.emit.recommendation import (
    CAPPED,
    EXACT,
    Recommendation,
    facts_in,
    facts_of_run,
    first_comments,
    kept_back_in,
    without_lost,
)
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import (
    LIVE_LIMIT_KEYS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    hyphenated,
    read_config,
    twin,
)
from tuner.engine.serve_config import limits as limits_of
from tuner.errors import Caveat, UsageError
from tuner.run.directory import folder_of_run
from tuner.run.result import NOTHING_FEASIBLE, RunResult, read_result

_NAME_A_SOURCE: Final = "name a run directory, or a YAML file that tune wrote"


def read_source(path: Path) -> Recommendation:
    """Return what a run directory, or a file that a run wrote, recommends.

    Raises: UsageError if there is nothing, or nothing that could be deployed.
    """
    folder = folder_of_run(path)
    if folder.is_dir():
        return read_run(folder)
    if not path.exists():
        raise UsageError(f"{path} does not exist", _NAME_A_SOURCE)
    return read_emitted(path)


def read_run(folder: Path) -> Recommendation:
    """Return what a run recommends. Raises: UsageError, naming what is missing."""
    result = read_result(folder)
    return recommendation_of(result, result.serve_values, folder)


def recommendation_of(
    result: RunResult, values: Mapping[str, object], folder: Path
) -> Recommendation:
    """Return the recommendation of a run, given its result and the engine's configuration.

    Raises: UsageError if it recommends nothing.
    """
    advice = result.recommendation
    if advice is None:
        raise UsageError(f"{folder} recommends nothing: {NOTHING_FEASIBLE}", result.way_out)
    limits = result.deployed
    remaining, lost = without_lost(values)
    return Recommendation(
        values=remaining,
        limits=limits,
        comments=tuple(comments(result, advice, str(folder))),
        facts=facts_of_run(result, advice, folder),
        started_at=_started_at(result, limits),
        lost=lost,
        knobs={} if result.knobs is None else result.knobs.deployed,
    )


def read_emitted(path: Path, hint: str = _NAME_A_SOURCE) -> Recommendation:
    """Return what a file for `vllm serve --config` says, its first comments as evidence.

    Raises: UsageError if it is no such file, or names no model or no limits; `hint` says what
        to do then.
    """
    values = read_config(path)
    missing = [k for k in ("model", MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS) if k not in values]
    if missing:
        got = ", ".join(list(values)[:5]) or "nothing"
        raise UsageError(
            f"{path} is no configuration that tune wrote: it lacks {', '.join(missing)}, "
            f"got {got}",
            hint,
        )
    # In a file of the exact form caps are what was tuned, and the limits what was started.
    uncapped = {key: value for key, value in values.items() if key not in LIVE_LIMIT_KEYS}
    start, tuned = _limits_in(uncapped), _limits_in(values)
    # What was left out of that file, and what it was for, is no longer true of the next.
    stale = (CAPPED, EXACT)
    above = first_comments(path)
    there = {hyphenated(key) for key in values}
    lost = tuple(key for key in kept_back_in(above) if hyphenated(key) not in there)
    said = [line for line in above if not line.endswith(stale) and not kept_back_in([line])]
    return Recommendation(
        values=uncapped,
        limits=tuned,
        comments=tuple(said),
        facts=facts_in(said, tuned),
        started_at=None if len(uncapped) == len(values) else start,
        lost=lost,
        knobs=_knobs_in(values, said),
    )


def _knobs_in(values: Mapping[str, object], comments: Sequence[str]) -> dict[str, object]:
    """Return what a file sets beside the limits, by the comment that names it."""
    named = next((line for line in comments if line.startswith(SET_BESIDE)), "")
    keys = [key for key in named.removeprefix(SET_BESIDE).split(", ") if key]
    said = {key: values[key] for key in keys if key in values}
    return said | {key: False for key in keys if values.get(twin(key)) is True}


def _limits_in(values: Mapping[str, object]) -> EngineLimits:
    """Return both limits of a configuration that names them. Raises: UsageError."""
    return EngineLimits(*(number or 1 for number in limits_of(values)))


def _started_at(result: RunResult, winner: EngineLimits) -> EngineLimits | None:
    """Return the limits that the measured engine was started with."""
    if Caveat.RESTARTED_PER_CONFIG in {caveat.id for caveat in result.caveats}:
        return winner
    engine = result.provenance.engine
    return None if engine is None else engine.started_at_limits
