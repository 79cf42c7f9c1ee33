"""Traffic from a Prometheus: which server is queried, with which login, and for what."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from tuner.cli.options import TOKEN_VARIABLE, Params, path_of
from tuner.errors import UsageError
from tuner.traffic.prometheus import trace_from_prometheus
from tuner.traffic.prometheus.live import Live, live_between
from tuner.traffic.prometheus.readings import Scraped, Selection
from tuner.traffic.prometheus.replicas import one_replica
from tuner.traffic.prometheus.token_times import TokenTimes, token_times
from tuner.traffic.sampling import MAX_REQUESTS
from tuner.traffic.traces import Remark, Trace

_OF_A_QUERY: Final = {
    "since": "--since",
    "step": "--step",
    "labels": "--label",
    "headers": "--header",
    "token_file": "--token-file",
    "no_verify": "--no-verify",
}


@dataclass(frozen=True, slots=True)
class PrometheusOptions:
    """Which server is queried, for which model, how far back and with which login.

    `headers` are lines as `NAME: VALUE`; `labels` are those that every series must have.

    Units: seconds.
    """

    url: str
    since_s: float
    step_s: float
    model: str | None
    labels: Mapping[str, str]
    headers: tuple[str, ...]
    token_file: Path | None
    is_verified: bool

    @classmethod
    def parse(cls, params: Params, url: str, model: str | None) -> Self:
        """Return what `prometheus_options` say of the server at the URL."""
        return cls(
            url=url,
            since_s=params["since"],
            step_s=params["step"],
            model=model,
            labels=_labels(params["labels"]),
            headers=tuple(params["headers"]),
            token_file=path_of(params["token_file"]),
            is_verified=not params["no_verify"],
        )

    @classmethod
    def beside_a_trace(cls, params: Params, given: Collection[str]) -> Self | None:
        """Return them where a Prometheus is named, which a recording may be in place of.

        `given` are the parameters that the command line names.

        Raises: UsageError for one of its options without it, which no recording is cut by.
        """
        if params["prometheus"] is not None:
            return cls.parse(params, params["prometheus"], params["only_model"])
        for name, option in _OF_A_QUERY.items():
            if name in given:
                raise UsageError(
                    f"{option} is for --prometheus, which is not named",
                    f"leave {option} out; tune trace slice cuts a part out of a recording",
                )
        return None

    def sampled(
        self,
        seed: int,
        *,
        is_closed: bool,
        engine: str | None = None,
        since_s: float | None = None,
        until_s: float | None = None,
        max_requests: int = MAX_REQUESTS,
    ) -> Trace:
        """Return traffic that is drawn from the metrics; closed, by the requests in flight.

        It is that of `since_s` seconds before a Unix time; None for those of --since, and now.

        Raises: UsageError.
        """
        return trace_from_prometheus(
            self.scraped(engine),
            self.since_s if since_s is None else since_s,
            self.step_s,
            seed=seed,
            concurrency=is_closed,
            until_s=until_s,
            max_requests=max_requests,
        )

    def of_one_replica(
        self, since_s: float | None = None, until_s: float | None = None
    ) -> tuple[Self, str | Remark]:
        """Return the same of one replica, with what to say of it, empty where there is one.

        Of several engines that served at once it is the one with the middle load.

        Raises: UsageError.
        """
        length_s = self.since_s if since_s is None else since_s
        found = one_replica(self.scraped(), length_s, self.step_s, until_s=until_s)
        return replace(self, labels=found.labels), found.remark

    def token_times(self) -> TokenTimes:
        """Return how long tokens took while how many requests ran. Raises: UsageError."""
        return token_times(self.scraped(), self.since_s, self.step_s)

    def live(self, start_s: float, end_s: float) -> Live:
        """Return how the server did between two Unix times. Raises: UsageError."""
        return live_between(self.scraped(), start_s, end_s, self.step_s)

    def scraped(self, engine: str | None = None) -> Scraped:
        """Return which engines of which server are meant, with the login.

        Raises: UsageError if that cannot be read.
        """
        asked = Selection(self.model, engine, self.labels)
        return Scraped(self.url, asked, self.credentials(), self.is_verified)

    def credentials(self) -> dict[str, str]:
        """Return the headers, with the token of the file or else of the environment.

        The file is read anew each time: the token in it may be another one by now.

        Raises: UsageError.
        """
        headers = {}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        for header in self.headers:
            name, colon, value = header.partition(":")
            if not colon or not name.strip():
                # The value may be a secret, and is not shown.
                raise UsageError(
                    "--header must look like 'NAME: VALUE'", "quote it as one word"
                )
            headers[name.strip()] = value.strip()
        return headers

    def _token(self) -> str:
        path = self.token_file
        if path is None:
            return os.environ.get(TOKEN_VARIABLE, "").strip()
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"--token-file {path} cannot be read: {reason}") from error
        if not token:
            raise UsageError(f"--token-file {path} is empty", "it must hold the bearer token")
        return token


def _labels(lines: Sequence[str]) -> dict[str, str]:
    """Return labels by name. Raises: UsageError for what is none.

    >>> _labels(["job=vllm", "instance=10.0.0.7:8000"])
    {'job': 'vllm', 'instance': '10.0.0.7:8000'}
    """
    labels = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII):
            raise UsageError(
                f"--label must look like NAME=VALUE, got {line!r}",
                "for example --label job=vllm",
            )
        labels[name] = value
    return labels
