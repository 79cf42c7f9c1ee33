"""What is said to the clients of a server, as a run keeps it and as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from tuner.stats import short

# A client waits so many times the p99 of E2E latency: ours, so that nobody leaves who would
# have been answered on a day like the recorded one.
PATIENCE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning that several prompts share, and what the cache spares by it.

    `row` is a request whose prompt begins so; `saved_tokens` are its tokens in all but one of
    them, which who warms the cache up with it spares that one too.
    """

    row: int
    tokens: int
    requests: int
    saved_tokens: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much of all prompt tokens others had before, by an unbounded cache, as shares.

    `found` is what the engine's own cache is predicted to find. `moved` are the tokens of
    blocks that an earlier prompt had behind another beginning: what is different would have to
    move behind them. None where ids are chained, so that equal blocks have other ids there.
    """

    possible: float
    found: float
    moved: float | None
    prefixes: tuple[Prefix, ...]


@dataclass(frozen=True, slots=True)
class ClientAdvice:
    """What clients should hold to at a load.

    `in_flight` is the mean while requests came, requests per second times their mean latency
    by Little's law; `connections` suffice for all but a thousandth of that time.
    `most_in_flight` is what they should have in flight together at most: as much as at the
    largest load at which the SLOs hold. `retries` is the share of requests that may be sent
    once more before that load is reached, `too_long` the share that breaks an SLO on an empty
    engine. `timeout_s` is None where more than one in a hundred has no answer.

    Units: requests, seconds, shares. None where no SLO says, or they hold at no load; beside a
        number that is kept in flight whatever the load, for all but `too_long`.
    """

    load: float
    in_flight: float
    connections: int
    most_in_flight: int | None
    timeout_s: float | None
    retries: float | None
    too_long: float | None
    sharing: Sharing | None

    def as_json(self) -> dict[str, Any]:
        """Return everything for --json."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield it for people."""
        yield f"clients at {self.load:g}x the recorded load, predicted:"
        yield f"  {short(self.in_flight)} requests in flight on average"
        yield f"  connection pool {self.connections}, all clients together"
        if self.most_in_flight is not None:
            yield f"  semaphore {self.most_in_flight}: more in flight break the SLOs"
        if self.timeout_s is None:
            yield "  no time-out: of a hundred requests more than one has no answer"
        else:
            timeout = f"{short(self.timeout_s)} s, {PATIENCE:g} times the p99 of E2E latency"
            yield f"  time-out {timeout}"
        if self.retries is None:
            yield f"  no retries: {self._unknown}"
        else:
            yield f"  retry budget {self.retries:.0%} of the requests until capacity is reached"
        if self.too_long is not None:
            yield f"  {self.too_long:.1%} break an SLO by length alone, on an empty engine"
        if self.sharing is None:
            yield "  prompts: no hash ids, so nothing tells what they share"
            return
        yield from _prompt_lines(self.sharing)

    @property
    def _unknown(self) -> str:
        """Why it is not known how many may be sent once more."""
        if self.too_long is None:
            return "without an SLO nothing says how many the server bears"
        return "the SLOs hold at no load, or a number is kept in flight at every load"


def _prompt_lines(sharing: Sharing) -> Iterator[str]:
    yield (
        f"  prompts: {sharing.possible:.1%} of their tokens were there before, "
        f"{sharing.found:.1%} are found in this KV cache"
    )
    if sharing.moved is None:
        yield (
            "  ids are chained: they cannot tell what a timestamp at the end or another order "
            "of a prompt's parts would bring"
        )
    else:
        yield f"  {sharing.moved:.1%} more would be there if what differs came behind it"
    for prefix in sharing.prefixes:
        yield (
            f"  warm up with the first {prefix.tokens:,} tokens of request {prefix.row + 1} of "
            f"those replayed: {prefix.requests:,} begin so, sharing {prefix.saved_tokens:,}"
        )
