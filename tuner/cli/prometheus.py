"""Traffic from a Prometheus: which server is queried, with which login, and for what."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tuner.cli.options import TOKEN_VARIABLE, Params, path_of
from tuner.errors import UsageError
from tuner.traffic.prometheus import trace_from_prometheus
from tuner.traffic.prometheus.replicas import one_replica
from tuner.traffic.prometheus.token_times import TokenTimes, token_times
from tuner.traffic.sampling import MAX_REQUESTS
from tuner.traffic.traces import Trace


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
            self.url,
            self.since_s if since_s is None else since_s,
            self.step_s,
            model=self.model,
            engine=engine,
            labels=self.labels,
            seed=seed,
            concurrency=is_closed,
            until_s=until_s,
            headers=self.credentials(),
            verify=self.is_verified,
            max_requests=max_requests,
        )

    def of_one_replica(
        self, since_s: float | None = None, until_s: float | None = None
    ) -> tuple[Self, str]:
        """Return the same of one replica, with what to say of it, empty where there is one.

        Of several engines that served at once it is the one with the middle load.

        Raises: UsageError.
        """
        found = one_replica(
            self.url,
            self.since_s if since_s is None else since_s,
            self.step_s,
            model=self.model,
            labels=self.labels,
            until_s=until_s,
            headers=self.credentials(),
            verify=self.is_verified,
        )
        return replace(self, labels=found.labels), found.remark

    def token_times(self) -> TokenTimes:
        """Return how long tokens took while how many requests ran. Raises: UsageError."""
        return token_times(
            self.url,
            self.since_s,
            self.step_s,
            model=self.model,
            labels=self.labels,
            headers=self.credentials(),
            verify=self.is_verified,
        )

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
