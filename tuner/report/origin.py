"""What qualifies the answer, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.report.parts import Cell, Section, Table
from tuner.report.run_files import Provenance, RunFiles
from tuner.report.words import NOTHING, percent, plain


def caveats(run: RunFiles) -> Section:
    """Return every caveat of the run."""
    texts = tuple(f"{caveat.text} ({caveat.id})" for caveat in run.result.caveats)
    said = () if texts else ("None: nothing that was checked gave reason to doubt the answer.",)
    return Section("caveats", "Caveats", said, texts)


def provenance(run: RunFiles) -> Section:
    """Return where, when and with what the run was made."""
    made = run.result.provenance
    facts = {
        "run": run.name,
        "state": run.result.state,
        "made at": made.made_at,
        "method": run.result.method,
        "model": made.model,
        **_engine(made.engine or {}),
        "trace": made.trace.source,
        "trace SHA-256": made.trace.sha256,
        "arguments": _arguments(made),
        "tuner": f"{made.tuner_version}, Python {made.python}",
        "engine starts": str(made.engine_starts),
        "time": _time(made),
        **_profile(made.profile or {}),
    }
    rows = tuple((Cell(name), Cell(text)) for name, text in facts.items() if text)
    table = Table("provenance-table", "Where this comes from", ("what", "which"), rows)
    return Section("provenance", "Provenance", tables=(table,))


def _engine(engine: Mapping[str, Any]) -> dict[str, str]:
    if not engine:
        return {"engine": "none was started"}
    limits = engine.get("started_at_limits") or {}
    blocks = f"{engine.get('num_blocks')} blocks of {engine.get('block_size')} tokens"
    started = "/".join(str(limits[name]) for name in limits)
    return {
        "vLLM": str(engine.get("vllm_version", NOTHING)),
        "device": str(engine.get("device", NOTHING)),
        "dtype": str(engine.get("dtype", NOTHING)),
        "longest model length": f"{engine.get('max_model_len')} tokens",
        "KV cache": f"{blocks}, started at {started} (max_num_seqs/max_num_batched_tokens)",
    }


def _arguments(made: Provenance) -> str:
    return " ".join(str(part) for part in made.options.get("arguments", ()))


def _time(made: Provenance) -> str:
    stages = ", ".join(f"{name} {plain(took_s)} s" for name, took_s in made.stages_s.items())
    return f"{plain(made.wall_s)} s{f' ({stages})' if stages else ''}"


def _profile(profile: Mapping[str, Any]) -> dict[str, str]:
    if not profile:
        return {}
    wrong = profile.get("error_ratio")
    known = f", wrong by {percent(wrong)}" if isinstance(wrong, int | float) else ""
    made = f"made {profile.get('made_at', NOTHING)} on {profile.get('device', NOTHING)}{known}"
    settings = ", ".join(str(s) for s in profile.get("calibrated_on", ()))
    return {"profile": made, "calibrated on": settings}
