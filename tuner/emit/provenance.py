"""Where a recommendation comes from, in a word each: for annotations and labels.

Answers trace, vLLM, device, date, gain and run by name. The sentences that stand in comments
are made in `outcome`; those of a file that was emitted before are read back here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from tuner.engine.limits import EngineLimits
from tuner.run.result import Outcome
from tuner.search.race import Verdict

_IN_COMMENTS: Final = {
    "tuned-at": re.compile(r"tuned (\d{4}-\d\d-\d\d) on "),
    "trace": re.compile(r"tuned \S+ on [\d,]+ requests of (.+) \(sha256 "),
    "trace-sha256": re.compile(r"\(sha256 ([0-9a-f]+)…\)"),
    "vllm-version": re.compile(r"^vLLM (\d[\w.+]*), "),
    "device": re.compile(r"^vLLM \d[\w.+]*, (.+?), (?=PREDICTED|measured live|\d+ settings)"),
    "run-id": re.compile(r"^evidence: (?:.*/)?([^/]+)/?$"),
}
"""Where the comments of an emitted file say what annotations say. Source: outcome.comments."""


def facts_of_run(content: Mapping[str, Any], told: Outcome, folder: Path) -> dict[str, str]:
    """Return the provenance of a run by name; what nobody knows is left out."""
    made = content["provenance"]
    engine = made["engine"] or {}
    facts = {
        "run-id": folder.resolve().name,
        "tuned-at": made["made_at"],
        "method": content["method"],
        "trace": made["trace"]["source"],
        "trace-sha256": made["trace"]["sha256"],
        "vllm-version": engine.get("vllm_version"),
        "device": engine.get("device"),
        "limits": spelled(told.decision.winner),
        "against": spelled(told.present),
        "gain": _gain(told),
        "tuner-version": made["tuner_version"],
    }
    return {name: str(fact) for name, fact in facts.items() if fact}


def spelled(limits: EngineLimits) -> str:
    """Return both limits with their names.

    >>> spelled(EngineLimits(8, 2048))
    '8/2048 (max_num_seqs/max_num_batched_tokens)'
    """
    return f"{limits} (max_num_seqs/max_num_batched_tokens)"


def _gain(told: Outcome) -> str:
    """Return the gain of what is recommended, with its interval, in one line."""
    if told.decision.verdict is Verdict.KEEP:
        return f"none: keep what you have, {told.decision.why}"
    if not told.rows:
        return "not compared with the present values"
    return _gain_of(told.rows[0].text)


def _gain_of(row: str) -> str:
    """Return metric and change of a row, as in "e2e_p99 -28 %, interval -31 % … -25 %"."""
    metric, _, rest = row.strip().partition(" ")
    return f"{metric} {rest.partition('(')[2].removesuffix(')')}"


def first_comments(path: Path) -> list[str]:
    """Return the comments above a file's values, without the command that takes the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    above = takewhile(lambda line: line.startswith("#"), lines)
    said = [line.removeprefix("#").removeprefix(" ") for line in above]
    return said[1:] if said and said[0].startswith("vllm serve ") else said


def facts_in(comments: Sequence[str], tuned: EngineLimits) -> dict[str, str]:
    """Return what the comments of an emitted file say, by name; nothing if they are others'."""
    found: dict[str, str] = {}
    for name, pattern in _IN_COMMENTS.items():
        matches = [match[1] for line in comments if (match := pattern.search(line))]
        found |= {name: matches[0]} if matches else {}
    if not found:
        return {}
    if any("PREDICTED" in line for line in comments):
        found["method"] = "shadow"
    keeps = [line for line in comments if line.startswith("KEEP WHAT YOU HAVE")]
    gains = [_gain_of(line) for line in comments if line.startswith(" ") and " -> " in line]
    if keeps:
        found["gain"] = f"none: keep what you have, {keeps[0].rpartition('; ')[2]}"
    elif gains:
        found["gain"] = gains[0]
    return {**found, "limits": spelled(tuned)}
