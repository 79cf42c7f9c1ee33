"""Correct a profile by what its engine was seen to do in production.

A profile that was derived, or measured in process or on another machine of the kind, has the
shape of the step times right and their level off. What was seen is a point of a dashboard (how
long a token took while so many requests ran), recorded steps, or recorded requests (`served`).
Whichever it is, `corrected` makes the new profile of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from operator import methodcaller
from typing import Any, Final, Protocol, Self

import numpy as np

from tuner.engine.limits import EngineLimits
from tuner.engine.protocol import Batch
from tuner.engine.steps import StepColumns, joined
from tuner.errors import Caveat, ShadowError, TooFewSamplesError, UsageError
from tuner.replay.plan import ReplayPlan
from tuner.shadow.fit import MIN_STEPS, undistorted
from tuner.shadow.launches import on_device
from tuner.shadow.predictor import Predictor
from tuner.shadow.profiles import Profile, drafts_words
from tuner.shadow.speed import Uncertainty
from tuner.shadow.step_model import TERMS, StepModel
from tuner.stats import Floats
from tuner.traffic.prefixes import HashIds
from tuner.traffic.traces import LoadModel, Trace
from tuner.traffic.windows import parse_duration

LARGEST_RATIO: Final = 2.0
"""Ours: what is further off is of another engine, or was not a step that only decodes. It holds
for all corrections of a profile together."""

TURNS: Final = 10
"""How often each place of a closed loop is taken by the next request: ours, for a mean."""

CONTEXT_TOKENS: Final = 1000
"""Ours, where nothing is said: a prompt of a chat and half of its answer."""

LEVEL, WRONG_RATIO = 0.05, 0.10
"""How far the level scatters once a point is known, in logarithms, and how wrong the profile is
said to be then: ours; of published points half come within 5 %, four in five within 10 %."""

_FORM = re.compile(
    r"(?P<name>itl|tpot)=(?P<time>[^@,]+)@running=(?P<running>\d+(?:\.\d*)?|\.\d+)"
    r"(?P<more>(?:,[a-z]+=\d{1,9})*)"
)
_MORE: Final = ("context", "prompt", "output")


class Correction(Protocol):
    """What was corrected, and by what."""

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""

    def lines(self) -> Iterator[str]:
        """Yield what was corrected for people."""


def corrected(
    profile: Profile,
    change: Callable[[StepModel], StepModel],
    by: str,
    wrong_ratio: float,
    uncertainty: Uncertainty | None,
    ratio: float = 1.0,
) -> Profile:
    """Return the profile with the corrected step times, and what they were corrected by.

    Those of its variants change alike, as they are compared with it. `ratio` is how many times
    as long every step takes now.
    """
    return replace(
        profile.with_steps(change),
        uncertainty=uncertainty,
        metric_error_ratio=wrong_ratio,
        made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        moved_ratio=profile.moved_ratio * ratio,
        calibrated_on=(*profile.calibrated_on, by),
        origin=profile.origin_corrected(by),
    )


# By a point.


@dataclass(frozen=True, slots=True)
class Anchor:
    """A time between tokens that was measured while so many requests ran.

    `context_tokens` is how much each of them attended to in the mean. Where the lengths of
    requests are known, each token's time holds its share of others' prompts: `prompt_tokens`
    are those that a request computes, 0 where only decoding counts. What it attended to besides
    them and half of its answer, the prefix cache held. Of an engine that drafts it is the time
    between two steps of a request, or where it is `of_tokens` (tpot) between two tokens.

    Units: seconds.
    Raises: UsageError for a time or a number that cannot be.
    """

    itl_s: float
    running: float
    context_tokens: int = CONTEXT_TOKENS
    prompt_tokens: int = 0
    output_tokens: int = 0
    of_tokens: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        if not (0 < self.itl_s < math.inf and 0.5 <= self.running < 1e6):
            raise UsageError(
                f"an anchor has a time above 0 and at least one running request, got {self}"
            )
        if self.context_tokens < max(1, self.prompt_tokens):
            raise UsageError(
                "an anchor has a context of at least 1 token, and of its prompt, got "
                f"{self.context_tokens}"
            )
        if bool(self.prompt_tokens) is not bool(self.output_tokens):
            raise UsageError("an anchor has the lengths of prompt and output, or neither")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an anchor.

        Raises: UsageError.

        >>> Anchor.parse("itl=12.5ms@running=14,context=900").context_tokens
        900
        """
        found = _FORM.fullmatch(text.replace(" ", ""))
        more = [part.split("=") for part in (found["more"].split(",")[1:] if found else ())]
        if found is None or not {name for name, _ in more} <= set(_MORE):
            raise UsageError(
                f"--anchor must be as itl=12.3ms@running=14, got {text!r}",
                "the mean time between tokens and the mean number of running requests of a "
                "steady hour; add ,prompt=900,output=300 for the mean lengths of requests, or "
                ",context=TOKENS for what each attends to",
            )
        lengths: dict[str, int] = {}
        for name, value in more:
            if name in lengths:
                raise UsageError(f"--anchor names {name} twice, in {text}", "name it once")
            if int(value) < 1:
                raise UsageError(
                    f"--anchor: {name} must be at least 1, got {value}",
                    "leave it out where it is not known",
                )
            lengths[name] = int(value)
        prompt, output = lengths.get("prompt", 0), lengths.get("output", 0)
        middle = prompt + output // 2 if prompt else CONTEXT_TOKENS
        return cls(
            parse_duration(found["time"]),
            float(found["running"]),
            lengths.get("context", middle),
            prompt,
            output,
            found["name"] == "tpot",
        )

    def __str__(self) -> str:
        """Return it as it is written."""
        lengths = (
            f",prompt={self.prompt_tokens},output={self.output_tokens}"
            if self.prompt_tokens
            else ""
        )
        return (
            f"{'tpot' if self.of_tokens else 'itl'}={self.itl_s * 1e3:.4g}ms"
            f"@running={self.running:.4g},"
            f"context={self.context_tokens}{lengths}"
        )

    def predicted_s(self, profile: Profile, limits: EngineLimits) -> float:
        """Return what the profile says of it at the limits that were served.

        Between whole numbers of requests linearly.
        """
        low = math.floor(self.running)
        share, low_s = self.running - low, self._step_s(profile, limits, low)
        if not share:
            return low_s
        return (1 - share) * low_s + share * self._step_s(profile, limits, low + 1)

    def check_fits(self, profile: Profile, limits: EngineLimits) -> None:
        """Refuse more requests than run at once at the limits. Raises: ShadowError."""
        if self.running > limits.max_num_seqs:
            raise ShadowError(
                f"{self.running:.4g} requests ran at once, more than max_num_seqs "
                f"{limits.max_num_seqs} lets run",
                "name the limits that were served: --config, or --max-num-seqs",
            )
        # What the prefix cache held may be shared.
        own = self.prompt_tokens + self.output_tokens // 2 or self.context_tokens
        blocks = profile.num_blocks_at(limits)
        held = math.floor(self.running) * int(profile.shape.held_blocks(np.array([own]))[0])
        if held > blocks:
            raise ShadowError(
                f"{self.running:.4g} requests of {own:,} tokens take {held:,} KV-cache blocks, "
                f"and an engine started with {limits} has {blocks:,}",
                "name the mean lengths of requests, as in prompt=900,output=300, prompt tokens "
                "being those that the prefix cache did not hold",
            )

    def _step_s(self, profile: Profile, limits: EngineLimits, running: int) -> float:
        """Return the mean time between steps or tokens with so many requests running.

        As a closed loop of them has it, where their lengths are known; else of decodes alone.
        """
        seqs = min(max(running, 1), limits.max_num_seqs)
        brings = 1 + sum(profile.accepted)
        if not self.prompt_tokens:
            drafts = seqs * profile.shape.draft_tokens
            batch = Batch(seqs, 0, 0, seqs * self.context_tokens, 0, 0, 0, 0.0, drafts)
            step_s = profile.step_model_at(limits).interval_s(batch)
            return step_s / brings if self.of_tokens else step_s
        plan = ReplayPlan(load_model=LoadModel.CLOSED, concurrency=seqs)
        shape = profile.shape
        trace = self._requests(TURNS * seqs, shape.max_model_len, shape.block_size)
        lines = Predictor(profile).replay(trace, limits, plan).timelines
        gaps = float((trace.output_tokens - 1).sum())
        token_s = float((lines.last_s - lines.first_s).sum()) / gaps
        return token_s if self.of_tokens else token_s * brings

    def _requests(self, count: int, longest: int, block_size: int) -> Trace:
        """Return so many requests of about the lengths that are known in the mean.

        They have in common, and so in the prefix cache, what they attend to besides.
        """
        rng = np.random.default_rng(0)
        prompts, outputs = (
            np.maximum(least, rng.uniform(0.5, 1.5, count) * mean).astype(np.int64)
            for least, mean in ((1, self.prompt_tokens), (2, self.output_tokens))
        )
        outputs = np.minimum(outputs, max(2, longest // 2))
        room = np.maximum(1, longest - outputs)
        prompts = np.minimum(prompts, room)
        cached = self.context_tokens - self.prompt_tokens - self.output_tokens // 2
        shared = min(max(0, cached), int((room - prompts).min())) // block_size
        prompts += shared * block_size
        ends = shared + np.cumsum(prompts // block_size - shared)
        rows = [
            (*range(shared), *range(end - tokens // block_size + shared, end))
            for end, tokens in zip(ends.tolist(), prompts.tolist(), strict=True)
        ]
        hashes = HashIds.from_rows(rows, block_size) if shared else None
        return Trace(np.zeros(count), prompts, outputs, hashes=hashes, source=str(self))


@dataclass(frozen=True, slots=True)
class Anchored:
    """By how much a point has corrected a profile, and which drafts are `accepted` by now."""

    anchor: Anchor
    predicted_s: float
    accepted: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """How many times as long a step takes as the profile said."""
        return self.anchor.itl_s / self.predicted_s

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        found = {
            "anchor": str(self.anchor),
            "predicted_itl_s": self.predicted_s,
            "ratio": self.ratio,
            "accepted": list(self.accepted),
        }
        return _without_rates_of_none(found)

    def lines(self) -> Iterator[str]:
        """Yield what was corrected for people."""
        if self.accepted:
            yield drafts_words(self.accepted)
        what = "step" if self.accepted and not self.anchor.of_tokens else "token"
        yield (
            f"a {what} takes {self.anchor.itl_s * 1e3:.2f} ms with {self.anchor.running:.4g} "
            f"requests running, predicted were {self.predicted_s * 1e3:.2f} ms"
        )
        yield f"every step takes {self.ratio:.2f} times as long as the profile said"


def _without_rates_of_none(found: dict[str, Any]) -> dict[str, Any]:
    """Return everything for --json without rates where nothing is drafted."""
    return {name: value for name, value in found.items() if name != "accepted" or value}


def by_anchor(
    profile: Profile, anchor: Anchor, limits: EngineLimits, accepted: Sequence[float] = ()
) -> tuple[Profile, Anchored]:
    """Return the profile whose steps take as long as was measured, and what that changed.

    `limits` are those that were served, `accepted` the rates at which drafts were, empty where
    nobody knows.

    Raises: ShadowError for a point that cannot be at the limits, or is too far from the
        profile, or for drafts of another number.
    """
    anchor.check_fits(profile, limits)
    if accepted:
        profile = _that_accepts(profile, tuple(accepted))
    found = Anchored(anchor, anchor.predicted_s(profile, limits), profile.accepted)
    check_near(
        profile,
        found.ratio,
        f"{anchor} is {shown(found.ratio)} times the {found.predicted_s * 1e3:.2f} ms",
    )
    wrong = _wrong_at_a_point(profile, abs(math.log(found.ratio)))

    # The point does not tell the host from the device: it is met whichever is the slower one.
    slower, by = methodcaller("slower", found.ratio), str(anchor)
    return corrected(profile, slower, by, wrong, _narrowed(profile), found.ratio), found


def _that_accepts(profile: Profile, accepted: tuple[float, ...]) -> Profile:
    """Return the profile whose drafts are accepted so often. Raises: ShadowError."""
    drafts = profile.shape.draft_tokens
    if len(accepted) != drafts:
        raise ShadowError(
            f"production verifies {len(accepted)} drafts a step, the profile's engine "
            f"{drafts or 'none'}",
            "name the profile of the configuration that is served, with its speculative-config",
        )
    caveats = tuple(c for c in profile.caveats if c is not Caveat.DRAFTS_ON_RANDOM_TEXT)
    return replace(profile, accepted=accepted, caveats=caveats)


def _wrong_at_a_point(profile: Profile, moved: float) -> float:
    """Return how wrong a profile is taken to be once a point has moved it by a logarithm."""
    own = profile.metric_error_ratio
    if own is None or moved > own:
        # What the point moves by more than the profile's own error was wrong by more than that.
        return WRONG_RATIO
    # Of an error that was measured the point explains as much as it moves.
    left = 0.0 if profile.origin else own - moved
    return max(min(own, WRONG_RATIO), left)


def check_near(profile: Profile, ratio: float, what: str) -> None:
    """Refuse what is of another engine, at once or by many corrections. Raises: ShadowError."""
    in_all = profile.moved_ratio * ratio
    if _is_near(ratio) and _is_near(in_all):
        return
    said = f"{what} that the profile says of {profile.shape.model} on {profile.shape.device}"
    if _is_near(ratio):
        raise ShadowError(
            f"{said}, and {shown(in_all)} times what it said before it was corrected",
            "correct the profile as it was before, or learn one with tune profile fit",
        )
    raise ShadowError(
        said,
        "the profile is of another engine, or what was measured not its steady decoding; "
        "learn one with tune profile fit",
    )


def _is_near(ratio: float) -> bool:
    return 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO


def shown(ratio: float) -> str:
    """Return a ratio with as many digits as tell on which side of the bound it lies.

    >>> shown(2.016), shown(3.3), shown(0.4996)
    ('2.02', '3.3', '0.4996')
    """
    texts = (f"{ratio:.{digits}g}" for digits in range(2, 17))
    return next((t for t in texts if _is_near(float(t)) is _is_near(ratio)), repr(ratio))


def _narrowed(profile: Profile) -> Uncertainty | None:
    """Return what is left open once the level is known: all terms moved alike by less.

    How far a start at another time may be off is kept, but for what the level says of it.
    """
    uncertainty = profile.uncertainty
    if uncertainty is None:
        return None
    table = uncertainty.table
    for row in table:
        terms = row[: len(TERMS)]
        if terms.min() > LEVEL and terms.min() == terms.max():
            row[: len(TERMS)] = LEVEL
    directions = type(uncertainty).of(table).directions
    return replace(uncertainty, directions=directions, start=min(uncertainty.start, LEVEL))


# By recorded steps.


@dataclass(frozen=True, slots=True)
class StepRatio:
    """By how much recorded steps have corrected a profile, which the first half of them did.

    `off_before` and `off_now` are relative and signed, of all the time of the second half;
    drafts are `accepted` so often by now.
    """

    steps: int
    ratio: float
    off_before: float
    off_now: float
    accepted: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return _without_rates_of_none(asdict(self))

    def lines(self) -> Iterator[str]:
        """Yield what was corrected for people."""
        if self.accepted:
            yield drafts_words(self.accepted)
        yield (
            f"every step takes {self.ratio:.2f} times as long as the profile said, by the "
            f"first half of {self.steps:,}"
        )
        yield (
            f"the time of the others was predicted {self.off_before:+.1%} off, "
            f"now {self.off_now:+.1%}"
        )


def by_steps(
    profile: Profile,
    stretches: Sequence[tuple[EngineLimits, StepColumns]],
    accepted: Sequence[float] = (),
) -> tuple[Profile, StepRatio]:
    """Return the profile whose steps take as long as recorded ones, and what that changed.

    Each stretch comes with the limits that were served then; drafts were `accepted` at rates,
    empty where nobody knows. For few steps, or of few kinds: of many a profile of their own is
    learnt (`recorded`).

    Raises: TooFewSamplesError with fewer than MIN_STEPS; ShadowError where they are too far
        from the profile, or for drafts of another number.
    """
    if accepted:
        profile = _that_accepts(profile, tuple(accepted))
    models = [profile.step_model_at(limits) for limits, _ in stretches]
    parts = [columns for _, columns in stretches]
    parts = on_device(parts, _predicted_s(models, parts))
    all_predicted_s = np.concatenate([np.empty(0), *_predicted_s(models, parts)])
    seen = joined(parts)
    rows = np.flatnonzero(seen.has_batch)
    count = rows.size
    if count < MIN_STEPS:
        raise TooFewSamplesError(
            f"{count} recorded steps have a known batch, at least {MIN_STEPS} are needed",
            "record for longer",
        )
    took_s, predicted_s = seen.duration_s[rows], all_predicted_s[rows]
    kept = undistorted(took_s, predicted_s, seen.is_decode_only[rows])

    def ratio(half: slice) -> float:
        return float(took_s[half][kept[half]].sum() / predicted_s[half][kept[half]].sum())

    first, second = ratio(slice(0, count // 2)), ratio(slice(count // 2, None))
    check_near(profile, first, f"recorded steps take {shown(first)} times as long as those")
    off = (1 / second - 1, first / second - 1)
    found = StepRatio(count, first, *off, accepted=profile.accepted)
    wrong = max(abs(found.off_now), min(profile.metric_error_ratio or math.inf, WRONG_RATIO))
    by = f"{count} recorded steps"
    scaled = methodcaller("scaled", first)
    return corrected(profile, scaled, by, wrong, _narrowed(profile), first), found


def _predicted_s(models: Sequence[StepModel], parts: Sequence[StepColumns]) -> list[Floats]:
    """Return what each model says of its steps."""
    return [model.predict_s(steps) for model, steps in zip(models, parts, strict=True)]
