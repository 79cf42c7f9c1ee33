"""`tune plan`: the best configuration at each of several loads, foretold from a profile."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.console import say
from tuner.cli.inputs import profiled_engine, read_named, read_traffic, replay_plan
from tuner.drift.by_hour import (
    MIN_REQUESTS,
    Calendar,
    Hour,
    calendar_of,
    hours_of,
    parse_offset,
)
from tuner.drift.retune import retuning, shadow_process
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner
from tuner.run.directory import RunDir
from tuner.run.forecast import Forecast
from tuner.run.inputs import fit_lengths
from tuner.run.journal import Journal
from tuner.run.listener import NullListener
from tuner.run.shadow_search import Ranking
from tuner.run.state import RunState
from tuner.search.budget import Aim, Budget
from tuner.search.objective import Objective
from tuner.search.race import RaceDecision, RaceVerdict, decide_predicted
from tuner.search.space import DEFAULT_LADDER, PAST_LADDER, search_space
from tuner.search.trials import Observation
from tuner.shadow.calibration import error_ratio
from tuner.shadow.pool import ShadowPool, SpareProcesses, default_jobs
from tuner.shadow.profiles import Profile, read_profile
from tuner.shadow.source import ShadowSource
from tuner.traffic.reshape import at_load
from tuner.traffic.traces import Trace
from tuner.traffic.windows import Window

# How long the forecast of one load may take, in seconds: ours, longer traces are cut.
TIME_PER_LOAD_S = 120.0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What is best at one load."""

    load: float
    decision: RaceDecision
    tier: str
    metric: str
    best: float | None
    present: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the row for --json."""
        gain = self.decision.gain
        interval = None if gain is None else [gain.low, gain.high]
        return {
            "load": self.load,
            "best": _limits(self.decision.best),
            "change_pays": self.decision.verdict is RaceVerdict.CHANGE,
            "state": self.tier,
            "metric": self.metric,
            "value": self.best,
            "present_value": self.present,
            "ratio": None if gain is None else gain.value,
            "ratio_interval": interval,
        }


def run_plan(options: Mapping[str, Any]) -> int:
    """Foretell every load and print the table. Raises: TunerError."""
    if not options["profile"]:
        raise UsageError(
            "--profile is missing",
            "name a profile, as profile.yaml in the directory of every live run",
        )
    profile = read_profile(Path(options["profile"]))
    ladder = options["max_num_seqs"] or DEFAULT_LADDER
    traffic = read_traffic(options, largest_cap=max(ladder) * PAST_LADDER)
    for line in traffic.lines:
        say(line)
    with tempfile.TemporaryDirectory(prefix="tune-plan-") as folder:
        run_dir = RunDir(Path(folder), resume=False)
        source = ShadowSource(profile, is_forced=options["force_profile"])
        jobs = options["jobs"] or default_jobs()
        with (
            EngineProcess(source, run_dir.engine_log) as host,
            closing(SpareProcesses(jobs - 1, run_dir.shadow_log)) as spares,
        ):
            shadows_at = partial(
                ShadowPool,
                profile,
                jobs=jobs,
                log_path=run_dir.shadow_log,
                seed=options["seed"],
                is_forced=options["force_profile"],
                spares=spares,
            )
            rows, present = _rows(host, shadows_at, run_dir, options, profile, traffic.trace)
    wrong_ratio = error_ratio(profile)
    told = _json if options["as_json"] else _table
    sys.stdout.write("\n".join(told(rows, present, wrong_ratio)) + "\n")
    return 0


def _rows(
    host: EngineProcess,
    shadows_at: Callable[[EngineLimits], ShadowPool],
    run_dir: RunDir,
    options: Mapping[str, Any],
    profile: Profile,
    recorded: Trace,
) -> tuple[list[PlanRow], EngineLimits]:
    given = {**options, "engine_args": (), "config": None, "model": None}
    facts = host.facts(profiled_engine(given, profile).values)
    trace, told = fit_lengths(recorded, facts.max_model_len, options["too_long"])
    if told:
        say(told)
    ladder = options["max_num_seqs"] or DEFAULT_LADDER
    space = search_space(
        facts, at_load(trace, max(options["loads"])), ladder, facts.present_limits
    )
    journal = Journal(run_dir.storage_url)
    bench = EngineRunner(host, {}, space.ceiling, options["seed"])
    rows: list[PlanRow] = []
    with shadows_at(space.ceiling) as shadows:
        shadows.adopt(bench)
        for generation, load in enumerate(options["loads"]):
            aim = _aim(options, trace, load)
            run = RunState(trace, space, aim, bench, journal, run_dir, NullListener())
            run.begin()
            forecast = Forecast(trace, aim, shadows, generation)
            forecast.choose_parts(space, TIME_PER_LOAD_S)
            seen = Ranking(run, forecast).rank()
            rows.append(_row(seen, space.present, load, error_ratio(profile)))
            say(f"load {load:g} x: best {rows[-1].decision.best}")
    journal.close()
    return rows, space.present


def _aim(options: Mapping[str, Any], trace: Trace, load: float) -> Aim:
    chosen: Window | None = options["window"].resolve(trace) if options["window"] else None
    return Aim(
        Objective(options["objective"]),
        tuple(options["slo"]),
        replace(replay_plan(options, trace), load=load),
        Budget(TIME_PER_LOAD_S),
        chosen,
    )


def _row(
    seen: list[Observation], present: EngineLimits, load: float, wrong_ratio: float
) -> PlanRow:
    decision = decide_predicted(seen, present, wrong_ratio)
    best = next(o for o in seen if o.limits == decision.best)
    before = next((o for o in seen if o.limits == present), None)
    comparable = before is not None and before.score.metric == best.score.metric
    return PlanRow(
        load,
        decision,
        str(best.score.tier)[2:],
        best.score.metric,
        best.score.value,
        before.score.value if before is not None and comparable else None,
    )


def _limits(limits: EngineLimits) -> dict[str, int]:
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def _json(rows: Sequence[PlanRow], present: EngineLimits, wrong_ratio: float) -> list[str]:
    """Return the lines of the object for programs."""
    content = {
        "engine": "shadow",
        "present": _limits(present),
        "error_ratio": wrong_ratio,
        "loads": [row.as_json() for row in rows],
    }
    return [msgspec.json.format(msgspec.json.encode(content), indent=2).decode()]


def _table(rows: Sequence[PlanRow], present: EngineLimits, wrong_ratio: float) -> list[str]:
    """Return the table for people; a rate stands as such, not as its inverse."""
    lines = [
        f"present {present} (max_num_seqs/max_num_batched_tokens); predicted, "
        f"wrong by {wrong_ratio:.0%} on what was measured",
        f"{'load':>6}  {'best':>12}  {'metric':<16} {'there':>10} {'present':>10}  advice",
    ]
    for row in rows:
        pays = row.decision.verdict is RaceVerdict.CHANGE
        advice = "re-tune" if pays else f"keep ({row.decision.why})"
        state = "" if row.tier == "good" else f" [{row.tier}]"
        lines.append(
            f"{row.load:>5g}x  {row.decision.best!s:>12}  {row.metric:<16} "
            f"{_value(row.best, row.metric):>10} {_value(row.present, row.metric):>10}  "
            f"{advice}{state}"
        )
    return lines


def _value(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    if metric.endswith("_per_s"):
        return f"{1 / value:.3g}/s"
    return f"{value:.3g} s" if metric.startswith("e2e") else f"{value:.3g}"


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
            f"no hour of {trace.source} holds {MIN_REQUESTS} requests", "record more traffic"
        )
    return found


def _foretold(
    options: Mapping[str, Any], profile: Profile, read: Trace, offset_s: float
) -> Calendar:
    """Replay every hour on shadows of the profile. Raises: TunerError."""
    is_forced = options["force_profile"]
    with shadow_process(profile, is_forced=is_forced) as (host, run_dir):
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
