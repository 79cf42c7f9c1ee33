"""Series of numbers from a Prometheus server, or a sentence that says why there are none.

Answers what a query's series read over a span of time, and keeps to the server's limits.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn, Self
from urllib.parse import urlsplit

import msgspec
import numpy as np

from tuner.errors import UsageError
from tuner.redact import redacted
from tuner.stats import Floats
from tuner.traffic.formats.columns import shown

if TYPE_CHECKING:
    from prometheus_api_client.exceptions import PrometheusApiClientException
    from requests.exceptions import RequestException

MAX_POINTS = 10_000
"""Prometheus refuses more than 11,000 points per series (web/api/v1/api.go, queryRange)."""

FIRST_POINTS = 1_000
MAX_VALUES = 500_000
"""Ours: an answer of half a million values is 15 MB of JSON; the first one shows how many
series there are, and the next ones are as long as that allows."""

MAX_ANSWER_BYTES = 64 << 20
"""Ours: four times that; what is longer is asked for in smaller parts."""

MAX_HELD_VALUES = 100_000_000
"""Ours: 800 MB, which sixty series of a million points, one engine's histograms, stay below."""

TIMEOUT_S = 60.0
"""Ours: half of the two minutes after which Prometheus itself gives a query up. It counts from
the first byte that is sent to the last one that comes, however slowly they come."""

_STATUS = re.compile(r"HTTP Status Code (\d+) \((.*)\)", re.DOTALL)
_MEANINGS: Mapping[int, tuple[str, str]] = {
    401: ("refuses without a login", "set PROMETHEUS_TOKEN, or pass --header 'NAME: VALUE'"),
    403: ("forbids the query", "pass --header with credentials that may read it"),
    404: ("has no Prometheus API at this path", "give the URL without /graph or /api/v1"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """Instants at equal steps, the last one included.

    Units: start_s and end_s in Unix seconds; whole numbers, as the client rounds to them.
    Raises: ValueError if it does not end after its start, or the step is not above 0.
    """

    start_s: int
    end_s: int
    step_s: int

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.start_s < self.end_s):
            raise ValueError("a span ends after it starts and has a step above 0")

    @property
    def points(self) -> int:
        """How many instants there are."""
        return (self.end_s - self.start_s) // self.step_s + 1

    @property
    def times_s(self) -> Floats:
        """The instants themselves."""
        return self.start_s + self.step_s * np.arange(self.points, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One series over a span: its labels, and nan where it had no value.

    Shapes: values is [span.points].
    """

    labels: Mapping[str, str]
    values: Floats

    @property
    def name(self) -> str:
        """The metric, empty where the query has taken its name away."""
        return self.labels.get("__name__", "")

    @property
    def bound(self) -> float | None:
        """The upper bound of a histogram's bucket; None where it has none that is a number."""
        try:
            bound = float(self.labels.get("le", ""))
        except ValueError:
            return None
        return bound if bound >= 0 else None


class _Found(msgspec.Struct):
    """What is read of a series in an answer. Source: Prometheus, HTTP API, range queries."""

    metric: dict[str, str]
    values: list[tuple[float, str]]


class Prometheus:
    """One server; remembers a digest of all that it answered.

    No answer takes longer than `TIMEOUT_S` or more than `MAX_ANSWER_BYTES`, whatever the server
    does. Redirects are not followed: the login would go with them.

    Raises: UsageError for a URL that cannot be one.
    """

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, verify: bool = True
    ) -> None:
        # Imported late: what reads traces alone needs no client.
        from prometheus_api_client import PrometheusConnect

        from tuner.traffic.prometheus.bounded import BoundedSession

        self.place = _place(url)
        self._digest = hashlib.sha256()
        self._session = BoundedSession(verify=verify)
        self._client = PrometheusConnect(
            url=url.rstrip("/"),
            headers={"Accept-Encoding": "identity", **(headers or {})},
            session=self._session,
            timeout=TIMEOUT_S,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def sha256(self) -> str:
        """The digest of every answer so far."""
        return self._digest.hexdigest()

    def over(self, query: str, span: Span) -> tuple[Series, ...]:
        """Return the series of a query over a span, in the order of their labels.

        Raises: UsageError if the server cannot be reached, refuses, answers with too much, or
            is no Prometheus.
        """
        from tuner.traffic.prometheus.bounded import TooLargeError

        series: dict[str, Series] = {}
        first, points = 0, FIRST_POINTS
        while first < span.points:
            last = min(first + points, span.points) - 1
            try:
                answer = self._ask(query, span, first, last)
            except TooLargeError:
                if points == 1:
                    raise self._too_much(f"{MAX_ANSWER_BYTES >> 20} MiB") from None
                points = max(1, min(points, span.points) // 10)
                continue
            for labels, times_s, values in answer:
                name = json.dumps(labels, sort_keys=True)
                if name not in series:
                    if (len(series) + 1) * span.points > MAX_HELD_VALUES:
                        raise self._too_much(f"{len(series):,} series")
                    series[name] = Series(labels, np.full(span.points, np.nan))
                rows = np.rint((times_s - span.start_s) / span.step_s)
                is_inside = (rows >= 0) & (rows < span.points)
                series[name].values[rows[is_inside].astype(np.int64)] = values[is_inside]
            first = last + 1
            points = min(MAX_POINTS, max(1, MAX_VALUES // max(len(answer), 1)))
        self._digest.update(f"{query} {span}".encode())
        for name in sorted(series):
            self._digest.update(name.encode() + series[name].values.tobytes())
        return tuple(series[name] for name in sorted(series))

    def _ask(
        self, query: str, span: Span, first: int, last: int
    ) -> list[tuple[dict[str, str], Floats, Floats]]:
        """Return the labels, times and values of each series between two instants.

        Raises: UsageError; TooLargeError.
        """
        from prometheus_api_client.exceptions import PrometheusApiClientException
        from requests.exceptions import JSONDecodeError, RequestException

        start, end = (
            datetime.fromtimestamp(span.start_s + span.step_s * row, tz=UTC)
            for row in (first, last)
        )
        self._session.begin(TIMEOUT_S, MAX_ANSWER_BYTES)
        try:
            answer = self._client.custom_query_range(query, start, end, step=str(span.step_s))
            found = msgspec.convert(answer, list[_Found])
            return [(one.metric, *_columns(one.values)) for one in found]
        except PrometheusApiClientException as cause:
            self._refused(cause)
        except JSONDecodeError as cause:
            raise self._no_prometheus() from cause
        except RequestException as cause:
            raise self._unreachable(cause) from cause
        except (LookupError, TypeError, ValueError, AttributeError) as cause:
            raise self._no_prometheus() from cause

    def _no_prometheus(self) -> UsageError:
        return UsageError(
            f"{self.place} answers, but not as a Prometheus does",
            "give the URL of Prometheus itself, not of a page or a login before it",
        )

    def _too_much(self, found: str) -> UsageError:
        return UsageError(
            f"Prometheus at {self.place} answers with more than {found}",
            "ask for less: one engine with --label instance=HOST:PORT, or a shorter --since",
        )

    def _unreachable(self, error: RequestException) -> UsageError:
        """Return the error for a request that got no answer."""
        from requests.exceptions import SSLError, Timeout

        if isinstance(error, Timeout):
            return UsageError(
                f"Prometheus at {self.place} did not answer within {TIMEOUT_S:.0f} s",
                "ask for less: a shorter --since or a longer --step",
            )
        root = list(_causes(error))[-1]
        reason = getattr(root, "strerror", None) or type(root).__name__
        if isinstance(error, SSLError):
            # OpenSSL puts the reason where other errors have the number's text.
            reason = getattr(root, "verify_message", "") or reason
            return UsageError(
                f"the certificate of {self.place} is not trusted: {reason}",
                "name its authority in REQUESTS_CA_BUNDLE, or pass --no-verify",
            )
        return UsageError(
            f"Prometheus at {self.place} cannot be reached: {reason}",
            "check the URL, --prometheus or --url, and that the server is up",
        )

    def _refused(self, error: PrometheusApiClientException) -> NoReturn:
        """Return what a status other than 200 means."""
        match = _STATUS.fullmatch(str(error))
        status, body = (int(match[1]), match[2]) if match else (0, "b''")
        if status in _MEANINGS:
            what, hint = _MEANINGS[status]
            raise UsageError(f"{self.place} {what} (HTTP {status})", hint) from error
        try:
            # The client shows the body as Python would write it.
            said = str(json.loads(ast.literal_eval(body))["error"])
        except (ValueError, SyntaxError, KeyError, TypeError):
            raise UsageError(
                f"{self.place} answers with HTTP {status}, not as a Prometheus does",
                "check the URL, --prometheus or --url, and whether the server is well",
            ) from error
        raise UsageError(
            f"Prometheus at {self.place} refuses the query: {said[:200]}",
            "ask for less: a shorter --since or a longer --step",
        ) from error


def _columns(pairs: Iterable[tuple[float, str]]) -> tuple[Floats, Floats]:
    columns = np.array([(time_s, float(text)) for time_s, text in pairs], dtype=np.float64)
    return columns[:, 0], columns[:, 1]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what led to it, the root last."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _place(url: str) -> str:
    """Return HOST:PORT of a URL, without its login. Raises: UsageError."""
    hint = "for example http://prometheus:9090"
    shown_url = shown(str(redacted({"url": url})["url"]))
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as cause:
        raise UsageError(
            f"the address of Prometheus is not a URL, got {shown_url}", hint
        ) from cause
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(
            f"the URL of Prometheus must start with http:// or https://, got {shown_url}", hint
        )
    if parts.query or parts.fragment:
        raise UsageError(
            f"the URL of Prometheus must end before any ? or #, got {shown_url}", hint
        )
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"
