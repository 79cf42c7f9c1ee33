"""What a recorder writes of a server's steps and requests, made of a replay."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from support.run_parts import a_profile
from support.traffic import steady
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Drafts
from tuner.engine.steps import StepColumns
from tuner.recorder.rows import RecordedServer, Row, header_line, row_line
from tuner.recorder.steps import steps_header, steps_line
from tuner.replay.loop import ReplayLog
from tuner.replay.plan import ReplayPlan
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart
from tuner.shadow.recorded import _unpacked
from tuner.shadow.step_model import StepModel
from tuner.stats import Bools, Floats
from tuner.traffic.traces import Trace

NOW_S = 1_763_726_400.0
LIMITS = EngineLimits(16, 256)
# Contexts matter, so that a model that does not know them is off.
MODEL = StepModel.linear(
    0.008, 0.0004, 0.00005, decode_context_s=2e-7, prefill_context_s=5e-9, prefill_base_s=0.001
)
TRACE = steady(300, per_s=6.0, prompt=400, output=60)


def served(
    limits: EngineLimits = LIMITS,
    blocks: int = 100_000,
    trace: Trace = TRACE,
    accepted: tuple[float, ...] = (),
    *,
    is_ahead: bool = False,
) -> ReplayLog:
    """Return a replay on an engine that takes what the model says, with every step.

    With rates it drafts, and these are `accepted`. It `is_ahead` by a batch.
    """
    drafts = Drafts("eagle", len(accepted)) if accepted else None
    profile = a_profile(step_model=MODEL, kv_starts=(KvStart(limits, blocks),))
    shape = replace(profile.shape, drafts=drafts, asynchronous=is_ahead)
    profile = replace(profile, shape=shape, accepted=accepted)
    return Predictor(profile).replay(trace, limits, ReplayPlan(keep_steps=True))


def each_step(steps: StepColumns) -> StepColumns:
    """Return runs of like steps one by one."""
    times = steps.repeats.astype(int)
    kept = np.repeat(np.arange(len(steps)), times)
    number = np.arange(kept.size) - np.repeat(np.cumsum(times) - times, times)
    found = steps.take(kept)
    duration_s = found.duration_s / found.repeats
    return replace(
        found,
        duration_s=duration_s,
        end_s=found.end_s - (found.repeats - 1 - number) * duration_s,
        decode_context_tokens=found.decode_context_tokens + number * found.decode_seqs,
        repeats=np.ones(kept.size),
    )


def recorded(
    log: ReplayLog,
    *,
    has_details: bool = True,
    server: dict[str, Any] | None = None,
    late_ratio: float = 0.0,
    launch_s: float = 0.0,
    trace: Trace = TRACE,
    accepted: tuple[float, ...] = (),
) -> tuple[StepColumns, list[bytes], list[bytes]]:
    """Return the true steps of a replay, and the lines that a recorder would have written.

    Of a step with a prompt so much of the time is taken for that of the step before, which the
    core, launching it, did not have to wait for. A step that finds the engine idle is launched
    for `launch_s` before the core waits for it. Its drafts were `accepted` at rates.
    """
    assert log.kept_steps is not None
    every = each_step(log.kept_steps)
    true = every.take(every.has_batch)
    numbers = array("q")
    moved_s = np.where(true.prefill_tokens > 0, late_ratio * true.duration_s, 0.0)
    early_s = np.append(moved_s[1:], 0.0)
    seen_s = true.duration_s + early_s - moved_s
    before_s = np.where(found_idle(true), launch_s, 0.0)
    for end_s, took_s, seqs, drafted, prefill, late_s, launched_s in zip(
        true.end_s + early_s,
        seen_s,
        true.decode_seqs,
        true.draft_tokens,
        true.prefill_tokens,
        early_s,
        before_s,
        strict=True,
    ):
        interval = round(took_s * 1e6) if seqs else -1
        # The core's own work, a millisecond, is in the interval and not in what it waited.
        waited = 0 if late_s else round((took_s - launched_s) * 1e6) - 1000
        known = (int(prefill > 0), int(prefill), waited)
        computed = int(seqs + drafted)
        if not has_details:
            known, computed = ((0, 0, -1) if not prefill else (-1, -1, -1)), -1
        ended_us = round((NOW_S + end_s) * 1e6)
        numbers.extend((ended_us, int(seqs), *known[:2], interval, known[2], 0, computed))
    lines = log.timelines

    def seen(instants_s: Floats) -> Floats:
        """Return when the core noticed what ended at the instants."""
        row = np.minimum(np.searchsorted(true.end_s, instants_s - 1e-9), len(true) - 1)
        found: Floats = instants_s + early_s[row]
        return found

    due_s, first_s, last_s = (
        column.tolist() for column in (lines.due_s, seen(lines.first_s), seen(lines.last_s))
    )
    rows = [
        Row(
            arrived_at_s=round(NOW_S + due_s[i], 6),
            input_length=int(trace.prompt_tokens[i]),
            output_length=int(lines.output_tokens[i]),
            status="length",
            e2e_s=round(last_s[i] - due_s[i], 6),
            ttft_s=round(first_s[i] - due_s[i], 6),
            cached_tokens=0,
            decode_s=round(last_s[i] - first_s[i], 6),
            prefill_s=round(first_s[i] - due_s[i], 6),
        )
        for i in range(len(trace))
        if lines.completed[i]
    ]
    head = steps_header("test", server or a_server())
    source = RecordedServer("scope", has_engine_counts=True)
    verified = int(true.decode_seqs[true.draft_tokens > 0].sum())
    drafts = [verified, *(round(verified * rate) for rate in accepted)] if accepted else []
    return (
        true,
        [head, steps_line(numbers, drafts)],
        [header_line(source), *map(row_line, rows)],
    )


def left_early(rows: Sequence[bytes]) -> list[bytes]:
    """Return the rows of requests of which two thirds were left by their clients.

    A millisecond after their last token, before the next one came.
    """
    found = list(rows)
    for number, row in enumerate(rows):
        if number % 3:
            known = msgspec.json.decode(row, type=Row)
            assert known.e2e_s is not None
            cut: dict[str, Any] = {"status": "abort", "decode_s": None, "prefill_s": None}
            cut["e2e_s"] = known.e2e_s + 0.001
            found[number] = row_line(msgspec.structs.replace(known, **cut))
    return found


def found_idle(steps: StepColumns) -> Bools:
    """Return which steps began later than the one before them ended."""
    begin_s = steps.end_s - steps.duration_s
    return begin_s > np.append(-np.inf, steps.end_s[:-1]) + 1e-6


def a_server(**changed: Any) -> dict[str, Any]:
    """Return what a recorder says of the server."""
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    known = {"vllm": "0.32.0", "model": "toy", "limits": limits, "num_blocks": 100_000}
    known |= {"device": "toy", "config": a_config(), "has_details": True}
    return {**known, **changed}


METHOD: Final = {
    "method": "eagle",
    "num_speculative_tokens": 3,
    "max_num_new_slots_for_drafting": 0,
    "use_multi_module_mtp": False,
    "sample_from_anchor": True,
}
"""What a recorder keeps of how an engine drafts."""


def a_config(**changed: Any) -> dict[str, Any]:
    """Return what a recorder keeps of the configuration of such an engine."""
    shape = a_profile().shape
    known: dict[str, Any] = {
        "model_config": {
            "dtype": f"torch.{shape.dtype}",
            "architecture": "LlamaForCausalLM",
            "max_model_len": shape.max_model_len,
            "model": shape.model,
            "is_hybrid": False,
            "layers": [],
            "has_uneven_layers": False,
            "kv_shared_layers": 0,
            "kv_heads": [],
            "sliding_window": None,
            "vocab_size": shape.vocab_size,
        },
        "parallel_config": dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1
        ),
        "cache_config": {"block_size": shape.block_size, "enable_prefix_caching": True},
        "compilation_config": {"cudagraph_capture_sizes": [4, 1], "cudagraph_mode": "FULL"},
        "scheduler_config": {**shape.scheduler, "max_num_seqs": 16, "async_scheduling": False},
        "scheduler_classes": ["vllm.Scheduler", "vllm.Scheduler"],
        "speculative_config": None,
        **dict.fromkeys(("lora_config", "kv_transfer_config"), False),
    }
    return {**known, **changed}


def a_recording(
    folder: Path,
    name: str,
    *,
    trace: Trace = TRACE,
    later_s: float = 0.0,
    held_up_s: float = 0.0,
    **server: Any,
) -> Path:
    """Write what a recorder writes of a server, so much later; steps lie beside it.

    Requests were held up for so long before they came to the engine.
    """
    log = served(trace=trace)
    _, (head, line), (source, *rows) = recorded(log, server=a_server(**server), trace=trace)
    numbers = _unpacked(Path("x"), 2, line).table
    numbers[0] += round(later_s * 1e6)
    (folder / f"{name}.steps").write_bytes(head + steps_line(array("q", numbers.T.ravel())))
    moved = []
    for row in (msgspec.json.decode(row, type=Row) for row in rows):
        assert row.e2e_s is not None
        assert row.ttft_s is not None
        times = {
            "arrived_at_s": round(row.arrived_at_s + later_s - held_up_s, 6),
            "e2e_s": round(row.e2e_s + held_up_s, 6),
            "ttft_s": round(row.ttft_s + held_up_s, 6),
        }
        moved.append(msgspec.structs.replace(row, **times))
    path = folder / f"{name}.jsonl"
    path.write_bytes(source + b"".join(map(row_line, moved)))
    return path
