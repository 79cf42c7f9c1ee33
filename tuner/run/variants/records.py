"""Which variants of an engine there are, and what a run says of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tuner.engine.limits import EngineLimits
from tuner.engine.serve_config import (
    LIVE_LIMIT_KEYS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    hyphenated,
    parse_engine_args,
    shown_argument,
)
from tuner.errors import UsageError
from tuner.redact import redacted
from tuner.run.knobs.records import gain_text, settings_text
from tuner.search.objective import Bounds, moved, named
from tuner.stats import short

AS_IT_IS: Final = "as it is"
"""The name of the configuration without any change, which no variant can have."""

VARIANTS_DIR: Final = "variants"
"""The folder of a run directory that holds a run of each variant."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_OTHER_ANSWERS: Final = frozenset(
    {
        *("model", "tokenizer", "tokenizer-mode", "revision", "code-revision"),
        *("tokenizer-revision", "hf-config-path", "hf-overrides", "runner", "convert"),
        *("chat-template", "generation-config", "override-generation-config"),
        *("lora-modules", "logits-processors", "reasoning-parser", "tool-call-parser"),
    }
)
"""Keys with which a server would give other answers, not the same ones at another speed."""
_OTHER_REQUESTS: Final = frozenset({"max-model-len", "data-parallel-size"})
"""Keys with which it would serve other requests: longer ones or none so long, or a share."""
_LIMITS: Final = frozenset({MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, *LIVE_LIMIT_KEYS})


def parse_variants(arguments: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return variants NAME:KEY=VALUE; one that is named again has more than one key.

    A name without keys is that of a variant which a profile knows.

    Raises: UsageError.

    >>> parse_variants(["fp8:quantization=fp8", "fp8:block-size=32", "eager"])
    {'fp8': {'quantization': 'fp8', 'block-size': 32}, 'eager': {}}
    """
    pairs: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, pair = argument.partition(":")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--variant must be NAME:KEY=VALUE, got {shown_argument(argument)!r}",
                "for example fp8:quantization=fp8; name it again for another key",
            )
        pairs.setdefault(name, []).extend([pair] if pair else [])
    return {name: parse_engine_args(keys, "--variant") for name, keys in pairs.items()}


def checked_variants(
    variants: Mapping[str, Mapping[str, object]],
) -> dict[str, dict[str, object]]:
    """Return variants that can be compared. Raises: UsageError."""
    found = {}
    for name, values in variants.items():
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"a variant's name must be letters, digits, '.', '_' and '-', got {name!r}",
                "for example fp8",
            )
        found[name] = {hyphenated(key): value for key, value in values.items()}
        for key in found[name]:
            _check_key(name, key)
        if redacted(found[name]) != found[name]:
            raise UsageError(
                f"variant {name} sets a secret, which no run keeps",
                "set it for all of them, with --engine-arg",
            )
    return found


def _check_key(name: str, key: str) -> None:
    root = key.partition(".")[0].removeprefix("no-")
    if root in _OTHER_ANSWERS:
        raise UsageError(
            f"variant {name} sets {key}, with which the server gives other answers",
            "tune that one by a run of its own, and compare the answers yourself",
        )
    if root in _OTHER_REQUESTS:
        raise UsageError(
            f"variant {name} sets {key}, with which the server takes other requests",
            "tune that one by a run of its own, on the requests that it takes",
        )
    if root in _LIMITS:
        raise UsageError(
            f"variant {name} sets {key}, which is searched for every variant",
            "leave it out; --max-num-seqs says what is tried",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFinding:
    """What the best limits of a variant bring, on the same traffic and at the same SLOs.

    `settings` are the keys that make it. `limits` are None where it does not start
    (`failure`), where the time left held no start (`no_time`) or where it meets the SLOs at
    none. The gain is that of the metric over what is recommended for the configuration as
    it is, a share, -0.05 for 5 % less; `latencies_s` are those of the recorded traffic, by
    metric. `capacity_per_s` is how many requests a second hold within the SLOs at most,
    with a cap of its own (`capacity_limits`), nine times in ten within `capacity_interval`
    on other traffic of the kind (None where nothing was drawn), `gpus` on how many devices,
    `cost_per_1000` what a thousand of them cost there. Figures of one that nothing could be
    predicted of `are_live`, on the windows that raced. `doubts` say why replays on its engine
    are not as in production.

    Units: seconds, requests a second; the price's own currency.
    """

    name: str
    settings: dict[str, object]
    limits: EngineLimits | None = None
    metric: str = ""
    gain_ratio: float | None = None
    gain_interval: Bounds | None = None
    p_better: float | None = None
    p_slo: float | None = None
    latencies_s: dict[str, float | None] = field(default_factory=dict)
    capacity_per_s: float | None = None
    capacity_interval: tuple[float, float] | None = None
    capacity_limits: EngineLimits | None = None
    gpus: int = 1
    cost_per_1000: float | None = None
    are_live: bool = False
    failure: str = ""
    no_time: str = ""
    doubts: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """In a word or two what came of one without limits, empty where it has some."""
        if self.limits is not None:
            return ""
        if self.failure:
            return "does not run"
        return "not started" if self.no_time else "meets the SLOs at no limits"

    @property
    def capacity_per_gpu(self) -> float | None:
        """How many requests a second hold within the SLOs on each device."""
        return None if self.capacity_per_s is None else self.capacity_per_s / self.gpus

    @property
    def title(self) -> str:
        """Its name, and what makes it."""
        return f"{self.name} ({settings_text(self.settings)})" if self.settings else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantComparison:
    """The configuration as it is beside each variant, every one at its own best limits."""

    as_it_is: VariantFinding
    others: tuple[VariantFinding, ...]

    @property
    def lines(self) -> list[str]:
        """Return what is to be said, a line each."""
        return [self._line(one) for one in self.others]

    def _line(self, one: VariantFinding) -> str:
        head = f"variant {one.title}"
        if one.limits is None:
            return ": ".join(filter(None, (head, one.verdict, one.failure or one.no_time)))
        parts = [self._gain(one)]
        if one.capacity_per_s is not None:
            base = self.as_it_is
            was = "" if base.capacity_per_s is None else f" ({_bears(base)} as it is)"
            parts.append(f"bears {_bears(one, ' requests/s')}{was}")
            if one.gpus > 1 or self.as_it_is.gpus > 1:
                parts.append(
                    f"{short(one.capacity_per_gpu or 0.0)} for each of {one.gpus} GPUs"
                )
        if one.cost_per_1000 is not None:
            was_cost = self.as_it_is.cost_per_1000
            was = "" if was_cost is None else f" ({short(was_cost)} as it is)"
            parts.append(f"1,000 requests cost {short(one.cost_per_1000)}{was}")
        parts.append("measured live, a few replays" if one.are_live else "predicted")
        parts += (text for text in one.doubts if text not in self.as_it_is.doubts)
        return f"{head} at {one.limits}: {'; '.join(filter(None, parts))}"

    def _gain(self, one: VariantFinding) -> str:
        if one.gain_ratio is not None and one.p_better is None:
            return f"{named(one.metric)} {moved(one.metric, one.gain_ratio):+.1%}"
        return gain_text(one.metric, one.gain_ratio, one.gain_interval, one.p_better)


def _bears(one: VariantFinding, unit: str = "") -> str:
    """Return how many requests a second one bears, and where if not at its own limits."""
    is_elsewhere = one.capacity_limits not in (None, one.limits)
    where = f" at {one.capacity_limits}" if is_elsewhere else ""
    lies = one.capacity_interval
    within = (
        "" if lies is None or not unit else f", interval {short(lies[0])} … {short(lies[1])},"
    )
    return f"{short(one.capacity_per_s or 0.0)}{unit}{within}{where}"
