"""Read a recommendation: from a run directory, or from a file that a run wrote.

Answers what was recommended, for which configuration, and on what evidence. A run directory
knows all of it but the secrets; a file knows its values, and its evidence as comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tuner.emit.recommendation import (
    CAPPED,
    EXACT,
    LIVE_LIMIT_KEYS,
    Recommendation,
    facts_in,
    facts_of_run,
    first_comments,
    kept_back_in,
    without_lost,
)
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    hyphenated,
    read_config,
)
from tuner.engine.serve_config import limits as limits_of
from tuner.errors import Caveat, UsageError
from tuner.run.directory import PROFILE_FILE, RESULT_FILE, RUN_FILE
from tuner.run.result import SCHEMA, MetricChange, RunResult, comments, kv_text
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.shadow.profiles import read_profile
from tuner.stats import Estimate

_NAME_A_SOURCE: Final = "name a run directory, or a YAML file that tune wrote"


def read_source(path: Path) -> Recommendation:
    """Return what a run directory, or a file that a run wrote, recommends.

    Raises: UsageError if there is nothing, or nothing that could be deployed.
    """
    if path.is_dir():
        return read_run(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist", _NAME_A_SOURCE)
    return read_emitted(path)


def read_run(folder: Path) -> Recommendation:
    """Return what a run recommends. Raises: UsageError, naming what is missing."""
    content = _result(folder)
    try:
        return recommendation_of(content, _serve_values(folder, content), folder)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{folder / RESULT_FILE} is damaged: {reason}",
            "restore it, or emit from the YAML file that the run wrote",
        ) from error


def recommendation_of(
    content: Mapping[str, Any], values: Mapping[str, object], folder: Path
) -> Recommendation:
    """Return the recommendation of a run, given its result and the engine's configuration.

    Raises: UsageError if it recommends nothing; KeyError, TypeError or ValueError if the result
        is not of the form that outcome.make_outcome gives it.
    """
    if content["recommendation"] is None:
        raise UsageError(
            f"{folder} recommends nothing: no configuration met the SLOs",
            "relax an SLO, or lower --load, and run again",
        )
    told = outcome_of(content)
    kept, lost = without_lost(values)
    return Recommendation(
        values=kept,
        limits=told.decision.winner,
        comments=tuple(comments(told, "", str(folder))[1:]),
        facts=facts_of_run(content, told, folder),
        started_at=_started_at(content, told.decision.winner),
        lost=lost,
    )


def outcome_of(content: Mapping[str, Any]) -> RunResult:
    """Return the outcome that a result was written from.

    Raises: KeyError, TypeError or ValueError if the result has another form.
    """
    found = content["recommendation"]
    winner = _limits(found)
    decision = RaceDecision(
        verdict=RaceVerdict(found["verdict"]),
        winner=winner,
        best=_limits(found["best_measured"]),
        tied=tuple(map(_limits, found["tied"])),
        gain=_estimate(found["gain_ratio"], found["gain_interval"], found["rounds"], 1.0),
        rounds=found["rounds"],
        why=found["why"],
        metric=found.get("gain_metric", ""),
        is_predicted=found.get("is_predicted", False),
    )
    return RunResult(
        decision=decision,
        present=_limits(content["baseline"]),
        changes=tuple(map(_row, content["evidence"])),
        limited_by=content["limited_by"],
        load=content.get("load", ""),
        kv=kv_text(content["trials"], winner),
        caveats=tuple(Caveat(caveat["id"]) for caveat in content["caveats"]),
        state=content["state"],
        feasible=True,
        content=dict(content),
    )


def read_emitted(path: Path) -> Recommendation:
    """Return what a file for `vllm serve --config` says, its first comments as evidence.

    Raises: UsageError if it is no such file, or names no model or no limits.
    """
    values = dict(read_config(path).values)
    missing = [k for k in ("model", MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS) if k not in values]
    if missing:
        got = ", ".join(list(values)[:5]) or "nothing"
        raise UsageError(
            f"{path} is no configuration that tune wrote: it lacks {', '.join(missing)}, "
            f"got {got}",
            _NAME_A_SOURCE,
        )
    start = _limits_in(values)
    # A file of the exact form: its caps are what was tuned, its limits what was started.
    given = zip(
        LIVE_LIMIT_KEYS, (start.max_num_seqs, start.max_num_batched_tokens), strict=True
    )
    caps = [values.get(key, limit) for key, limit in given]
    is_exact = any(key in values for key in LIVE_LIMIT_KEYS)
    tuned = _limits_in(dict(zip((MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS), caps, strict=True)))
    # What was left out of that file, and what it was for, is no longer true of the next.
    stale = (CAPPED, EXACT)
    above = first_comments(path)
    there = {hyphenated(key) for key in values}
    lost = tuple(key for key in kept_back_in(above) if hyphenated(key) not in there)
    said = [line for line in above if not line.endswith(stale) and not kept_back_in([line])]
    return Recommendation(
        values={key: value for key, value in values.items() if key not in LIVE_LIMIT_KEYS},
        limits=tuned,
        comments=tuple(said),
        facts=facts_in(said, tuned),
        started_at=start if is_exact else None,
        lost=lost,
    )


def _limits_in(values: Mapping[str, object]) -> EngineLimits:
    """Return both limits of a configuration that names them. Raises: UsageError."""
    return EngineLimits(*(number or 1 for number in limits_of(values)))


def _result(folder: Path) -> dict[str, Any]:
    """Return result.json. Raises: UsageError if there is none that can be read."""
    path = folder / RESULT_FILE
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        began = (folder / RUN_FILE).is_file()
        raise UsageError(
            f"{folder} holds no result: {RESULT_FILE} is missing",
            f"go on with tune --resume {folder}" if began else _NAME_A_SOURCE,
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} cannot be read: {error}", _NAME_A_SOURCE) from error
    if content.get("schema") != SCHEMA:
        raise UsageError(
            f"{path}: schema must be {SCHEMA}, got {content.get('schema')!r}",
            "emit with the version of tune that made the run",
        )
    return content


def _serve_values(folder: Path, content: Mapping[str, Any]) -> dict[str, object]:
    """Return the engine's configuration, which older runs kept in their profile alone.

    Raises: UsageError if neither holds it.
    """
    kept = content.get("serve_values")
    if isinstance(kept, dict):
        return kept
    profile = folder / PROFILE_FILE
    if not profile.is_file():
        raise UsageError(
            f"{folder} does not hold the engine's configuration: neither {RESULT_FILE} nor "
            f"{PROFILE_FILE} has it",
            "emit from the YAML file that the run wrote",
        )
    return dict(read_profile(profile).serve_values)


def _limits(found: Mapping[str, Any]) -> EngineLimits:
    return EngineLimits(found["max_num_seqs"], found["max_num_batched_tokens"])


def _started_at(content: Mapping[str, Any], winner: EngineLimits) -> EngineLimits | None:
    """Return the limits that the measured engine was started with."""
    ids = {caveat["id"] for caveat in content["caveats"]}
    if Caveat.RESTARTED_PER_CONFIG in ids:
        return winner
    engine = content["provenance"]["engine"]
    return None if engine is None else _limits(engine["started_at_limits"])


def _estimate(
    value: float | None, interval: Sequence[float] | None, n: int, offset: float = 0.0
) -> Estimate | None:
    if value is None:
        return None
    low, high = interval or (None, None)
    return Estimate(
        value + offset,
        None if low is None else low + offset,
        None if high is None else high + offset,
        n,
    )


def _row(found: Mapping[str, Any]) -> MetricChange:
    unit, rounds = str(found["unit"]), found["rounds"]
    return MetricChange(
        metric=found["metric"],
        # Row writes a unit behind a blank, a rate without one.
        unit=unit if unit.startswith("/") else f" {unit}",
        before=found["before"],
        after=found["after"],
        change=_estimate(found["change_ratio"], found["change_interval"], rounds),
        rounds=rounds,
        is_helped=found.get("is_helped", False),
    )
