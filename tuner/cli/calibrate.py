"""What `tune calibrate` does, once its options are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.console import say
from tuner.cli.inputs import profiled_engine, read_traffic, replay_plan
from tuner.drift.retune import shadow_process
from tuner.engine.limits import EngineLimits
from tuner.errors import ShadowError, UsageError
from tuner.replay.loop import ReplayLog
from tuner.replay.process import EngineProcess
from tuner.replay.runner import EngineRunner, Failure
from tuner.replay.timeline import Timelines
from tuner.run.inputs import fit_lengths
from tuner.shadow.profiles import Profile, read_profile, write_profile
from tuner.shadow.served import ServingOverhead, fit_serving_overhead
from tuner.shadow.source import ShadowSource
from tuner.shadow.step_model import StepModel


def run_calibrate(options: Mapping[str, Any]) -> int:
    """Learn, write the profile and say what changed. Raises: TunerError."""
    for name, what in (("profile", "the profile to correct"), ("output", "where it goes")):
        if not options[name]:
            raise UsageError(f"--{name} is missing", f"name {what}: --{name} FILE")
    if options["load"] != 1:
        raise UsageError("--load would change when requests came, which is what is compared")
    profile = read_profile(Path(options["profile"]))
    with shadow_process(profile, is_forced=options["force_profile"]) as (host, _):
        corrected, limits, found = _learnt(host, profile, options)
    write_profile(Path(options["output"]), corrected)
    if options["as_json"]:
        content = {
            "engine": "shadow",
            "limits": {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            },
            **found.as_json(),
        }
        encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
        sys.stdout.write(encoded.decode() + "\n")
    else:
        sys.stdout.write("\n".join([f"served at {limits}", *found.lines()]) + "\n")
    say(f"written: {options['output']}")
    return 0


def _learnt(
    host: EngineProcess, profile: Profile, options: Mapping[str, Any]
) -> tuple[Profile, EngineLimits, ServingOverhead]:
    """Replay the recording with one step model after the other until they agree."""
    engine = profiled_engine({**options, "engine_args": (), "model": None}, profile)
    # What was served is compared, and of an answer that was cut short no more was served.
    traffic = read_traffic(
        {**options, "aborted": options["aborted"] or "keep"}, largest_cap=256
    )
    for line in traffic.lines:
        say(line)
    facts = host.facts(engine.values)
    trace, told = fit_lengths(traffic.trace, facts.max_model_len, options["too_long"])
    if told:
        say(told)
    if options["window"]:
        trace = options["window"].resolve(trace).of(trace)
    plan = replay_plan(options, trace)
    limits = EngineLimits(
        options["max_num_seqs"] or facts.present_limits.max_num_seqs,
        options["max_num_batched_tokens"] or facts.present_limits.max_num_batched_tokens,
    )
    bench = EngineRunner(host, engine.values, limits, options["seed"])
    bench.use("recording", trace)

    def replay(model: StepModel) -> Timelines:
        tried = replace(profile, step_model=model)
        bench.restart_from(ShadowSource(tried, is_forced=options["force_profile"]))
        logs: list[ReplayLog] = []
        outcome = bench.measure(["recording"], limits, plan, (), on_log=logs.append)
        if isinstance(outcome, Failure):
            raise ShadowError(f"the recording could not be replayed: {outcome.cause}")
        return logs[0].timelines

    corrected, found = fit_serving_overhead(profile, trace, limits, replay)
    return corrected, limits, found
