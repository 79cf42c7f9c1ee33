"""The file that a watch hands over: the configuration in use with other limits, and why.

Answers what is in use by it, what would stand in it, and puts it onto the disk whole. A file
of vLLM's own form is written anew around the values that it has; any other that exists is
edited in place, so that what people added to it stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tuner.emit.comments import with_keys
from tuner.emit.names import Format
from tuner.emit.recommendation import Recommendation, spelled
from tuner.emit.registry import TARGETS, checked_writer, emit, limits_in, merge_into
from tuner.emit.sources import read_emitted
from tuner.emit.target import Names
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.files import ExpectedText, write_atomic
from tuner.redact import has_secrets
from tuner.run.outcome import own_version
from tuner.shadow.profiles import Profile
from tuner.traffic.traces import Trace

_REWRITTEN: Final = frozenset({Format.VLLM, Format.ARGS})
_LACKING: Final = (
    "write into it what is served now, or name it with --config and a file that does not exist "
    "yet with --emit"
)


@dataclass(frozen=True, slots=True)
class Text:
    """What stands in a file, or is to."""

    text: str
    has_secrets: bool


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the limits change: on which traffic, against what, for which gain.

    `gain` and `why` are sentences, `gain` empty where it has no end; `evidence` is where the
    watch keeps its state.
    """

    trace: Trace
    current: EngineLimits
    gain: str
    why: str
    evidence: str
    made_s: float


@dataclass(frozen=True, slots=True)
class Publisher:
    """The file at a path, in one of the forms of `tune emit`.

    `values` are the engine's configuration for a file that does not hold it yet, `lost` the
    keys of it whose secret was not kept.

    Raises: UsageError for a form that needs a measured point, and for a file that is not there
        yet and cannot be written whole, or would start a server without the api-key.
    """

    path: Path
    chosen: Format
    profile: Profile
    values: Mapping[str, object]
    lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse now what could not be written when there is reason to."""
        if self.chosen is Format.VLLM_EXACT:
            raise UsageError(
                "--format vllm-exact repeats a measured point, and a watch predicts",
                "leave --format out: it holds the two limits then",
            )
        if not self.path.exists():
            rec = Recommendation(self.values, EngineLimits(1, 1), lost=self.lost)
            checked_writer(self.chosen, rec)

    def current(self) -> EngineLimits | None:
        """Return the limits in the file, None where there is none, or of a form without a file.

        Raises: UsageError if it is no such file, has no place for them, or does not say them as
            numbers.
        """
        if self.chosen is Format.ARGS or not self.path.exists():
            return None
        if self.chosen is Format.VLLM:
            return read_emitted(self.path, _LACKING).limits
        found = limits_in(self.path, self.chosen, Names(self.path.name))
        if found is None:
            raise UsageError(
                f"{self.path} does not say both limits as numbers: variables hold them, or they"
                " stand nowhere",
                "write the numbers into it that are served now, as tune emit --merge does",
            )
        return found

    def text_now(self) -> ExpectedText:
        """Return the file's text. Raises: UsageError if it cannot be read."""
        try:
            return ExpectedText(self.path.read_bytes().decode("utf-8"))
        except FileNotFoundError:
            return ExpectedText(None)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.path} cannot be read: {error}") from error

    def to_return_to(self, before: ExpectedText, current: EngineLimits) -> Text:
        """Return the text from before, or a new file's with the current limits."""
        if before.text is None:
            return self._whole(Recommendation(self.values, current, lost=self.lost))
        # Written back it keeps the mode that the file has by then.
        return Text(before.text, has_secrets=False)

    def changed(self, limits: EngineLimits, reason: Reason) -> Text:
        """Return the file with other limits, and why. Raises: UsageError if it cannot be."""
        sentences, facts = tuple(self._sentences(reason)), self._facts(limits, reason)
        rec = Recommendation(self.values, limits, sentences, facts, lost=self.lost)
        if self.chosen is Format.VLLM and self.path.exists():
            # A file that is in use has no more and no fewer keys afterwards.
            there = read_emitted(self.path, _LACKING)
            rec = replace(rec, values=there.values, lost=there.lost, allow_unauthenticated=True)
        target = TARGETS[self.chosen]
        if self.chosen in _REWRITTEN or target.edit is None or not self.path.exists():
            return self._whole(rec)
        merged = merge_into(self.path, self.chosen, rec, Names(self.path.name))
        return Text(merged.after, merged.has_secrets)

    def write(self, text: Text, expected: ExpectedText) -> None:
        """Put the file onto the disk whole or not at all.

        Raises: UsageError; ChangedMeanwhileError if it is not as expected.
        """
        write_atomic(self.path, text.text, secret=text.has_secrets, expected=expected)

    def holds(self, text: str) -> bool:
        """Return whether the file holds just this."""
        return ExpectedText(text).is_in(self.path)

    def _whole(self, rec: Recommendation) -> Text:
        secret = self.chosen is Format.VLLM and has_secrets(rec.values)
        return Text(emit(self.chosen, rec, Names(self.path.name)), secret)

    def _sentences(self, reason: Reason) -> list[str]:
        """Return the provenance in the sentences that every emitted file has."""
        trace, shape, current = reason.trace, self.profile.shape, reason.current
        hours = (float(trace.due_s[-1]) - float(trace.due_s[0])) / 3600
        made = self.profile.made_at[:10]
        return [
            f"tuned {_time(reason.made_s)[:10]} on {len(trace):,} requests of {trace.source} "
            f"(sha256 {trace.sha256[:8]}…), {hours:.1f} h before {_time(reason.made_s)}",
            f"vLLM {shape.vllm_version}, {shape.device}, PREDICTED by the shadow of a profile "
            f"of {made}, not measured",
            f"against the current {with_keys(current)}:",
            *([f"  {reason.gain}"] if reason.gain else []),
            f"why: {reason.why}",
            f"evidence: {reason.evidence}",
        ]

    def _facts(self, limits: EngineLimits, reason: Reason) -> dict[str, str]:
        """Return the provenance in a word each, for annotations."""
        return {
            "tuned-at": _time(reason.made_s),
            "method": "shadow",
            "trace": reason.trace.source,
            "trace-sha256": reason.trace.sha256,
            "vllm-version": self.profile.shape.vllm_version,
            "device": self.profile.shape.device,
            "limits": spelled(limits),
            "against": spelled(reason.current),
            **({"gain": reason.gain} if reason.gain else {}),
            "tuner-version": own_version(),
        }


def _time(at_s: float) -> str:
    """Return an instant as ISO 8601 writes it.

    >>> _time(0.0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(at_s, tz=UTC).isoformat(timespec="seconds")
