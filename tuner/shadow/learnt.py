"""The profile of a served engine, learnt from what was recorded of its steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from tuner.engine.serve_config import limits as limits_of
from tuner.engine.shape import EngineShape
from tuner.engine.steps import StepColumns, joined
from tuner.errors import ShadowError, TooFewSamplesError, UsageError
from tuner.shadow.calibration import LARGEST_ERROR_RATIO, Calibration
from tuner.shadow.fit import MIN_STEPS
from tuner.shadow.profiles import Profile, Seen, drafts_words
from tuner.shadow.rebuilt import rebuild_all
from tuner.shadow.recorded import HOW, RecordedRequests, RecordedSteps, Server, check_usable
from tuner.stats import Floats

MIN_SEEN: Final = 20
"""Ours: fewer steps do not tell how long batches so full take."""

FAR_OFF: Final = 0.25
"""Ours: a recording that its own profile replays further off than so is warned of."""


@dataclass(frozen=True, slots=True)
class LearntSteps:
    """What steps of production have taught, and where they say nothing.

    `seen` are the fullest batches that came often enough to count. `off` is how far the
    replayed recording is off what was recorded, by metric, relative and signed, on requests
    that taught nothing but their steps. Drafts were `accepted` at these rates.
    """

    steps: int
    left_out: dict[str, int]
    span_s: float
    seen: Seen
    has_details: bool
    off: dict[str, float]
    accepted: tuple[float, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield what was learnt for people."""
        yield f"learnt from {self.steps:,} steps in {self.span_s:.0f} s"
        if self.accepted:
            yield drafts_words(self.accepted)
        for reason, count in self.left_out.items():
            yield f"left out {count:,} {reason}"
        if not self.has_details:
            yield (
                "the server told no details of its steps, so that prompts in several pieces "
                "taught nothing: add --enable-logging-iteration-details"
            )
        yield (
            f"batches of up to {self.seen.decode_seqs} decoding sequences and "
            f"{self.seen.prefill_tokens:,} prefilled tokens were seen; beyond them predictions "
            "extrapolate"
        )
        if self.off:
            yield "the recording itself, replayed on the profile, is off by:"
            for name, value in self.off.items():
                yield f"  {name:<9} {value:+7.1%}"
        for warning in self.warnings:
            yield f"warning: {warning}"

    @property
    def warnings(self) -> list[str]:
        """What of the recording the profile does not come up with, a sentence each."""
        names = {"ttft p50": "first tokens", "tpot p50": "tokens after the first"}
        found = [
            f"{what} are {abs(self.off[name]):.0%} off in the recording's own replay: its "
            "steps alone do not explain them"
            for name, what in names.items()
            if abs(self.off.get(name, 0.0)) > FAR_OFF
        ]
        if not self.off:
            found.append(
                "the profile was not held to the recorded times: how wrong predictions are is "
                "known of its steps alone"
            )
        if (self.wrong_ratio or 0.0) > LARGEST_ERROR_RATIO:
            found.append(
                f"the profile is wrong by {self.wrong_ratio:.0%}, more than "
                f"{LARGEST_ERROR_RATIO:.0%}: tune does not rank by it"
            )
        return found

    @property
    def wrong_ratio(self) -> float | None:
        """How wrong the profile is by its own recording, None where that was not replayed.

        The first token's time does not count: a server adds to it what is no step, which all
        settings have in common.
        """
        if not self.off:
            return None
        return max(abs(self.off["tpot p50"]), abs(self.off["e2e p50"]))

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return {
            "steps": self.steps,
            "left_out": self.left_out,
            "span_s": self.span_s,
            "most_decode_seqs": self.seen.decode_seqs,
            "most_prefill_tokens": self.seen.prefill_tokens,
            "has_details": self.has_details,
            "off": self.off,
            "accepted": list(self.accepted),
            "warnings": self.warnings,
        }


def learn_profile(
    recorded: Sequence[RecordedSteps],
    requests: RecordedRequests,
    serve_values: Mapping[str, object],
) -> tuple[Profile, LearntSteps]:
    """Return the profile of the engine that production serves with, and what taught it.

    Of several starts of one server the last says what is current. `off` is left empty: the
    recording is replayed by whoever holds it as a trace.

    Raises: ShadowError where nothing can be predicted of such an engine; TooFewSamplesError;
        UsageError if `serve_values` name other limits than it ran with.
    """
    kinds = _of_one_engine(recorded)
    shape, started = kinds[-1]
    current = _served(recorded[-1].server, started)
    _check_named(serve_values, started, current)
    calibration = Calibration(shape, (), (), current, serve_values)
    left_out: Counter[str] = Counter()
    parts: list[StepColumns] = []
    rebuilt = rebuild_all(recorded, requests)
    for one, (_, limits), found in zip(recorded, kinds, rebuilt, strict=True):
        calibration = calibration.and_start(limits, one.server.num_blocks)
        left_out.update(found.left_out)
        calibration = calibration.and_steps(limits, found.stretches())
        calibration = calibration.and_brought(one.brought)
        parts.append(found.steps)
    if shape.drafts is not None and not calibration.accepted:
        raise TooFewSamplesError(
            "no recorded step verified a draft, though the server has a speculative-config",
            "record for longer, over answers of many tokens",
        )
    steps = joined(parts)
    try:
        profile = calibration.profile()
    except TooFewSamplesError as few:
        raise _too_quiet(recorded, len(steps), left_out) from few
    seen = seen_in(steps)
    return replace(profile, seen=seen), LearntSteps(
        steps=len(steps),
        left_out=dict(left_out),
        span_s=sum(float(part.end_s[-1] - part.end_s[0]) for part in parts if len(part)),
        seen=seen,
        has_details=all(one.server.has_details for one in recorded),
        off={},
        accepted=profile.accepted,
    )


def _of_one_engine(recorded: Sequence[RecordedSteps]) -> list[tuple[EngineShape, EngineLimits]]:
    """Return each start's shape and limits. Raises: ShadowError; TooFewSamplesError."""
    if not recorded:
        raise TooFewSamplesError("no steps were recorded", HOW)
    kinds = [check_usable(steps) for steps in recorded]
    shape, _ = kinds[-1]
    others = {text for kind, _ in kinds for text in _differing(kind, shape)}
    last = recorded[-1].server
    others |= {text for one in recorded for text in _started_otherwise(one.server, last)}
    if others:
        raise ShadowError(
            f"the steps are of different engines: {'; '.join(sorted(others))}",
            "name the files of one with --steps",
        )
    return kinds


def _too_quiet(
    recorded: Sequence[RecordedSteps], known: int, left_out: Mapping[str, int]
) -> TooFewSamplesError:
    """Return the error of steps that are too few to learn from, and what to do about it."""
    total = sum(map(len, recorded))
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    has_details = all(steps.server.has_details for steps in recorded)
    more = "" if has_details else "; --enable-logging-iteration-details times each of them"
    return TooFewSamplesError(
        f"{known} of {total} recorded steps teach how long a step takes, and "
        f"{MIN_STEPS} are wanted{f' ({why})' if why else ''}",
        f"record for longer, over a stretch in which several requests run at once{more}",
    )


def _served(server: Server, started: EngineLimits) -> EngineLimits:
    """Return the limits that an engine serves with, which may be below those of its start."""
    options = (server.config or {}).get("scheduler_config", {})
    seqs, tokens = (
        options.get(name) or math.inf
        for name in ("max_num_active_seqs", "max_num_scheduled_tokens")
    )
    return EngineLimits(
        int(min(started.max_num_seqs, float(seqs))),
        int(min(started.max_num_batched_tokens, float(tokens))),
    )


def _check_named(
    serve_values: Mapping[str, object], started: EngineLimits, current: EngineLimits
) -> None:
    """Refuse a configuration that the recorded server did not run with. Raises: UsageError."""
    ran = [(at.max_num_seqs, at.max_num_batched_tokens) for at in (started, current)]
    named = limits_of(serve_values)
    for key, value, *known in zip(
        (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS), named, *ran, strict=True
    ):
        if value not in (None, *known):
            raise UsageError(
                f"the configuration says {key} {value}, and the recorded server ran at "
                f"{current} (max_num_seqs/max_num_batched_tokens)",
                "give the configuration that it was recorded with, or one without limits",
            )


def _differing(one: EngineShape, last: EngineShape) -> Iterator[str]:
    """Yield why the steps of one, or its blocks, say nothing of the last."""
    for name in ("model", "device", "dtype", "block_size", "parallelism", "asynchronous"):
        mine, its = getattr(one, name), getattr(last, name)
        if mine != its:
            yield f"{name} {mine}, and last {its}"
    if one.drafts != last.drafts:
        yield f"drafts {_drafting(one)}, and last {_drafting(last)}"
    if (one.captures_mixed, bool(one.captured_sizes)) != (
        last.captures_mixed,
        bool(last.captured_sizes),
    ):
        yield "CUDA graphs are captured otherwise than last"


def _drafting(shape: EngineShape) -> str:
    drafts = shape.drafts
    return "none" if drafts is None else f"{drafts.tokens} a step by {drafts.method}"


TELLING: Final = {
    "model_config": ("quantization",),
    "cache_config": (
        *("cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes"),
        "num_gpu_blocks_override",
    ),
}
"""What decides how fast an engine is or how many blocks it has, and is in no shape, by section
of vLLM's configuration.

Source: tuner/recorder/plugin.py, KEPT.
"""


def _started_otherwise(one: Server, last: Server) -> Iterator[str]:
    """Yield what else differs; an earlier version of the recorder did not keep it."""
    for section, names in TELLING.items():
        mine, its = ((server.config or {}).get(section, {}) for server in (one, last))
        for name in names:
            if name in mine and name in its and mine[name] != its[name]:
                yield f"{name} {mine[name]}, and last {its[name]}"


def seen_in(steps: StepColumns) -> Seen:
    """Return the fullest batches that came often enough to teach their time."""
    return Seen(_often(steps.decode_seqs), _often(steps.prefill_tokens))


def _often(values: Floats) -> int:
    """Return the largest that `MIN_SEEN` steps reach."""
    return int(np.sort(values)[-min(MIN_SEEN, values.size)]) if values.size else 0
