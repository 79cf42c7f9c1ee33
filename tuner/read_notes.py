"""What reading and reshaping did to a trace, kept with it so that nothing is lost silently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ReadNotes:
    """What reading did: rows read, rows sorted, rows dropped or clipped by reason.

    `remarks` are sentences for the reader of a description: what was spread, sampled, merged,
    or is not in the recording at all. `aborted` counts answers that were cut short as their
    clients left, and whose length is therefore drawn or too short. `sampled_from` names the
    source of a trace that was drawn at random from aggregates; empty for a recording.
    """

    rows: int = 0
    moved: int = 0
    dropped: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    clipped: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    remarks: tuple[str, ...] = ()
    sampled_from: str = ""
    aborted: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dropped", MappingProxyType(dict(self.dropped)))
        object.__setattr__(self, "clipped", MappingProxyType(dict(self.clipped)))

    def __reduce__(self) -> tuple[type[ReadNotes], tuple[object, ...]]:
        """Travel between processes, which a mapping proxy cannot."""
        plain = (self.rows, self.moved, dict(self.dropped), dict(self.clipped))
        return ReadNotes, (*plain, self.remarks, self.sampled_from, self.aborted)

    def with_dropped(self, reason: str, count: int) -> ReadNotes:
        """Return the notes with `count` more rows dropped for `reason`."""
        return replace(self, dropped=_add(self.dropped, reason, count))

    def with_clipped(self, reason: str, count: int) -> ReadNotes:
        """Return the notes with `count` more rows clipped for `reason`."""
        return replace(self, clipped=_add(self.clipped, reason, count))

    def with_remark(self, remark: str) -> ReadNotes:
        """Return the notes with one more remark, unless it is there already or empty."""
        if not remark or remark in self.remarks:
            return self
        return replace(self, remarks=(*self.remarks, remark))

    def and_those_of(self, other: ReadNotes) -> ReadNotes:
        """Return the notes of two traces that became one."""
        notes = replace(self, rows=self.rows + other.rows, moved=self.moved + other.moved)
        for reason, count in other.dropped.items():
            notes = notes.with_dropped(reason, count)
        for reason, count in other.clipped.items():
            notes = notes.with_clipped(reason, count)
        for remark in other.remarks:
            notes = notes.with_remark(remark)
        return replace(
            notes,
            sampled_from=self.sampled_from or other.sampled_from,
            aborted=self.aborted + other.aborted,
        )


def _add(counts: Mapping[str, int], reason: str, count: int) -> Mapping[str, int]:
    return {**counts, reason: counts.get(reason, 0) + count} if count else counts
