"""Runs to emit from: a run directory as a run leaves it, with an invented outcome."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec

from support.result_parts import MEASURED, WINDOWED, given
from tuner.cli import run
from tuner.emit.recommendation import Recommendation
from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import EngineInfo
from tuner.redact import redacted
from tuner.run.outcome import RunFindings, make_outcome
from tuner.run.result import RunResult
from tuner.search.objective import Objective, Score, Scoring, Tier
from tuner.search.race import RaceDecision, RaceVerdict
from tuner.search.trials import Phase, Trial
from tuner.stats import Estimate

WINNER, CURRENT, CEILING = (
    EngineLimits(48, 4096),
    EngineLimits(64, 8192),
    EngineLimits(128, 16384),
)
CHANGE = RaceDecision(
    RaceVerdict.CHANGE, WINNER, WINNER, (WINNER,), Estimate(0.8, 0.75, 0.85, 3), 3, "better"
)
SHA256 = "59445ac5" * 8
QWEN: dict[str, object] = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "served-model-name": ["Qwen/Qwen2.5-7B-Instruct", "qwen"],
    "max-model-len": 8192,
    "gpu-memory-utilization": 0.85,
    "enable-prefix-caching": False,
    "tensor-parallel-size": 2,
    "port": 8010,
    "host": "127.0.0.1",
    "max-num-seqs": 64,
    "max-num-batched-tokens": 8192,
    "generation-config": "vllm",
    "kv-transfer-config": {"kv_connector": "X", "kv_role": "kv_both"},
    "hf-token": "s3cret-value",
}
"""A configuration with one of each: a list, a number, a false, a mapping, a secret."""

KEYED: dict[str, object] = {**QWEN, "api-key": "k3y-value"}
"""The same behind a key: whoever has none is not answered."""

RUN_ID = "2026-11-20T14-03-00"


def an_outcome(
    decision: RaceDecision = CHANGE,
    tier: Tier = Tier.GOOD,
    state: str = "complete",
    device: str = "NVIDIA H200",
    version: str = "0.33.0",
) -> RunResult:
    """Return what came of an invented run."""
    info = EngineInfo(
        *("live", device, "bfloat16", version, 100, 8192, 16, 64, CEILING),
        can_change_limits=True,
        asynchronous=False,
    )
    records = [
        Trial.of(
            0,
            limits,
            Phase.RACE if round_ else Phase.LADDER,
            round_,
            Score(tier, 2.0, "e2e_p99"),
            {**MEASURED, "e2e_s": {"p50": 1.0 * slow, "p99": (2.0 + round_ / 10) * slow}},
        )
        for limits, slow in ((WINNER, 0.8), (CURRENT, 1.0))
        for round_ in (0, 1, 2, 3)
    ]
    goal = Scoring(Objective.BALANCED, (), "p99")
    around = given(
        CURRENT,
        info,
        source="prod.jsonl",
        sha256=SHA256,
        replayed_requests=5985,
        window="the whole trace, 60 min",
    )
    return make_outcome(decision, goal, records, [WINDOWED], RunFindings(), around, state)


def a_run_dir(
    root: Path,
    outcome: RunResult | None = None,
    values: dict[str, object] | None = None,
) -> Path:
    """Return a run directory whose result holds a configuration."""
    folder = root / RUN_ID
    folder.mkdir(parents=True)
    content = msgspec.to_builtins(outcome or an_outcome())
    content["serve_values"] = redacted(QWEN if values is None else values)
    (folder / "result.json").write_text(json.dumps(content))
    (folder / "run.json").write_text("{}")
    return folder


def emitted(capsys: Any, *arguments: str) -> str:
    """Return what `tune emit` writes to standard output."""
    code = run(["emit", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return str(out)


def vllm_serve_parser() -> Any:
    """Return a parser as `vllm serve` makes it: sub-command first, its options below it."""
    flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    found = next(place for place in places if importlib.util.find_spec(place))
    parser = flexible()
    serve = parser.add_subparsers(dest="subparser").add_parser("serve")
    importlib.import_module(found).make_arg_parser(serve)
    return parser


PLAIN = Recommendation({"model": "m"}, EngineLimits(48, 4096))
"""A recommendation without provenance: an edit shows in the limits alone."""


def changed(before: str, after: str) -> list[str]:
    """Return the lines that differ, as a diff shows them."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
    return [line for line in lines if line[:3] not in {"---", "+++"} and line[0] in "+-"]
