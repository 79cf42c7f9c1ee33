"""Good files with odd stretches in them, and what reading any bytes must come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from tuner.errors import TunerError
from tuner.traffic.traces import Trace

ODDITIES = [
    "NaN", "-1", "1e999", "9" * 400, "9" * 5000, "null", "true", '"x"', "{}", "[]", "\0",
    "[" * 3000, '{"a":' * 3000, '"' + "y" * 10_000 + '"', "\ud83d", '"\\ud83d"', "0.5", "1e300",
    "\n", ",",
]  # fmt: skip


@st.composite
def spoilt(draw: st.DrawFn, good: Sequence[str], more: Sequence[str]) -> bytes:
    """Return a good document with some stretches replaced by something odd."""
    text = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(start + 24, len(text))))
        text = text[:start] + draw(st.sampled_from([*ODDITIES, *more])) + text[end:]
    return text.encode("utf-8", "surrogatepass")


def gives_a_trace_or_an_error_of_ours(read: Callable[[], Trace]) -> None:
    """Check that reading ends in requests, or in an error that a user can read."""
    try:
        trace = read()
    except TunerError as error:
        said = error
    else:
        assert len(trace) >= 1
        "".join((*(trace.request_ids or ()), *trace.notes.texts)).encode()
        return
    assert said.exit_code == 2
    assert said.message.isprintable()
    assert len(said.message) < 600
