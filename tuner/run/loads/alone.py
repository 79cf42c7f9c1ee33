"""Requests one at a time: which SLOs break even so, where no load is low enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.engine.limits import EngineLimits
from tuner.errors import EngineError, ShadowError
from tuner.replay.loop import ReplayLog
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.slo import Slo
from tuner.search.space import SearchSpace
from tuner.shadow.predictor import Predictor
from tuner.stats import short
from tuner.traffic.traces import LoadModel, Trace

# What else than the engine a latency depends on, where requests are alone in it.
_SHORTER = {"ttft_s": "shorten prompts", "e2e_s": "shorten prompts and answers"}


@dataclass(frozen=True, slots=True)
class Hopeless:
    """SLOs that break even where requests are alone in the engine, and what is reached then.

    Units: seconds.
    """

    reached_s: tuple[tuple[Slo, float], ...]

    @property
    def text(self) -> str:
        """Say what requests take alone.

        >>> Hopeless(((Slo.parse("ttft_p95=1ms"), 0.31),)).text
        'requests that are alone in the engine already take longer: ttft_p95 0.31 s, predicted'
        """
        reached = ", ".join(f"{slo.name} {short(value_s)} s" for slo, value_s in self.reached_s)
        return (
            f"requests that are alone in the engine already take longer: {reached}, predicted"
        )

    @property
    def hint(self) -> str:
        """Say what to do, as less load does not help.

        >>> Hopeless(((Slo.parse("tpot_p50=1ms"), 0.02),)).hint
        'no load is low enough: relax tpot_p50, or take other hardware or another precision'
        """
        names = " and ".join(slo.name for slo, _ in self.reached_s)
        shorter = [_SHORTER[slo.metric] for slo, _ in self.reached_s if slo.metric in _SHORTER]
        shortened = f"{max(shorter, key=len)}, " if shorter else ""
        return (
            f"no load is low enough: relax {names}, {shortened}"
            "or take other hardware or another precision"
        )


def hopeless(
    predictor: Predictor,
    settings: Sequence[EngineLimits],
    pieces: Sequence[Trace],
    slos: Sequence[Slo],
) -> Hopeless | None:
    """Return the SLOs that break at all of the settings though requests are alone, if any do.

    By more than the prediction is wrong. None as well where vLLM's own scheduler is asked,
    which takes too long, and where a request cannot be served at a setting, or it leaves no KV
    cache.

    Raises: UsageError where memory is short.
    """
    if predictor.doubt or not slos:
        return None
    reached = dict.fromkeys(slos, math.inf)
    for limits in dict.fromkeys(settings):
        try:
            found = measure(_logs_in_turn(predictor, limits, pieces), slos)
        except (EngineError, ShadowError):
            return None
        for slo in slos:
            value_s = found.slo_value(slo.metric, slo.statistic)
            reached[slo] = min(reached[slo], value_s or 0.0)
    surely = 1 + predictor.wrong_ratio
    broken = [(slo, s) for slo, s in reached.items() if s > surely * slo.bound_s]
    return Hopeless(tuple(broken)) if broken else None


def with_widest(limits: EngineLimits, space: SearchSpace) -> tuple[EngineLimits, ...]:
    """Return limits, and those in which a prompt takes fewest steps."""
    return limits, EngineLimits(limits.max_num_seqs, space.ceiling.max_num_batched_tokens)


def logs_alone(
    predictor: Predictor, limits: EngineLimits, pieces: Sequence[Trace]
) -> list[ReplayLog]:
    """Predict the measured requests of each piece one at a time, with nothing cached.

    Raises: EngineError for a request that cannot be served; ShadowError, UsageError.
    """
    measured = [piece.slice_rows(piece.is_measured) for piece in pieces]
    bare = [replace(piece, hashes=None) for piece in measured]
    return _logs_in_turn(predictor, limits, bare)


def _logs_in_turn(
    predictor: Predictor, limits: EngineLimits, pieces: Sequence[Trace]
) -> list[ReplayLog]:
    """Predict all requests one at a time, those that warm a window up too."""
    plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=1)
    pieces = [replace(piece, turns=None, lead_in_s=0.0) for piece in pieces]
    return [predictor.replay(piece, limits, plan) for piece in pieces]
