"""`tune plan --by hour`: the best configuration by hour of day, foretold from a profile."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.inputs import fit_lengths, profiled_engine, replay_plan
from tuner.cli.trace_options import read_named
from tuner.console import say
from tuner.drift.by_hour import (
    LEAST_REQUESTS,
    Calendar,
    Hour,
    calendar_of,
    hours_of,
    parse_offset,
)
from tuner.drift.retune import retuning, shadow_host
from tuner.errors import UsageError
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective
from tuner.search.space import DEFAULT_LADDER, search_space
from tuner.shadow.pool import default_jobs
from tuner.shadow.profiles import Profile, read_profile
from tuner.traffic.reshape import at_load
from tuner.traffic.traces import Trace

# How long one hour may take to rank, in seconds: as for one load of `tune plan`.
TIME_PER_HOUR_S = 120.0


def run_calendar(options: Mapping[str, Any]) -> int:
    """Foretell every hour of day and print the calendar. Raises: TunerError."""
    if not options["profile"]:
        raise UsageError(
            "--profile is missing",
            "name a profile, as profile.yaml in the directory of every live run",
        )
    if not options["trace"]:
        raise UsageError("--trace is missing", "name a week of traffic: --trace week.jsonl")
    profile = read_profile(Path(options["profile"]))
    offset_s = parse_offset(options["timezone"])
    trace = read_named(options["trace"], options)
    if options["window"]:
        trace = options["window"].resolve(trace).of(trace)
    _hours(trace, offset_s)  # refuses before an engine's library is loaded
    found = _foretold(options, profile, trace, offset_s)
    if options["as_json"]:
        encoded = msgspec.json.format(msgspec.json.encode(found.as_json()), indent=2)
        sys.stdout.write(encoded.decode() + "\n")
    else:
        sys.stdout.write("\n".join(found.lines()) + "\n")
    return 0


def _hours(trace: Trace, offset_s: float) -> tuple[Hour, ...]:
    """Return the hours with traffic. Raises: UsageError if there is none."""
    found = tuple(hours_of(trace, offset_s))
    if not found:
        raise UsageError(
            f"no hour of {trace.source} holds {LEAST_REQUESTS} requests", "record more traffic"
        )
    return found


def _foretold(
    options: Mapping[str, Any], profile: Profile, read: Trace, offset_s: float
) -> Calendar:
    """Replay every hour on shadows of the profile. Raises: TunerError."""
    is_forced = options["force_profile"]
    with shadow_host(profile, is_forced=is_forced) as (host, run_dir):
        given = {**options, "engine_args": (), "config": None, "model": None}
        facts = host.facts(profiled_engine(given, profile).values)
        trace, told = fit_lengths(read, facts.max_model_len, options["too_long"])
        if told:
            say(told)
        ladder = options["max_num_seqs"] or DEFAULT_LADDER
        scaled = at_load(trace, options["load"])
        space = search_space(facts, scaled, ladder, facts.present_limits)
        jobs, seed = options["jobs"] or default_jobs(), options["seed"]
        with retuning(
            host, run_dir, profile, space, jobs=jobs, seed=seed, is_forced=is_forced
        ) as retune:
            hours = _hours(trace, offset_s)
            return calendar_of(trace, hours, retune, _calendar_aim(options, trace), say)


def _calendar_aim(options: Mapping[str, Any], trace: Trace) -> Aim:
    plan = replace(replay_plan(options, trace), load=options["load"])
    objective, slos = Objective(options["objective"]), tuple(options["slo"])
    return Aim(objective, slos, plan, Budget(TIME_PER_HOUR_S), None)
