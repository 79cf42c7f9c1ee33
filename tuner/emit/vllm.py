"""Write a recommendation as the file that `vllm serve --config` takes.

Answers how the user's values and the two tuned limits become YAML that vLLM reads as they were
meant. What to recommend, and which evidence there is, is decided above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.emit.recommendation import EXACT, LIVE_LIMIT_KEYS, Recommendation, dropped
from tuner.emit.target import Names
from tuner.emit.yaml_text import yaml_text
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, hyphenated, negated
from tuner.errors import UsageError
from tuner.files import write_atomic

__all__ = [
    "LIVE_LIMIT_KEYS",
    "Evidence",
    "render",
    "render_exact",
    "render_plain",
    "write_atomic",
]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why these values: what stands above them in the file, as comments.

    >>> Evidence(tuned="tuned on 9 requests", limited_by="nothing in the trace").lines("b.yaml")
    ('vllm serve --config b.yaml', 'tuned on 9 requests', 'limited by: nothing in the trace')
    """

    tuned: str
    """When, on which requests, with which vLLM and device, live or shadow."""
    against: str = ""
    """The present configuration that the rows compare with."""
    rows: tuple[str, ...] = ()
    """One comparison each: metric, before -> after, gain with its interval."""
    limited_by: str = ""
    caveats: tuple[str, ...] = ()
    run_dir: str = ""

    def lines(self, file_name: str) -> tuple[str, ...]:
        """Return the comment lines, the command that takes the file first."""
        return (
            f"vllm serve --config {file_name}",
            self.tuned,
            *([f"against {self.against}:"] if self.against else []),
            *(f"  {row}" for row in self.rows),
            *([f"limited by: {self.limited_by}"] if self.limited_by else []),
            *(f"caveat: {caveat}" for caveat in self.caveats),
            *([f"evidence: {self.run_dir}"] if self.run_dir else []),
        )


def render(
    values: Mapping[str, object],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    comments: Sequence[str],
) -> str:
    """Return the file's text: comments, then the user's values with the two limits set.

    A false becomes `no-KEY: true`, because `vllm serve` drops a false in silence. Keys that
    would cap the limits from below are left out, and a comment says so.

    Raises: ValueError if a limit is no number of at least 1, the budget is below the cap, or a
        value is null.
    Source: vLLM vllm/utils/argparse_utils.py, FlexibleArgumentParser.load_config_file.

    >>> print(render({"model": "m", "enable-prefix-caching": False}, 16, 2048, ["why"]), end="")
    # why
    model: m
    no-enable-prefix-caching: true
    max-num-seqs: 16
    max-num-batched-tokens: 2048
    """
    if not 1 <= max_num_seqs <= max_num_batched_tokens:
        raise ValueError(
            "limits must be 1 <= max_num_seqs <= max_num_batched_tokens, got "
            f"{max_num_seqs} and {max_num_batched_tokens}"
        )
    spelled = {hyphenated(key): value for key, value in values.items()}
    spelled |= {MAX_NUM_SEQS: max_num_seqs, MAX_NUM_BATCHED_TOKENS: max_num_batched_tokens}
    kept = {key: value for key, value in spelled.items() if key not in LIVE_LIMIT_KEYS}
    return yaml_text(_as_vllm_reads(kept), [*comments, *dropped(values)])


def render_plain(rec: Recommendation, names: Names) -> str:
    """Return the file with the two classic limits, which every vLLM reads."""
    seqs, tokens = rec.limits.max_num_seqs, rec.limits.max_num_batched_tokens
    return render(rec.values, seqs, tokens, rec.whole_lines(_command(names.file)))


def render_exact(rec: Recommendation, names: Names) -> str:
    """Return the file with the four limits that repeat the measured point.

    The engine that was measured had buffers, captured graphs and a KV cache for larger limits
    than it was tuned to; a start at the tuned limits themselves sizes them anew.

    Raises: UsageError if nobody kept at which limits the engine was started, or nothing was
        measured.
    Source: SchedulerConfig in vLLM's vllm/config/scheduler.py, 0.32 and later.
    """
    start = exact_start(rec)
    four = exact_limits(rec, start)
    settings = {key: value for key, value in rec.settings.items() if key not in four}
    above = [
        *rec.whole_lines(_command(names.file)),
        "the measured point exactly: buffers of the engine's start, admission and step budget "
        f"{EXACT}",
        *dropped(rec.values),
    ]
    return yaml_text(_as_vllm_reads({**settings, **four}), above)


def _command(file_name: str) -> str:
    return f"vllm serve --config {file_name}"


def exact_limits(rec: Recommendation, start: tuple[int, int]) -> dict[str, int]:
    """Return the four limits by key, given those that the engine was started with."""
    limits = rec.limits
    return {
        MAX_NUM_SEQS: max(start[0], limits.max_num_seqs),
        MAX_NUM_BATCHED_TOKENS: max(start[1], limits.max_num_batched_tokens),
        LIVE_LIMIT_KEYS[0]: limits.max_num_seqs,
        LIVE_LIMIT_KEYS[1]: limits.max_num_batched_tokens,
    }


def exact_start(rec: Recommendation) -> tuple[int, int]:
    """Return the limits that the measured engine was started with. Raises: UsageError."""
    hint = "leave --format vllm-exact out: --format vllm holds the two limits that were tuned"
    version = rec.facts.get("vllm-version", "")
    if rec.facts.get("method") == "shadow":
        raise UsageError(
            "vllm-exact repeats a measured point, and this one was predicted", hint
        )
    if rec.started_at is None:
        raise UsageError(
            "vllm-exact needs the limits that the engine was started with, which the source "
            "does not hold",
            "name the run directory in place of the YAML file",
        )
    if version and _release(version) < (0, 32):
        raise UsageError(f"vllm-exact needs vLLM 0.32 or later, the run had {version}", hint)
    return rec.started_at.max_num_seqs, rec.started_at.max_num_batched_tokens


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, (0, 0) where it has none.

    >>> _release("0.32.0+cpu"), _release("unknown")
    ((0, 32), (0, 0))
    """
    numbers = [int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdigit()]
    return tuple(numbers) if len(numbers) == 2 else (0, 0)


def _as_vllm_reads(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values with every false turned into the flag that says so."""
    shown: dict[str, object] = {}
    for key, value in values.items():
        if value is None:
            raise ValueError(f"{key} must have a value, got None")
        if value is not False:
            shown[key] = value
        elif (flag := negated(key)) is not None:
            shown[flag] = True
    return shown
