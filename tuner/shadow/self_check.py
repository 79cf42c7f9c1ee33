"""Whether the vLLM at hand decides what `fast_forward` foresees, found out by trying.

The same few requests go through two shadows, of which one asks the scheduler about every step.
Another vLLM may admit, book blocks or count tokens on their way otherwise; what comes of that
would look like any other prediction.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import PrefixCacheNeeded
from tuner.engine.shape import EngineShape
from tuner.shadow.engine import ShadowEngine
from tuner.shadow.fast_forward import is_foreseeable
from tuner.shadow.step_model import StepModel
from tuner.traffic.prompts import TokenPrompt

# Ours: small numbers, of which every one has its edge met: the cap binds, prompts are longer
# than the budget, blocks run short, some requests come while all others decode.
_LIMITS: Final = EngineLimits(5, 96)
_REQUESTS: Final = 24
_LONGEST: Final = 110
_STEPS: Final = StepModel.linear(0.01, 0.0007, 0.00003, decode_context_s=1e-7, tidy_s=0.001)
_tried: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class _Request:
    due_s: float
    prompt: TokenPrompt
    output_tokens: int


def departure(shape: EngineShape) -> str:
    """Return where a foreseen replay departs from what vLLM decides; empty if nowhere.

    Tried once for each shape in a process; takes a fraction of a second.
    """
    if not is_foreseeable(shape):
        return ""
    key = repr(shape)
    if key not in _tried:
        _tried[key] = _departure(shape)
    return _tried[key]


def _departure(shape: EngineShape) -> str:
    enough = _REQUESTS * (2 * _LONGEST // shape.block_size + 2)
    few = 4 * _LONGEST // shape.block_size + 4  # the two longest and no more
    chunks = bool(shape.scheduler.get("enable_chunked_prefill", True))
    # A whole prompt has to fit into the budget where it is not cut into pieces.
    limits = _LIMITS if chunks else replace(_LIMITS, max_num_batched_tokens=shape.max_model_len)
    for blocks, sharing in ((enough, False), (enough, True), (few, False), (few, True)):
        requests = _requests(shape, sharing=sharing)
        ends = []
        for fast in (True, False):
            engine = ShadowEngine(shape, limits, blocks, _STEPS, fast=fast)
            try:
                ends.append(_ends_s(engine, requests, sharing=sharing))
            except PrefixCacheNeeded:
                ends.append({})
            except Exception as broken:  # noqa: BLE001 - it is told, and the shadow asks then
                # Whatever a scheduler that keeps other books makes of the account of ours; and
                # where not even asking goes through, nothing was shown.
                did = "foreseeing" if fast else "trying"
                return f"{did} it ends in {type(broken).__name__}: {broken}"
        foreseen_s, decided_s = ends
        for row, at_s in decided_s.items():
            told_s = foreseen_s.get(row, math.nan)
            if not math.isclose(told_s, at_s, rel_tol=1e-9, abs_tol=1e-9):
                return f"request {row} ends at {at_s:.6f} s, foreseen was {told_s:.6f} s"
    return ""


def _requests(shape: EngineShape, *, sharing: bool) -> list[_Request]:
    """Return requests of all sorts of lengths, in bursts and by themselves."""
    longest = max(2, min(_LONGEST, shape.max_model_len // 2 - 1))
    found, due_s = [], 0.0
    for i in range(_REQUESTS):
        due_s += (0.0, 0.013, 0.0, 0.21, 0.07, 0.9)[i % 6]
        prompt = 1 + (i * 37 + 11) % longest
        output = 1 + (i * 53 + 29) % longest
        first = 1 if sharing and i % 3 == 0 else i + 2
        ids = [first % shape.vocab_size, *(j % shape.vocab_size for j in range(1, prompt))]
        found.append(_Request(due_s, TokenPrompt(ids), output))
    return found


def _ends_s(
    engine: ShadowEngine, requests: list[_Request], *, sharing: bool
) -> dict[int, float]:
    """Return when each request ended."""
    engine.reset(sharing=sharing)
    left, now_s = deque(enumerate(requests)), 0.0
    ends_s: dict[int, float] = {}
    while left or engine.has_work():
        if not engine.has_work():
            now_s = max(now_s, left[0][1].due_s)
        while left and left[0][1].due_s <= now_s:
            row, request = left.popleft()
            engine.add(row, request.prompt, request.output_tokens)
        step = engine.step(left[0][1].due_s - now_s if left else math.inf)
        now_s += step.duration_s
        ends_s |= {one.row: now_s for one in step.emitted if one.is_last}
    return ends_s
