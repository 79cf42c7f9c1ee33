"""Run directories for tests of the page: a live run of the toy, and the same with a shadow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from support.job_parts import run
from support.toy import ToyCosts, ToySource
from support.toy_tune import write_trace
from support.traffic import replay_toy
from tuner.engine.limits import EngineLimits
from tuner.replay.metrics import measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.series import ReplayTimelines, SavedTimelines, timeline_record
from tuner.run.directory import RESULT_FILE, RUN_FILE, TIMELINES_FILE
from tuner.search.objective import Objective, Scoring
from tuner.search.trials import Phase, Trial
from tuner.traffic.describe import describe
from tuner.traffic.formats import read_trace
from tuner.traffic.traces import Trace

EVIL = "<script>alert('model')</script>"
# Few blocks, so that the KV cache fills and requests are preempted.
SOURCE = ToySource(
    ToyCosts(knee=10, crowd_s=0.0008), current=EngineLimits(32, 2048), num_blocks=130
)
SHADOW_COSTS = ToyCosts(base_s=0.0103, knee=10, crowd_s=0.0008)
GRID = [EngineLimits(n, b) for b in (512, 2048) for n in (4, 8, 16, 32)]


def live_run(folder: Path) -> Path:
    """Tune the toy live under a model and a trace with dangerous names; return what it left."""
    trace = write_trace(folder / "a&b <b>.jsonl", n=200)
    limits = ("--max-num-seqs", "2,4,8,16", "--budget", "40s", "--slo", "e2e_p95=1500ms")
    run(SOURCE, trace, "--model", EVIL, *limits)
    run_dir = folder / "run"
    result = read(run_dir, RESULT_FILE)
    replayed = read_trace(trace)
    result.setdefault("trace_description", describe(replayed).as_json())
    write(run_dir, RESULT_FILE, result)
    keep_timelines(run_dir, replayed, result)
    return run_dir


def keep_timelines(run_dir: Path, trace: Trace, result: Mapping[str, Any]) -> None:
    """Replay the winner and the current configuration once more, with their timelines kept."""
    path = run_dir / TIMELINES_FILE
    saved = SavedTimelines()
    if path.exists():
        saved = msgspec.json.decode(path.read_bytes(), type=SavedTimelines)
    for found in (result["baseline"], result["recommendation"]):
        limits = EngineLimits(found["max_num_seqs"], found["max_num_batched_tokens"])
        log = replay_toy(trace, limits, SOURCE, ReplayPlan(keep_steps=True))
        windows = [timeline_record(log)]
        caps = limits.max_num_seqs, limits.max_num_batched_tokens
        saved = saved.with_replay(ReplayTimelines("live", *caps, windows))
    path.write_bytes(msgspec.json.encode(saved))


def shadowed_run(live: Path, folder: Path, *, same_requests: bool = True) -> Path:
    """Return a copy of a live run in which a shadow ranked and only the race was live."""
    run_dir = folder / "shadowed"
    shutil.copytree(live, run_dir)
    result = read(run_dir, RESULT_FILE)
    raced = [t for t in result["trials"] if t["phase"] == str(Phase.RACE)]
    trace = read_trace(live.parent / "a&b <b>.jsonl")
    result["trials"] = [*predicted(trace, GRID, 1 + max(t["number"] for t in raced)), *raced]
    result["method"] = "auto"
    result["provenance"]["profile"] = {
        "error_ratio": 0.05,
        "made_at": "2026-01-31T12:00:00Z",
        "device": "toy",
        "vllm_version": "0.0",
        "calibrated_on": ["16/2048"],
    }
    write(run_dir, RESULT_FILE, result)
    run = read(run_dir, RUN_FILE)
    run["predicted_windows"] = run["windows"] if same_requests else []
    write(run_dir, RUN_FILE, run)
    return run_dir


def predicted(trace: Trace, grid: list[EngineLimits], first: int) -> list[dict[str, Any]]:
    """Return the trials of a shadow whose steps are some percent off."""
    source = ToySource(SHADOW_COSTS, num_blocks=SOURCE.num_blocks)
    goal = Scoring(Objective.BALANCED, (), "p95")
    return [
        msgspec.to_builtins(
            Trial.of(number, limits, Phase.SHADOW, 0, goal.score(found), found.as_json())
        )
        for number, limits in enumerate(grid, start=first)
        for found in [measure([replay_toy(trace, limits, source)])]
    ]


def changed(run_dir: Path, folder: Path, **fields: object) -> Path:
    """Return a copy of a run whose result holds other values in these fields."""
    copy = folder / "changed"
    shutil.copytree(run_dir, copy)
    write(copy, RESULT_FILE, {**read(copy, RESULT_FILE), **fields})
    return copy


def read(run_dir: Path, name: str) -> dict[str, Any]:
    """Return a file of a run."""
    content: dict[str, Any] = json.loads((run_dir / name).read_text())
    return content


def write(run_dir: Path, name: str, content: Mapping[str, Any]) -> None:
    """Replace a file of a run."""
    (run_dir / name).write_text(json.dumps(content))
