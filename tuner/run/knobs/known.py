"""The knobs beside the two limits: what each may be set to, and what of an engine that changes.

A value changes what predicts, since that is all that a prediction goes by, and the
configuration that is served. Answers also which vLLM has a knob.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from tuner.engine.shape import LARGE_GRAPH
from tuner.errors import UsageError
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import KvStart, Profile
from tuner.traffic.traces import Trace

# Sizes of the KV cache, and buffers of an engine over what it is capped at, that are tried:
# ours, steps of about a third.
KV_RATIOS: Final = (0.25, 0.35, 0.5, 0.7, 1.4, 2.0)
BUFFER_RATIOS: Final = (2, 4)
# From how many tokens on a prompt may be a long one, and shares of the blocks that are kept
# free: ours, as far apart as their effects.
LONG_PREFILLS: Final = (128, 256, 512, 1024, 2048, 4096)
WATERMARKS: Final = (0.01, 0.05, 0.1)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A value of a knob, in words, and by the keys of a configuration.

    `engine` returns what predicts such an engine, `traffic` the trace as clients send it then.
    """

    text: str
    values: Mapping[str, object]
    engine: Callable[[Predictor], Predictor]
    traffic: Callable[[Trace], Trace] = lambda trace: trace


@dataclass(frozen=True, slots=True)
class Place:
    """Where a knob is turned: what predicts the engine, at which limits, on which traffic."""

    predictor: Predictor
    limits: EngineLimits
    pieces: Sequence[Trace]

    @property
    def blocks(self) -> int:
        """The KV-cache blocks of the engine."""
        return self.predictor.simulated(self.limits).num_blocks

    def option(self, name: str) -> object:
        """Return what an option of the scheduler is set to, None where it says nothing."""
        return self.predictor.profile.shape.scheduler.get(name)


@dataclass(frozen=True, slots=True)
class Knob:
    """What can be set beside the two limits.

    `changes` returns the values to try, or why there are none. `key` is vLLM's; releases before
    0.`since` do not have it. With `advice_only` a value is told and never set, as the text says
    why. `acts` says when vLLM reads it.
    """

    name: str
    key: str
    text: str
    acts: str
    changes: Callable[[Place], Sequence[Change] | str] = field(repr=False)
    since: int = 0
    advice_only: bool = False

    @property
    def since_text(self) -> str:
        """Which releases have it."""
        return f"vLLM 0.{self.since} and later" if self.since else "every vLLM from 0.20 on"


def _with_shape(predictor: Predictor, **changed: object) -> Predictor:
    shape = replace(predictor.profile.shape, **changed)  # type: ignore[arg-type]
    return predictor.of(replace(predictor.profile, shape=shape))


def _option(key: str, value: float | bool) -> Change:  # noqa: FBT001 - a value as any other
    name = key.replace("-", "_")
    text = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else f"{value:g}"

    def engine(predictor: Predictor) -> Predictor:
        options = {**predictor.profile.shape.scheduler, name: value}
        return _with_shape(predictor, scheduler=options)

    return Change(text or "", {key: value}, engine)


def _kv_memory(place: Place) -> Sequence[Change]:
    least = least_blocks(place.predictor.profile)
    return [kv_times(place, r) for r in KV_RATIOS if int(r * place.blocks) >= least]


def least_blocks(profile: Profile) -> int:
    """Return with how few KV blocks vLLM starts: those of one request of max-model-len.

    Source: vLLM vllm/v1/core/kv_cache_utils.py, _check_enough_kv_cache_memory.
    """
    shape = profile.shape
    in_flight = shape.in_flight_tokens(profile.current_limits)
    return int(shape.held_blocks(np.array([shape.max_model_len]), in_flight)[0])


def kv_times(place: Place, ratio: float) -> Change:
    """Return a KV cache of so many times as many blocks, whatever the limits."""
    blocks = max(2, int(ratio * place.blocks))

    def engine(predictor: Predictor) -> Predictor:
        profile = predictor.profile
        starts = [
            KvStart(s.limits, max(2, int(ratio * s.num_blocks))) for s in profile.kv_starts
        ]
        return predictor.of(replace(profile, kv_starts=tuple(starts)))

    return Change(f"{ratio:g} x", {"num-gpu-blocks-override": blocks}, engine)


def _prefix_caching(place: Place) -> Sequence[Change] | str:
    shape = place.predictor.profile.shape
    is_on = shape.prefix_caching
    if shape.has_states:
        return "states are kept in blocks of another size with it: --variant starts one"
    if not is_on and all(piece.hashes is None for piece in place.pieces):
        return "the trace records no prefixes (hash_ids), by which prompts could be shared"
    text = "off" if is_on else "on"
    return [
        Change(
            text,
            {"enable-prefix-caching": not is_on},
            lambda predictor: _with_shape(predictor, prefix_caching=not is_on),
        )
    ]


def _long_prefill(place: Place) -> Sequence[Change] | str:
    if place.option("enable_chunked_prefill") is False:
        return "prompts are not computed in chunks"
    key = "long-prefill-token-threshold"
    longest = max(int(piece.prompt_tokens.max()) for piece in place.pieces)
    most = min(longest, place.limits.max_num_batched_tokens)
    now = place.option("long_prefill_token_threshold") or 0
    tried = [tokens for tokens in (0, *LONG_PREFILLS) if tokens < most and tokens != now]
    return [
        _option(key, tokens) for tokens in tried
    ] or "no prompt is longer than any threshold"


def _reserve(place: Place) -> Sequence[Change]:
    now = bool(place.option("scheduler_reserve_full_isl"))
    return [_option("scheduler-reserve-full-isl", not now)]


def _watermark(place: Place) -> Sequence[Change]:
    now = place.option("watermark") or 0.0
    return [_option("watermark", share) for share in (0.0, *WATERMARKS) if share != now]


def _captured(place: Place) -> Sequence[Change] | str:
    shape = place.predictor.profile.shape
    if not shape.captured_sizes:
        return "this engine captures no graphs"
    now = place.predictor.simulated(place.limits).step_model.graphs.sizes
    made: dict[tuple[int, ...], str] = {}
    for text, top, is_fine in (
        ("every size to 32", None, True),
        (f"up to {2 * LARGE_GRAPH}", 2 * LARGE_GRAPH, False),
    ):
        sizes = shape.chosen_sizes(place.limits, top=top, is_fine=is_fine)
        made.setdefault(sizes, text)
    return [
        Change(
            text,
            {"cudagraph-capture-sizes": list(sizes)},
            lambda predictor, sizes=sizes: _with_shape(predictor, captured_sizes=sizes),  # type: ignore[misc]
        )
        for sizes, text in made.items()
        if sizes != now
    ] or "other sizes would be the same at these limits"


def _buffers(place: Place) -> Sequence[Change]:
    """Return engines started at larger limits than they are capped at."""
    seqs, tokens = place.limits.max_num_seqs, place.limits.max_num_batched_tokens
    caps = {"max-num-active-seqs": seqs, "max-num-scheduled-tokens": tokens}
    return [
        Change(
            f"buffers for {start}",
            {
                MAX_NUM_SEQS: start.max_num_seqs,
                MAX_NUM_BATCHED_TOKENS: start.max_num_batched_tokens,
            }
            | caps,
            lambda predictor, start=start: replace(  # type: ignore[misc]
                predictor, ceiling=start, has_own_graphs=False
            ),
        )
        for start in (EngineLimits(r * seqs, r * tokens) for r in BUFFER_RATIOS)
    ]


def _priority(place: Place) -> Sequence[Change] | str:
    if place.option("policy") == "priority":
        return [
            Change(
                "by arrival",
                {"scheduling-policy": "fcfs"},
                lambda predictor: _with_policy(predictor, "fcfs"),
                lambda trace: replace(trace, priorities=None, recorded=None),
            )
        ]
    return [
        Change(
            "short first",
            {"scheduling-policy": "priority"},
            lambda predictor: _with_policy(predictor, "priority"),
            short_first,
        )
    ]


def _with_policy(predictor: Predictor, policy: str) -> Predictor:
    return _with_shape(
        predictor, scheduler={**predictor.profile.shape.scheduler, "policy": policy}
    )


def short_first(trace: Trace) -> Trace:
    """Return the trace with a class for each doubling of the tokens, short ones first."""
    tokens = trace.prompt_tokens + trace.output_tokens
    return replace(
        trace, recorded=None, priorities=np.log2(np.maximum(tokens, 1)).astype(np.int64)
    )


def _asynchronous(place: Place) -> str:
    """Say what it is, and what tells what it brings: a profile knows one way alone.

    Source: tests/benchmarks/results/gpu_h200, `race.again` and the blocks of `truth-sync`.
    """
    seen = "on an H200 a decode of a 7B model took 5.3 ms with it and 7.1 without"
    if place.predictor.profile.shape.asynchronous:
        return f"it is on and stays on: {seen}"
    variant = "--variant async:async-scheduling=true"
    return f"it is off: {seen}; what it brings here a start with it tells, {variant}"


_AT_START: Final = "at the start; a running server keeps what it has"
_EACH_STEP: Final = "at each step, from the start's options"

KNOBS: Final[Mapping[str, Knob]] = {
    knob.name: knob
    for knob in (
        Knob(
            "kv-memory",
            "kv-cache-memory-bytes",
            "How much memory the KV cache has, by gpu-memory-utilization or in bytes: how low "
            "it may go before tails grow, and what more of it brings. It is told and not set: "
            "what of the memory is free is not in a trace.",
            _AT_START,
            _kv_memory,
            advice_only=True,
        ),
        Knob(
            "prefix-caching",
            "enable-prefix-caching",
            "Whether what an earlier prompt began with is taken from the KV cache. Hits are "
            "those of the trace; what hashing costs the host is not predicted.",
            _AT_START,
            _prefix_caching,
        ),
        Knob(
            "long-prefill",
            "long-prefill-token-threshold",
            "How many tokens of one prompt a step computes at most beside other requests.",
            _EACH_STEP,
            _long_prefill,
        ),
        Knob(
            "reserve-full-isl",
            "scheduler-reserve-full-isl",
            "Whether a request waits until its whole prompt fits into the KV cache.",
            _EACH_STEP,
            _reserve,
        ),
        Knob(
            "watermark",
            "watermark",
            "The share of KV blocks that is kept free when requests are admitted, so that "
            "those that run are preempted less.",
            _EACH_STEP,
            _watermark,
            since=24,
        ),
        Knob(
            "captured-sizes",
            "cudagraph-capture-sizes",
            "For which batch sizes CUDA graphs are captured: a batch is padded to the next. "
            "What their memory costs the KV cache is not predicted.",
            _AT_START,
            _captured,
        ),
        Knob(
            "buffers",
            "max-num-active-seqs",
            "Buffers and graphs for larger limits than the scheduler is capped at "
            "(max-num-active-seqs, max-num-scheduled-tokens). It is told and not set: "
            "--format vllm-exact deploys the buffers that were measured.",
            _AT_START,
            _buffers,
            since=32,
            advice_only=True,
        ),
        Knob(
            "priority",
            "scheduling-policy",
            "Which request waits: by arrival, or by the priority that clients send. It is told "
            "and not set, because clients would have to send it.",
            _AT_START,
            _priority,
            advice_only=True,
        ),
        Knob(
            "async-scheduling",
            "async-scheduling",
            "Whether the next step is scheduled while the device computes the last.",
            _AT_START,
            _asynchronous,
            advice_only=True,
        ),
    )
}


def knob_named(name: str) -> Knob:
    """Return a knob by our name or by vLLM's key. Raises: UsageError, with the nearest."""
    wanted = name.strip().removeprefix("--").replace("_", "-")
    by_key = {knob.key: knob for knob in KNOBS.values()}
    found = KNOBS.get(wanted) or by_key.get(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, [*KNOBS, *by_key], 1, 0.4)
        meant = f"; the nearest is {near[0]}" if near else ""
        raise UsageError(
            f"there is no knob {name!r}, expected some of {', '.join(KNOBS)}{meant}",
            "tune explain says what each does",
        )
    return found


def check_has(names: Sequence[str], vllm_version: str) -> None:
    """Refuse knobs that a vLLM lacks. Raises: UsageError, with the release that has it."""
    found = re.match(r"0\.(\d+)", vllm_version)
    for knob in map(knob_named, names):
        if found is not None and int(found[1]) < knob.since:
            raise UsageError(
                f"vLLM {vllm_version} has no {knob.key}: it came with vLLM 0.{knob.since}",
                f"leave {knob.name} out of --knobs, or upgrade vLLM",
            )
