"""`tune verify`: try a configuration on the real API server and compare with the prediction."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tuner.cli.console import say, show_result
from tuner.cli.displays import ProgressLine
from tuner.cli.inputs import (
    WHERE_PROFILES_ARE,
    EngineOptions,
    ShadowOptions,
    TrafficOptions,
    announce,
)
from tuner.cli.options import Params
from tuner.emit.vllm import render
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts
from tuner.errors import EngineError, NoFeasibleConfigError, ReplayError, UsageError
from tuner.files import log_folder, scratch_folder, write_atomic
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.server.client import find_endpoint, replay_http
from tuner.replay.server.comparison import Verification, verification
from tuner.replay.server.process import ServerProcess
from tuner.replay.server.scrape import Scraper
from tuner.replay.slo import Slo
from tuner.run.inputs import EngineChoice, Traffic
from tuner.shadow.predictor import Predictor
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import LoadModel, Trace

# Token ids of prompts for a server whose vocabulary nobody named: ours, any model has as many.
SAFE_VOCABULARY = 10_000


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Which server is tried with which traffic, and what it is compared with.

    Without `url` a server is started at `port`, or at a free one. A prediction comes from the
    `shadow`, or without one from a live engine, unless `predicts` is false. `max_send_lag_s` is
    how far sending may fall behind at its p99.

    Units: seconds.
    Raises: UsageError for what contradicts itself.
    """

    traffic: TrafficOptions
    engine: EngineOptions
    slos: tuple[Slo, ...]
    url: str | None
    port: int | None
    predicts: bool
    shadow: ShadowOptions | None
    max_send_lag_s: float
    as_json: bool

    def __post_init__(self) -> None:
        """Refuse what contradicts itself before anything starts."""
        if self.url and self.port:
            raise UsageError("--port is for a server started here, --url for one that runs")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise UsageError(
                f"--url must start with http:// or https://, got {self.url!r}",
                "for example http://127.0.0.1:8000",
            )
        if hidden := [str(slo) for slo in self.slos if slo.metric == "decode_step_s"]:
            raise UsageError(
                f"--slo {hidden[0]} cannot be verified: HTTP does not show the engine's steps",
                "bound tpot or itl instead",
            )
        is_closed = self.traffic.load_model is LoadModel.CLOSED
        if is_closed and self.traffic.concurrency is None:
            raise UsageError("a closed loop over HTTP needs --concurrency N")

    @classmethod
    def parse(cls, params: Params) -> Self:
        """Return what the command line says. Raises: UsageError."""
        shadow = None
        if params["predict"] == "shadow":
            missing = UsageError("--predict shadow needs --profile FILE", WHERE_PROFILES_ARE)
            shadow = ShadowOptions.parse(params, missing)
        return cls(
            traffic=TrafficOptions.parse(params),
            engine=EngineOptions.parse(params),
            slos=tuple(params["slo"]),
            url=params["url"],
            port=params["port"],
            predicts=params["predict"] != "none",
            shadow=shadow,
            max_send_lag_s=params["max_send_lag"],
            as_json=params["as_json"],
        )


@dataclass(frozen=True, slots=True)
class _Tried:
    """What is tried: the configuration, and the traffic in its window."""

    options: VerifyOptions
    engine: EngineChoice
    facts: EngineFacts
    trace: Trace
    plan: ReplayPlan

    @property
    def limits(self) -> EngineLimits:
        """The limits of the configuration."""
        return self.facts.current_limits


def run_verify(options: VerifyOptions) -> int:
    """Verify and print.

    Raises: TunerError; ReplayError when the client fell behind; NoFeasibleConfigError when an
        SLO breaks, failed requests counting as infinitely late; EngineError when more requests
        failed than may, though every SLO holds.
    """
    with log_folder("tune-verify-") as folder:
        _verify(options, folder)
    return 0


def _verify(options: VerifyOptions, folder: Path) -> None:
    engine = options.engine.choose()
    if options.url:
        # Asked before the prediction, which takes minutes.
        find_endpoint(options.url.rstrip("/"), _login(engine.values), _names(engine.values))
    else:
        _check_port(engine.values)
    traffic = options.traffic.read()
    plan = options.traffic.plan(traffic.trace)
    announce(traffic)
    predicted: Measurement | None
    if options.shadow is not None:
        shadow = options.shadow.load()
        tried = _tried(options, engine, shadow.facts(engine.values), traffic, plan)
        predictor = Predictor(shadow.profile, seed=options.traffic.seed)
        log = predictor.replay(tried.trace, tried.limits, plan)
        predicted, vocab_size = measure([log]), shadow.profile.shape.vocab_size
    else:
        patience_s = options.traffic.start_timeout_s
        with EngineProcess(LiveSource(), folder / "engine.log", patience_s) as host:
            tried = _tried(options, engine, host.facts(engine.values), traffic, plan)
            predicted, vocab_size = _predicted(host, tried)
    _show(_served(tried, folder, predicted, vocab_size), as_json=options.as_json)


def _check_port(values: Mapping[str, object]) -> None:
    """Refuse to start what does not answer at a plain port. Raises: UsageError."""
    named = [key for key in ("uds", "ssl-keyfile", "ssl-certfile") if values.get(key)]
    if named:
        raise UsageError(
            f"the configuration sets {' and '.join(named)}, and a server that is started here "
            "is asked at a port, without TLS",
            "leave that out of a copy of the file, or start the server and name it with --url",
        )


def _tried(
    options: VerifyOptions,
    engine: EngineChoice,
    facts: EngineFacts,
    traffic: Traffic,
    plan: ReplayPlan,
) -> _Tried:
    """Return what is tried. Raises: UsageError, TraceError; TooFewSamplesError by an SLO."""
    trace = options.traffic.fitted(traffic.trace, facts.max_model_len)
    trace = options.traffic.warm_part_of(trace, plan)
    for slo in options.slos:
        slo.check_carried_by(trace.measured)
    return _Tried(options, engine, facts, trace, plan)


def _show(found: Verification, *, as_json: bool) -> None:
    """Print what was measured. Raises: ReplayError, NoFeasibleConfigError, EngineError."""
    show_result(found.as_json(), found.lines(), as_json=as_json)
    if found.void:
        raise ReplayError(
            f"the run is void: {found.void}",
            "run it on another machine with --url, at a smaller --load, or allow more with "
            "--max-send-lag",
        )
    if found.broken:
        raise NoFeasibleConfigError(
            f"the server breaks {len(found.broken)} SLO: {'; '.join(found.broken)}",
            found.failure or found.advice,
        )
    if found.failure:
        raise EngineError(
            found.failure,
            "see the server's log, and the proxy's in between; these numbers are of those that "
            "were answered",
        )


def _predicted(host: EngineProcess, tried: _Tried) -> tuple[Measurement | None, int]:
    """Replay inside an engine's process, unless nothing is to predict; and the vocabulary."""
    if not tried.options.predicts:
        return None, SAFE_VOCABULARY
    started = host.start(tried.engine.values, tried.limits)
    say(f"predicting on {tried.limits}: engine started in {started.start_s:.1f} s")
    host.load("trace", tried.trace, tried.options.traffic.seed)
    return measure([host.replay("trace", tried.limits, tried.plan)]), started.info.vocab_size


def _served(
    tried: _Tried, folder: Path, predicted: Measurement | None, vocab_size: int
) -> Verification:
    """Replay over HTTP on the server that is named, or on one started here."""
    options, values = tried.options, tried.engine.values
    headers = _login(values)
    start_s: float | None = None
    with ExitStack() as stack:
        url, server = options.url, None
        if not url:
            # The api-key may stand in it.
            path = _config_file(tried, stack.enter_context(scratch_folder()))
            server = ServerProcess(path, folder / "server.log", options.port)
            stack.enter_context(server)
            log = folder / "server.log"
            say(f"starting vllm serve --config {path}; while it runs its log is {log}")
            start_s = server.wait_ready(patience_s=tried.options.traffic.start_timeout_s)
            say(f"the server answers after {start_s:.0f} s")
            url = server.url
        url = url.rstrip("/")
        endpoint = find_endpoint(url, headers, _names(values))
        if endpoint.max_model_len is None:
            endpoint = replace(endpoint, max_model_len=tried.facts.max_model_len)
        scraper = stack.enter_context(Scraper(url))
        progress = stack.enter_context(ProgressLine())
        run = replay_http(
            endpoint,
            tried.trace,
            PromptSource(tried.trace, vocab_size, options.traffic.seed),
            tried.plan,
            server.check if server is not None else lambda: None,
            lambda sent, ended, now_s: progress.show(
                f"{ended} of {len(tried.trace)} answered, {sent} sent, {now_s:.0f} s"
            ),
        )
    return verification(run, scraper, predicted, options.slos, start_s, options.max_send_lag_s)


def _names(values: Mapping[str, object]) -> list[str]:
    """Return what clients may ask for the model of a configuration by.

    >>> _names({"model": "org/m", "served-model-name": ["chat"]})
    ['chat', 'org/m']
    """
    served = values.get("served-model-name") or []
    named = served if isinstance(served, list) else [served]
    return [str(name) for name in (*named, values.get("model")) if name]


def _login(values: Mapping[str, object]) -> dict[str, str]:
    """Return the header with an api-key of the configuration, else that of the environment.

    >>> _login({"api-key": ["sk-1", "sk-2"]})
    {'Authorization': 'Bearer sk-1'}
    """
    keys = values.get("api-key") or os.environ.get("VLLM_API_KEY", "")
    key = keys[0] if isinstance(keys, list) else keys
    return {"Authorization": f"Bearer {key}"} if key else {}


def _config_file(tried: _Tried, folder: Path) -> Path:
    """Return the file that the server starts from: the user's own, unless options change it."""
    named = tried.options.engine
    if named.config and not (named.model or named.engine_args):
        return named.config
    path = folder / "verified.yaml"
    text = render(tried.engine.values, tried.limits, ["what tune verify was asked to try"])
    write_atomic(path, text, secret=True)
    return path
