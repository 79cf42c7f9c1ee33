"""Shadows of a baseline's profile on new traffic, as `tune check` and `tune watch` need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tuner.cli.inputs import fit_lengths, profiled_engine, replay_plan
from tuner.console import say
from tuner.drift.baseline import Baseline
from tuner.drift.retune import Retune, retuning
from tuner.engine.limits import EngineLimits
from tuner.replay.process import Host
from tuner.run.directory import RunDir
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER, search_space
from tuner.shadow.pool import default_jobs
from tuner.traffic.traces import Trace


@dataclass(frozen=True, slots=True)
class Ready:
    """Shadows that can replay, what is aimed at, and the traffic as they can take it."""

    retune: Retune
    aim: Aim
    trace: Trace


@contextmanager
def shadows_on(
    read: Trace,
    baseline: Baseline,
    present: EngineLimits | None,
    options: Mapping[str, Any],
    host: Host,
    run_dir: RunDir,
) -> Iterator[Ready]:
    """Yield shadows of the baseline's profile for this traffic; they end with the block.

    `present` is None where the configuration that is named says it. Options that are not given
    are those of the baseline.

    Raises: TunerError.
    """
    given = {**options, "engine_args": (), "model": None}
    facts = host.facts(profiled_engine(given, baseline.profile).values)
    trace, told = fit_lengths(read, facts.max_model_len, options["too_long"])
    if told:
        say(told)
    ladder = options["max_num_seqs"] or DEFAULT_LADDER
    space = search_space(facts, trace, ladder, present or facts.present_limits)
    aim = Aim(
        Objective(options["objective"]) if options["objective"] else baseline.objective,
        tuple(options["slo"]) or baseline.slos,
        replay_plan(options, trace),
        Budget(options["budget"]),
        options["window"].resolve(trace) if options["window"] else None,
    )
    with retuning(
        host,
        run_dir,
        baseline.profile,
        space,
        jobs=options["jobs"] or default_jobs(),
        seed=options["seed"],
        is_forced=options["force_profile"],
    ) as retune:
        yield Ready(retune, aim, trace)
