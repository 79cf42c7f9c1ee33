"""The profile: what was measured of an engine, so that it can be replayed without it.

Answers what a profile holds, how its file reads and which damage is refused, and whether it was
made with the vLLM, device and model at hand.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
import numpy as np
import yaml

from tuner.engine.demo import bundled
from tuner.engine.limits import EngineLimits
from tuner.engine.shape import Drafts, EngineShape, Graphs, check_rates
from tuner.engine.steps import StepColumns
from tuner.errors import Caveat, UsageError
from tuner.files import UNREADABLE, parse_yaml, write_atomic
from tuner.redact import redacted, redacted_text
from tuner.shadow.speed import Uncertainty
from tuner.shadow.step_model import (
    NO_HOST,
    TERMS,
    Amount,
    Factors,
    FitError,
    Host,
    Natural,
    StepModel,
)

SCHEMA: Final = 4
"""The form of the file; a file of another form is refused, for it may mean other units."""

_REMAKE = "make a new one: every live run writes profile.yaml into its run directory"

_CORRECTED: Final = "; corrected by "
"""Stands in an origin before what corrected the profile since."""

_UTC_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?")

_HEADER = """\
# A profile of one vLLM engine: its scheduler options, KV-cache blocks and step times, measured.
# It replays traces through vLLM's own scheduler without the model and without the device:
#     tune --method shadow --profile THIS_FILE --trace TRACE.jsonl
# What comes of that is predicted, not measured. Keys say their units; do not edit the figures.
"""


@dataclass(frozen=True, slots=True)
class KvStart:
    """How many KV-cache blocks an engine had that was started with the limits."""

    limits: EngineLimits
    num_blocks: int


class Agreement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many steps of vLLM's scheduler the simulator was compared with, and how it went.

    `departs` names the first step that differs and what of it, empty where none does.
    """

    vllm_version: str
    steps: Natural
    departs: str = ""


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fullest batches that steps of a recording were in often enough to teach their time.

    Beyond either of the two a prediction extends the last slope.
    """

    decode_seqs: Natural
    prefill_tokens: Natural

    def beyond_ratio(self, replays: Sequence[StepColumns]) -> float:
        """Return the share of the time of batches that goes to fuller ones, 0 without any."""
        beyond_s = all_s = 0.0
        for steps in replays:
            is_beyond = (steps.decode_seqs > self.decode_seqs) | (
                steps.prefill_tokens > self.prefill_tokens
            )
            beyond_s += float(steps.duration_s[is_beyond].sum())
            all_s += float(steps.duration_s[steps.has_batch].sum())
        return beyond_s / all_s if all_s else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """All that a tuning without the device needs to know of the engine it speaks for.

    `metric_error_ratio` compares replays through the model with the measured ones it was fitted
    to: the largest of the median errors of requests per second, TPOT p50 and E2E latency, None
    where nobody compared. `made_at` is an ISO date and time in UTC. `calibrated_on` names the
    measured limits as in "8/512". `uncertainty` is what the steps leave open of the step model,
    None where nobody can tell. `current_limits` are what `serve_values`, the user's
    configuration without its secrets, came to. `agreement` is how the simulator compared with
    that vLLM's scheduler, None where nobody compared. `origin` says whence the step times are
    where this tool did not measure them on the engine itself, `doubts` why they may be further
    off than others of that kind. `seen` is how full the batches of a recording were that it was
    learnt from, None of others. `moved_ratio` is how many times as long corrections have made
    every step in all. `caveats` are reasons to doubt the replays it was learnt from. `accepted`
    are the rates at which drafts are accepted: how often the first is, the first two are, and
    so on; empty of an engine without. `variants` are the profiles of other configurations that
    were started beside this one, by their names.

    Raises: ValueError without a KV start or its blocks, or if made_at is no time in UTC;
        UsageError if rates of accepted drafts cannot be.
    """

    shape: EngineShape
    kv_starts: tuple[KvStart, ...]
    step_model: StepModel
    fit: FitError
    metric_error_ratio: float | None
    made_at: str
    calibrated_on: tuple[str, ...]
    current_limits: EngineLimits
    serve_values: Mapping[str, object]
    agreement: Agreement | None = None
    uncertainty: Uncertainty | None = None
    origin: str = ""
    doubts: tuple[str, ...] = ()
    seen: Seen | None = None
    moved_ratio: float = 1.0
    caveats: tuple[Caveat, ...] = ()
    accepted: tuple[float, ...] = ()
    variants: Mapping[str, Profile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a profile that could not answer, or whose age cannot be told."""
        if not self.kv_starts or any(start.num_blocks < 1 for start in self.kv_starts):
            raise ValueError("kv_starts must hold a start, and each num_blocks of at least 1")
        if not _UTC_TIME.fullmatch(self.made_at):
            raise ValueError(f"made_at must be as 2026-01-31T12:00:00Z, got {self.made_at!r}")
        check_rates(self.accepted, self.shape.draft_tokens)
        width = len(TERMS) + self.step_model.factors.table.size
        if self.uncertainty is not None and self.uncertainty.width != width:
            raise ValueError(f"uncertainty.width must be {width} for the step model's factors")

    def with_steps(self, change: Callable[[StepModel], StepModel]) -> Profile:
        """Return the profile with changed step times; its variants', compared with it, too."""
        variants = {name: one.with_steps(change) for name, one in self.variants.items()}
        return replace(self, step_model=change(self.step_model), variants=variants)

    @property
    def tells_beyond(self) -> bool:
        """Whether it knows batches of any size, or says of which it knows nothing."""
        return bool(self.origin) or self.seen is not None

    @property
    def is_corrected(self) -> bool:
        """Whether a profile with an origin was corrected since by what its engine does."""
        return _CORRECTED in self.origin

    def origin_corrected(self, by: str) -> str:
        """Return the origin once something corrected the profile, empty where it has none."""
        return self.origin and f"{self.origin}{_CORRECTED}{by}"

    def step_model_at(self, limits: EngineLimits) -> StepModel:
        """Return the step model of an engine started with the limits: with its own graphs."""
        starts = [start.limits for start in self.kv_starts]
        return replace(self.step_model, graphs=self.shape.graphs_at(limits, starts))

    def num_blocks_at(self, limits: EngineLimits) -> int:
        """Return the KV-cache blocks of an engine started with the limits.

        Where no such start was measured, those of the nearest one, by distance between the
        logarithms of both limits, because limits are tried at ratios and not at differences; of
        equally near starts the one with the fewest blocks, to err towards preemption. Starts
        at other limits tell how many blocks a token of the budget and a sequence cost, for what
        vLLM keeps free is what its largest batch, its sampler and its graphs take; limits that
        differ from the nearest start's have so many more or fewer.
        """

        def distance(start: KvStart) -> tuple[float, int]:
            seqs = start.limits.max_num_seqs / limits.max_num_seqs
            tokens = start.limits.max_num_batched_tokens / limits.max_num_batched_tokens
            apart = math.hypot(math.log(seqs), math.log(tokens))
            return round(apart, 9), start.num_blocks  # rounded: 8 to 20 is as far as 20 to 50

        near = min(self.kv_starts, key=distance)
        per_seq, per_token = self._blocks_each
        more = per_seq * (near.limits.max_num_seqs - limits.max_num_seqs)
        more += per_token * (near.limits.max_num_batched_tokens - limits.max_num_batched_tokens)
        return max(1, near.num_blocks + int(more))

    @property
    def _blocks_each(self) -> tuple[float, float]:
        """How many KV blocks a sequence and a token of the budget cost at a start.

        Starts of much the same limit do not tell. Of a token then counts what its activations
        took at the start, of a sequence nothing. Two starts that differ in both leave open what
        costs how much; then the least of both that explains the difference is taken, a sequence
        being thought to cost as much as SEQ_TOKENS tokens.

        Source: least squares; what costs memory costs no less than nothing.
        """
        pairs = [
            (s.limits.max_num_seqs, s.limits.max_num_batched_tokens) for s in self.kv_starts
        ]
        costs = np.array(pairs, float) * (SEQ_TOKENS, 1)
        blocks = np.array([s.num_blocks for s in self.kv_starts], float)
        tells = costs.max(axis=0) >= APART_RATIO * costs.min(axis=0)
        off = np.where(tells, costs - costs.mean(axis=0), 0.0)
        little = 1e-6 * max(1.0, float(np.abs(off).max()))
        rows = np.vstack([-off, little * np.eye(2)])
        wanted = np.r_[blocks - blocks.mean(), 0.0, 0.0]
        each = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        if each.min() < 0:
            # The least is where one of them costs nothing. Not by `fit.non_negative`, which
            # leaves out the second of two that say the same.
            alone = np.diag(np.maximum(rows.T @ wanted / (rows**2).sum(axis=0), 0.0))
            missed = np.linalg.norm(rows @ alone - wanted[:, None], axis=0)
            each = alone[:, np.argmin(missed)]
        token = self.shape.token_bytes / max(1, self.shape.block_bytes)
        return float(each[0]) * SEQ_TOKENS, float(each[1]) if tells[1] else token


def check_fits(
    profile: Profile, *, vllm_version: str | None, device: str | None, model: str | None
) -> list[str]:
    """Return in which ways the profile was made elsewhere, a sentence each; none if it fits.

    What is None is not compared: a run without a GPU has another device by nature, and one
    without vLLM has none that could be another.
    """
    compared = (
        ("vLLM", profile.shape.vllm_version, vllm_version),
        ("the device", profile.shape.device, device),
        ("the model", profile.shape.model, None if model is None else redacted_text(model)),
    )
    return [
        f"the profile was made with {what} {there}, here is {here}"
        for what, there, here in compared
        if here is not None and there != here
    ]


def drafts_words(accepted: Sequence[float]) -> str:
    """Return what drafts bring an answer in a step, in words.

    >>> drafts_words((0.8, 0.5))
    'a step brings an answer 2.30 tokens, its drafts accepted at 80%, 50%'
    """
    rates = ", ".join(f"{rate:.0%}" for rate in accepted)
    brings = 1 + sum(accepted)
    return f"a step brings an answer {brings:.2f} tokens, its drafts accepted at {rates}"


def write_profile(path: Path, profile: Profile) -> None:
    """Write the profile whole or not at all: what stood there before survives a full disk.

    Whatever of serve_values still looks like a secret is hidden as in the run directory.

    Raises: UsageError if the file cannot be written; ValueError if it could not be read again.
    """
    data = _in_file(profile)
    try:
        msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        raise ValueError(f"the profile could not be read again: {error}") from error
    body = yaml.safe_dump({"schema": SCHEMA} | data, sort_keys=False, default_flow_style=None)
    head = _HEADER
    if profile.origin:
        head = head.replace(", measured.", f":\n# {profile.origin}.")
    write_atomic(path, head + body, hint="name another file, or free space there")


def read_profile(path: str | Path) -> Profile:
    """Return the profile that a file holds, or that of a name which comes with this package.

    Nothing is guessed: a missing or unknown key, another type and a figure that cannot be are
    all refused, because every one of them would change predictions in silence.

    Raises: UsageError, naming the file and the key.
    """
    data = _load(Path(path))
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold keys and values, got {reprlib.repr(data)}", _REMAKE)
    schema = data.pop("schema", None)
    if schema is None:
        raise UsageError(f"{path} is no profile: it has no schema", _REMAKE)
    if type(schema) is not int or schema != SCHEMA:
        raise UsageError(f"{path}: schema must be {SCHEMA}, got {schema!r}", _REMAKE)
    try:
        profile = _from_file(msgspec.convert(data, _File))
    except UNREADABLE as error:
        raise UsageError(f"{path}: {_reason(str(error), data)}", _REMAKE) from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}", _REMAKE) from error
    return profile


# Starts whose limits differ by less than this do not tell what either of them costs: ours.
APART_RATIO = 1.5
# How many tokens' activations a sequence's logits take, with their sort: ours, 24 bytes for
# each of 150,000 words beside 140 kB in a model of 7B and 220 kB in one of 70B.
SEQ_TOKENS = 20

_Made = TypeVar("_Made", EngineLimits, EngineShape, Drafts, Uncertainty)


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """A mapping of the file, with all of its keys and no other."""

    @classmethod
    def of(cls, value: object, **changed: object) -> Self:
        """Return the record of a value of ours, whose fields are called the same."""
        names = [name for name in cls.__struct_fields__ if name not in changed]
        return cls(**{name: getattr(value, name) for name in names}, **changed)


class _Limits(_Record):
    max_num_seqs: Natural
    max_num_batched_tokens: Natural


class _KvStart(_Record):
    limits: _Limits
    num_blocks: Natural


class _Drafts(_Record):
    method: str
    tokens: Natural
    slots: Natural
    fills_in: bool


class _Shape(_Record, rename={"captured_sizes": "captured_sizes_tokens"}):
    model: str
    device: str
    dtype: str
    vllm_version: str
    parallelism: Mapping[str, int]
    vocab_size: Natural
    max_model_len: Natural
    block_size: Natural
    kv_kind: str
    prefix_caching: bool
    asynchronous: bool
    captured_sizes: tuple[Natural, ...]
    scheduler: Mapping[str, bool | int | float | str | None]
    captures_mixed: bool
    model_sets_graphs: bool = False
    kv_groups: tuple[Mapping[str, bool | int | str | None], ...] = ()
    block_bytes: Natural = 0
    token_bytes: Natural = 0
    drafts: _Drafts | msgspec.UnsetType = msgspec.UNSET


class _Host(_Record, rename={"token_s": "token_s_per_token"}):
    full_s: Amount
    mixed_s: Amount
    eager_s: Amount
    seq_s: Amount
    token_s: Amount
    spread: Amount


class _StepModel(
    _Record,
    omit_defaults=True,
    rename={
        "token_slopes_s": "token_slopes_s_per_token",
        "decode_context_s": "decode_context_s_per_token",
        "mixed_context_s": "mixed_context_s_per_token",
        "spread_s": "spread_s_per_token",
        "mixed_spread_s": "mixed_spread_s_per_token",
        "prefill_context_s": "prefill_context_s_per_token_pair",
    },
):
    token_knots: tuple[Natural, ...]
    token_slopes_s: tuple[Amount, ...]
    base_s: Amount
    seq_s: Amount
    eager_s: Amount
    prefill_base_s: Amount
    decode_context_s: Amount
    mixed_context_s: Amount
    spread_s: Amount
    mixed_spread_s: Amount
    prefill_context_s: Amount
    tidy_s: Amount
    host: _Host | None = None
    factors: tuple[tuple[Amount, ...], ...] = Factors().rows


class _Uncertainty(_Record):
    """Directions in which the step model may be off; of the numbers the base64."""

    directions: bytes
    width: Natural
    start: Amount
    setting: Amount


class _File(_Record, omit_defaults=True, rename={"shape": "engine"}):
    shape: _Shape
    kv_starts: tuple[_KvStart, ...]
    step_model: _StepModel
    fit: FitError
    metric_error_ratio: Amount | None
    made_at: str
    calibrated_on: tuple[str, ...]
    current_limits: _Limits
    serve_values: Mapping[str, object]
    agreement: Agreement | None = None
    uncertainty: _Uncertainty | None = None
    origin: str = ""
    doubts: tuple[str, ...] = ()
    seen: Seen | None = None
    moved_ratio: Annotated[float, msgspec.Meta(gt=0, le=1.7e308)] = 1.0
    caveats: tuple[Caveat, ...] = ()
    accepted: tuple[Amount, ...] = ()
    variants: Mapping[str, _File] = {}


def _in_file(profile: Profile) -> dict[str, Any]:
    """Return the mapping that stands in the file for a profile, without secrets."""
    plain: dict[str, Any] = msgspec.to_builtins(
        _record(profile), enc_hook=lambda number: number.item()
    )
    return plain


def _record(profile: Profile) -> _File:
    """Return a profile for the file; a step model's graphs are the engine's."""
    model, shape, uncertainty = profile.step_model, profile.shape, profile.uncertainty
    host = None if model.host == NO_HOST else _Host.of(model.host)
    drafts = msgspec.UNSET if shape.drafts is None else _Drafts.of(shape.drafts)
    return _File.of(
        profile,
        shape=_Shape.of(shape, model=redacted_text(shape.model), drafts=drafts),
        kv_starts=tuple(
            _KvStart.of(start, limits=_Limits.of(start.limits)) for start in profile.kv_starts
        ),
        step_model=_StepModel.of(model, host=host, factors=model.factors.rows),
        current_limits=_Limits.of(profile.current_limits),
        serve_values=redacted(profile.serve_values),
        uncertainty=uncertainty and _Uncertainty.of(uncertainty),
        variants={name: _record(one) for name, one in profile.variants.items()},
    )


def _from_file(found: _File) -> Profile:
    """Return the profile of a file. Raises: UsageError, naming the key, if it cannot be one."""
    starts = [
        KvStart(_made(EngineLimits, start.limits, f"kv_starts[{i}].limits"), start.num_blocks)
        for i, start in enumerate(found.kv_starts)
    ]
    drafts, uncertainty = found.shape.drafts, found.uncertainty
    drafting = None if drafts is msgspec.UNSET else _made(Drafts, drafts, "engine.drafts")
    shape = _made(EngineShape, found.shape, "engine", drafts=drafting)
    made: dict[str, Any] = {
        "shape": shape,
        "kv_starts": tuple(starts),
        "step_model": _step_model(found.step_model, shape.graphs),
        "current_limits": _made(EngineLimits, found.current_limits, "current_limits"),
        "uncertainty": uncertainty and _made(Uncertainty, uncertainty, "uncertainty"),
        "variants": {name: _from_file(one) for name, one in found.variants.items()},
    }
    try:
        return Profile(**msgspec.structs.asdict(found) | made)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _made(kind: type[_Made], record: _Record, key: str, **others: object) -> _Made:
    """Return what a record stands for. Raises: UsageError, with the key, if it cannot be."""
    try:
        return kind(**msgspec.structs.asdict(record) | others)
    except (UsageError, ValueError, OverflowError) as error:
        raise UsageError(f"{key}: {error}") from error


def _step_model(record: _StepModel, graphs: Graphs) -> StepModel:
    """Return the step model of a file. Raises: UsageError, with the key, if it cannot be."""
    try:
        host = NO_HOST if record.host is None else Host(**msgspec.structs.asdict(record.host))
        made = {"factors": Factors(record.factors), "graphs": graphs, "host": host}
        return StepModel(**msgspec.structs.asdict(record) | made)
    except (UsageError, ValueError, OverflowError) as error:
        raise UsageError(f"step_model: {error}") from error


def _reason(text: str, data: Any) -> str:  # noqa: ANN401 - whatever the file holds
    """Return msgspec's reason with the key before it, and the value in place of its type.

    >>> _reason("Expected `int`, got `str` - at `$.kv_starts[0]`", {"kv_starts": ["x"]})
    "kv_starts[0]: expected `int`, got 'x'"
    """
    reason, _, place = text.partition(" - at ")
    found = re.search(r"\$\.?([^`]+)", place)
    key = found[1] if found else ""
    reason = re.sub(r"^Object contains unknown field", "unknown key", reason)
    reason = re.sub(r"^Object missing required field (.*)", r"key \1 is missing", reason)
    if reason.startswith("Expected "):
        with suppress(LookupError, TypeError, ValueError):
            for name in re.findall(r"[^.\[\]]+", key):
                data = data[int(name)] if isinstance(data, list) else data[name]
            reason = f"{reason.partition(', got ')[0]}, got {reprlib.repr(data)}"
    return f"{key}: {reason[0].lower()}{reason[1:]}" if key else reason


def bundled_profiles() -> dict[str, Path]:
    """Return the profiles that come with this package, by name."""
    folder = bundled("profiles")
    found = [*(folder / "gpu").glob("*.yaml"), folder / "demo.profile.yaml"]
    return {path.name.removesuffix(".yaml").removesuffix(".profile"): path for path in found}


def _load(path: Path) -> object:
    """Return what stands in the YAML file, or in that which a bare name stands for."""
    is_name = path.suffix != ".yaml" and path.parent == Path() and not path.exists()
    if is_name:
        known = bundled_profiles()
        if path.name not in known:
            near = ", ".join(difflib.get_close_matches(path.name, known, 3, 0.4)) or "none"
            raise UsageError(
                f"{path} is neither a file nor a profile that comes with this package; the "
                f"nearest of these: {near}",
                _REMAKE,
            )
        path = known[path.name]
    if path.is_dir():
        inside = path / "profile.yaml"
        raise UsageError(
            f"{path} is a folder, and no profile",
            f"the profile in it is {inside}" if inside.is_file() else _REMAKE,
        )
    try:
        return parse_yaml(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", _REMAKE) from error
    except ValueError as error:
        raise UsageError(f"{path} is not YAML: {error}", _REMAKE) from None
