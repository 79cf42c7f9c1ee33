"""Options of the main job, read and found good before any engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.cli.emit import check_ending
from tuner.cli.inputs import (
    EngineChoice,
    Traffic,
    check_model,
    choose_engine,
    profiled_engine,
    read_traffic,
)
from tuner.cli.inputs import replay_plan as plan_of
from tuner.demo import DEMO_MODEL_DIR, is_demo_model
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation, without_lost
from tuner.emit.registry import checked_writer
from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import hyphenated, parse_engine_args
from tuner.errors import UsageError
from tuner.redact import REDACTED
from tuner.run.directory import PROFILE_FILE, new_run_path
from tuner.run.session import Method
from tuner.search.budget import Budget
from tuner.search.objective import Objective, Scoring
from tuner.search.space import DEFAULT_LADDER, PAST_LADDER
from tuner.shadow.pool import default_jobs
from tuner.shadow.profiles import Profile, read_profile

DEFAULT_BUDGET_S = 1800.0


@dataclass(frozen=True, slots=True)
class Job:
    """Options that were read and found good, before any engine starts."""

    options: Mapping[str, Any]
    arguments: tuple[str, ...]
    engine: EngineChoice
    traffic: Traffic
    budget: Budget
    ladder: tuple[int, ...]
    run_path: Path
    method: Method = Method.AUTO
    profile: Profile | None = None
    jobs: int = 1

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier run goes on."""
        return bool(self.options["resume"])

    @property
    def is_forced(self) -> bool:
        """Whether a profile that does not fit is used all the same."""
        return bool(self.options["force_profile"])


def read_job(options: Mapping[str, Any], arguments: Sequence[str]) -> Job:
    """Check everything that can be checked without an engine. Raises: TunerError."""
    budget = Budget(options["budget"] or DEFAULT_BUDGET_S)
    ladder = options["max_num_seqs"] or DEFAULT_LADDER
    slos = tuple(options["slo"])
    Scoring(Objective(options["objective"]), slos, "p99")
    method = Method(options["method"])
    if options["objective"] == Objective.CAPACITY and method is Method.LIVE:
        raise UsageError(
            "--objective capacity asks many loads of each setting and needs the shadow",
            "leave --method live out",
        )
    profile = _profile(options, method)
    engine = _engine(options, profile, method)
    traffic = read_traffic(options, largest_cap=max(ladder) * PAST_LADDER)
    plan_of(options, traffic.trace)
    if options["output"] and not Path(options["output"]).resolve().parent.is_dir():
        raise UsageError(
            f"-o {options['output']}: its folder does not exist", "make it, or name another"
        )
    _check_format(options, method, engine)
    run_path = Path(options["resume"] or options["run_dir"] or new_run_path(Path("runs")))
    return Job(
        options,
        tuple(arguments),
        engine,
        traffic,
        budget,
        ladder,
        run_path,
        method,
        profile,
        options["jobs"] or default_jobs(),
    )


def _check_format(options: Mapping[str, Any], method: Method, engine: EngineChoice) -> None:
    """Refuse now what could not be written in the end. Raises: UsageError."""
    chosen = Format(options["emit_format"])
    check_ending(chosen, options["output"])
    if chosen is Format.VLLM_EXACT and method is Method.SHADOW:
        raise UsageError(
            "--format vllm-exact repeats a measured point, and --method shadow measures none",
            "leave --format out",
        )
    values, lost = without_lost(engine.deployed_values)
    checked_writer(chosen, Recommendation(values, EngineLimits(1, 1), lost=lost))


def _engine(
    options: Mapping[str, Any], profile: Profile | None, method: Method
) -> EngineChoice:
    """Return what is to be measured, the profile's own engine where none is named."""
    if profile is None:
        return choose_engine(options)
    kept = profiled_engine(options, profile)
    if method is Method.SHADOW:
        return kept
    if is_demo_model(kept.values.get("model")):
        values = {**kept.values, "model": str(DEMO_MODEL_DIR)}
        return replace(kept, values=values, is_demo=True)
    check_model(kept.values)
    hidden = [key for key, value in profile.serve_values.items() if REDACTED in str(value)]
    missing = [key for key in hidden if not options["config"] and not _is_given(options, key)]
    if missing:
        raise UsageError(
            f"the profile keeps no secrets, so these are missing: {', '.join(missing)}",
            "give them again with --engine-arg, or the whole configuration with --config",
        )
    return kept


def _is_given(options: Mapping[str, Any], key: str) -> bool:
    return hyphenated(key) in parse_engine_args(options["engine_args"])


def _profile(options: Mapping[str, Any], method: Method) -> Profile | None:
    """Return the profile that is named, where one is wanted. Raises: UsageError."""
    path = options["profile"]
    if method is Method.SHADOW and not path:
        raise UsageError(
            "--method shadow needs --profile FILE",
            "every live run writes profile.yaml into its run directory",
        )
    if method is Method.LIVE and path:
        raise UsageError(
            "--profile is for --method auto and shadow, got --method live",
            "a live run makes a profile of its own",
        )
    if path and options["resume"] and (kept := Path(options["resume"]) / PROFILE_FILE).exists():
        # The run has its own copy; what was named may be gone, or another by now.
        path = kept
    return read_profile(Path(path)) if path else None
