"""The largest multiple of the recorded load at which the SLOs still hold.

A bisection over a question that somebody else answers, live or in the shadow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

# Loads are told apart to this share: ours, about what two live replays differ by.
LOAD_RATIO = 0.02
# Nobody asks for more, and a trace cannot carry less: ours.
LARGEST_LOAD = 64.0
LEAST_LOAD = 1 / 64


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much load a configuration carries.

    `load` is the largest multiple of the recorded load at which the SLOs held, None where they
    did not at the least; `beyond` the smallest at which they broke, None where they never did.
    """

    load: float | None
    beyond: float | None

    @property
    def text(self) -> str:
        """Say it as a sentence's end.

        >>> Capacity(1.7, 1.73).text
        "holds up to 1.7 x today's load"
        """
        if self.load is None:
            return f"breaks an SLO already at {LEAST_LOAD:.2g} x today's load"
        if self.beyond is None:
            return f"holds beyond {self.load:.3g} x today's load"
        return f"holds up to {self.load:.3g} x today's load"


def loads_to_try(start: float = 1.0) -> Generator[float, bool, Capacity]:
    """Yield loads, take whether the SLOs held at each, and return the capacity.

    Doubles or halves from the start until the edge lies between two loads, then halves the
    gap in logarithms; assumes that what breaks at a load breaks at every larger one.
    """
    good: float | None = None
    bad: float | None = None
    load = start
    while good is None or bad is None:
        if (yield load):
            good = load
            if load >= LARGEST_LOAD:
                return Capacity(good, None)
            load = 2 * load
        else:
            bad = load
            if load <= LEAST_LOAD:
                return Capacity(None, bad)
            load = load / 2
    while bad / good > 1 + LOAD_RATIO:
        middle = (good * bad) ** 0.5
        if (yield middle):
            good = middle
        else:
            bad = middle
    return Capacity(good, bad)


def capacity(holds: Callable[[float], bool], start: float = 1.0) -> Capacity:
    """Return the largest load at which `holds` is true, assuming it stays false once it is.

    >>> round(capacity(lambda load: load <= 1.7).load, 1)
    1.7
    """
    asked = loads_to_try(start)
    try:
        load = next(asked)
        while True:
            load = asked.send(holds(load))
    except StopIteration as found:
        answer: Capacity = found.value
        return answer
