"""`tune verify`: try a configuration on the real API server and compare with the prediction."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tuner.cli.console import ProgressLine, say
from tuner.cli.inputs import choose_engine, read_traffic, replay_plan
from tuner.emit.vllm import render
from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveSource
from tuner.engine.protocol import EngineFacts, EngineSource
from tuner.errors import EngineError, NoFeasibleConfigError, ReplayError, UsageError
from tuner.files import write_atomic
from tuner.replay.metrics import Measurement, measure
from tuner.replay.plan import ReplayPlan
from tuner.replay.process import EngineProcess
from tuner.replay.server.client import find_endpoint, replay_http
from tuner.replay.server.comparison import Verification, verification
from tuner.replay.server.process import ServerProcess
from tuner.replay.server.scrape import Scraper
from tuner.run.inputs import EngineChoice, fit_lengths
from tuner.shadow.profiles import read_profile
from tuner.shadow.source import ShadowSource
from tuner.traffic.prompts import PromptSource
from tuner.traffic.traces import LoadModel, Trace

# Token ids of prompts for a server whose vocabulary nobody named: ours, any model has as many.
SAFE_VOCABULARY = 10_000


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is tried: traffic in its window, the configuration, and what predicts it."""

    options: Mapping[str, Any]
    engine: EngineChoice
    facts: EngineFacts
    limits: EngineLimits
    trace: Trace
    plan: ReplayPlan


def run_verify(options: Mapping[str, Any]) -> int:
    """Verify and print.

    Raises: TunerError; ReplayError when the client fell behind; NoFeasibleConfigError when an
        SLO breaks, failed requests counting as infinitely late; EngineError when more requests
        failed than may, though every SLO holds.
    """
    _check(options)
    folder = Path(tempfile.mkdtemp(prefix="tune-verify-"))
    engine = choose_engine(options)
    traffic = read_traffic(options, largest_cap=256)
    plan = replay_plan(options, traffic.trace)
    for line in traffic.lines:
        say(line)
    source: EngineSource = LiveSource()
    if options["predict"] == "shadow":
        source = ShadowSource(
            read_profile(Path(options["profile"])), is_forced=options["force_profile"]
        )
    with EngineProcess(source, folder / "engine.log") as host:
        facts = host.facts(engine.values)
        trace, told = fit_lengths(traffic.trace, facts.max_model_len, options["too_long"])
        if told:
            say(told)
        if options["window"]:
            trace = options["window"].resolve(trace).of(trace)
        for slo in options["slo"]:
            slo.check_carried_by(len(trace))
        asked = _Asked(options, engine, facts, facts.present_limits, trace, plan)
        predicted, vocab_size = _predicted(host, asked)
    found = _served(asked, folder, predicted, vocab_size)
    return _told(found, as_json=options["as_json"])


def _told(found: Verification, *, as_json: bool) -> int:
    """Print what was found. Raises: ReplayError, NoFeasibleConfigError, EngineError."""
    if as_json:
        encoded = msgspec.json.format(msgspec.json.encode(found.as_json()), indent=2)
        sys.stdout.write(encoded.decode() + "\n")
    else:
        sys.stdout.write("\n".join(found.lines()) + "\n")
    if found.void:
        raise ReplayError(
            f"the run is void: {found.void}",
            "run it on another machine with --url, at a smaller --load, or allow more with "
            "--max-send-lag",
        )
    if found.broken:
        raise NoFeasibleConfigError(
            f"the server breaks {len(found.broken)} SLO: {'; '.join(found.broken)}",
            found.failure or "tune again with these SLOs: what HTTP adds has to fit in as well",
        )
    if found.failure:
        raise EngineError(
            found.failure,
            "see the server's log, and the proxy's in between; these numbers are of those that "
            "were answered",
        )
    return 0


def _check(options: Mapping[str, Any]) -> None:
    """Refuse what contradicts itself before anything starts. Raises: UsageError."""
    if options["predict"] == "shadow" and not options["profile"]:
        raise UsageError(
            "--predict shadow needs --profile FILE",
            "every live run writes profile.yaml into its run directory",
        )
    if options["url"] and options["port"]:
        raise UsageError("--port is for a server started here, --url for one that runs")
    if options["load_model"] == LoadModel.CLOSED and options["concurrency"] is None:
        raise UsageError("a closed loop over HTTP needs --concurrency N")


def _predicted(host: EngineProcess, asked: _Asked) -> tuple[Measurement | None, int]:
    """Replay inside an engine's process, unless nothing is to predict; and the vocabulary."""
    if asked.options["predict"] == "none":
        return None, SAFE_VOCABULARY
    started = host.start(asked.engine.values, asked.limits)
    say(f"predicting on {asked.limits}: engine started in {started.start_s:.1f} s")
    host.load("trace", asked.trace, asked.options["seed"])
    return measure([host.replay("trace", asked.limits, asked.plan)]), started.info.vocab_size


def _served(
    asked: _Asked, folder: Path, predicted: Measurement | None, vocab_size: int
) -> Verification:
    """Replay over HTTP on the server that is named, or on one started here."""
    options, values = asked.options, asked.engine.values
    key = str(values.get("api-key") or os.environ.get("VLLM_API_KEY", ""))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    start_s: float | None = None
    with ExitStack() as stack:
        url, server = options["url"], None
        if not url:
            path = _config_file(asked, folder)
            server = ServerProcess(path, folder / "server.log", options["port"])
            stack.enter_context(server)
            say(f"starting vllm serve --config {path}; its log is {folder / 'server.log'}")
            start_s = server.wait_ready()
            say(f"the server answers after {start_s:.0f} s")
            url = server.url
        url = url.rstrip("/")
        endpoint = find_endpoint(url, headers)
        if endpoint.max_model_len is None:
            endpoint = replace(endpoint, max_model_len=asked.facts.max_model_len)
        scraper = stack.enter_context(Scraper(url))
        progress = stack.enter_context(ProgressLine())
        run = replay_http(
            endpoint,
            asked.trace,
            PromptSource(asked.trace, vocab_size, options["seed"]),
            asked.plan,
            server.check if server is not None else lambda: None,
            lambda sent, ended, now_s: progress.show(
                f"{ended} of {len(asked.trace)} answered, {sent} sent, {now_s:.0f} s"
            ),
        )
    return verification(
        run, scraper, predicted, options["slo"], start_s, options["max_send_lag"]
    )


def _config_file(asked: _Asked, folder: Path) -> Path:
    """Return the file that the server starts from: the user's own, unless options change it."""
    options = asked.options
    if options["config"] and not (options["model"] or options["engine_args"]):
        return Path(options["config"])
    path = folder / "verified.yaml"
    text = render(
        asked.engine.values,
        asked.limits.max_num_seqs,
        asked.limits.max_num_batched_tokens,
        ["what tune verify was asked to try"],
    )
    write_atomic(path, text, secret=True)
    return path
