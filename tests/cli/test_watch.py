"""`tune watch` as people and machines meet it: options, pages, signals, secrets."""

from __future__ import annotations

import http.server
import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from support.optional import not_none
from support.paths import ROOT
from support.prometheus_parts import wait_for
from support.shadow_files import home
from support.traffic import steady
from support.watch_parts import EIGHT, HOUR_S, UNCHANGED, a_world, pays
from tuner.cli.options import given_in
from tuner.cli.shadows import ShadowCheck
from tuner.cli.watch import WatchOptions, run_watch
from tuner.cli.watch_command import watch
from tuner.drift.baseline import read_baseline
from tuner.drift.retune import RetuneOptions
from tuner.drift.watch import health
from tuner.drift.watch.health import serving
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.replay.metrics import Measurement
from tuner.replay.server.process import free_port
from tuner.traffic.prometheus.live import Live
from tuner.traffic.traces import Trace

__all__ = ["home"]

TUNE = """
import sys
from tuner.cli import run
from tuner.cli.commands import tune
from tuner.cli.watch_command import watch
tune.add_command(watch)
sys.exit(run(sys.argv[1:]))
"""


def page(port: int, path: str) -> tuple[int, str]:
    """Return a page of the watch."""
    try:
        # The address is a loopback one of our own.
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def values(text: str) -> dict[str, float]:
    """Return the samples of a metrics page by name and verdict."""
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_and_health_tell_what_happened_also_after_a_restart(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        with serving("127.0.0.1:0", world.watcher) as port:
            assert "tune_watch_last_check" not in page(port, "/metrics")[1]
            world.rounds(UNCHANGED)
            world.lasts(pays())
            first = values(page(port, "/metrics")[1])
            status, text = page(port, "/healthz")
            assert (status, json.loads(text)["current"]) == (200, str(EIGHT))
            assert page(port, "/")[0] == 404
            world.clock.sleep(HOUR_S)
            status, text = page(port, "/healthz")
            assert (status, json.loads(text)["ok"]) == (503, False)
        checked_s = world.watcher.store.state.last.check_s
    assert first == {
        "tune_watch_checks_totalunchanged": 1,
        "tune_watch_checks_totalshifted, re-tune pays": 2,
        "tune_watch_errors_total": 0,
        "tune_watch_changes_total": 1,
        "tune_watch_rollbacks_total": 0,
        "tune_watch_last_check_timestamp_seconds": checked_s,
        "tune_watch_gain_ratio": pytest.approx(0.3),
        "tune_watch_on_guard": 0,
        "tune_watch_current_max_num_seqs": 8,
        "tune_watch_current_max_num_batched_tokens": 2048,
    }
    with a_world(tmp_path) as again, serving("127.0.0.1:0", again.watcher) as port:
        assert values(page(port, "/metrics")[1]) == first


def test_an_address_that_cannot_be_listened_on_is_reported(tmp_path: Path) -> None:
    with a_world(tmp_path) as world, serving("127.0.0.1:0", world.watcher) as port:
        for listen, words in (
            ("9105", "--listen must be HOST:PORT, got 9105"),
            ("localhost:99999", "--listen must be HOST:PORT"),
            (f"127.0.0.1:{port}", "Address already in use"),
        ):
            with pytest.raises(UsageError, match=words), serving(listen, world.watcher):
                pass


@pytest.mark.slow
def test_a_clock_that_is_set_is_no_hang_and_no_clients_keep_a_probe_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CLIENT_S", 1.0)
    monkeypatch.setattr(health, "MAX_CLIENTS", 8)
    with (
        a_world(tmp_path) as world,
        serving("127.0.0.1:0", world.watcher) as port,
        ExitStack() as held,
    ):
        world.rounds(UNCHANGED)
        world.clock.set_by(5 * HOUR_S)
        assert page(port, "/healthz")[0] == 200
        dripping = [
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            for _ in range(20)
        ]
        for line in dripping[12:]:
            line.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        assert page(port, "/healthz")[0] == 200
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s and is_open(dripping[-1]):
            time.sleep(0.1)
        assert not is_open(dripping[-1]), "kept for as long as it drips"


def is_open(line: socket.socket) -> bool:
    """Say whether the other end takes one more byte of a header that never ends."""
    try:
        line.sendall(b"x")
        line.setblocking(False)
        return line.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        line.setblocking(True)


@pytest.mark.slow
def test_a_daemon_waits_for_a_prometheus_that_is_down_and_stops_when_told(home: Path) -> None:
    port = free_port()
    command = [
        *(sys.executable, "-c", TUNE, "watch", "--prometheus", "http://127.0.0.1:9"),
        *("--profile", str(home / "profile.yaml"), "--force-profile"),
        *("--emit", str(home / "best.yaml")),
        *("--listen", f"127.0.0.1:{port}", "--every", "1m"),
    ]
    before = (home / "best.yaml").read_text()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=home)
    try:
        wait_for(lambda: page(port, "/healthz")[0] == 200)
        assert process.stderr is not None
        shown = [process.stderr.readline() for _ in range(2)]
        assert shown[0].startswith("watching ")
        assert "Prometheus at 127.0.0.1:9 cannot be reached: Connection refused" in shown[1]
        assert "asking again in 2 s" in shown[1]
        # A second one on the same state is refused at once.
        other = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home)
        assert other.returncode == 2
        assert "another watch is using" in other.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "stopped; the state carries on" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
    assert (home / "best.yaml").read_text() == before


@contextmanager
def asking_for_a_login(seen: list[str]) -> Iterator[str]:
    """Serve a page that refuses everybody, and remember what they sent; yield its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers["Authorization"]))
            self.send_response(401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class NoWait:
    """A clock that stands."""

    def now_s(self) -> float:
        """Return the time."""
        return 1.8e9

    def elapsed_s(self) -> float:
        """Return none."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Return at once."""


def options_of(home: Path, *more: str) -> WatchOptions:
    """Return the options of a round at the home folder. Raises: UsageError."""
    files = ("--profile", str(home / "profile.yaml"), "--emit", str(home / "best.yaml"))
    context = watch.make_context("watch", [*files, *more])
    return WatchOptions.parse(context.params, given_in(context))


def test_a_token_is_sent_and_never_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    (home / "token").write_text("tok-file\n")
    monkeypatch.setenv("PROMETHEUS_TOKEN", "tok-env")
    with asking_for_a_login(seen) as url:
        for more in ((), ("--token-file", str(home / "token"))):
            given = ("--prometheus", url, "--once", "--force-profile", *more)
            with pytest.raises(UsageError, match=r"refuses without a login \(HTTP 401\)"):
                run_watch(options_of(home, *given), NoWait())
    assert set(seen) == {"Bearer tok-env", "Bearer tok-file"}
    shown = "".join(capsys.readouterr())
    kept = (home / "best.yaml.watch" / "state.json").read_text()
    assert "tok-" not in shown + kept


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "--prometheus is missing"),
        (("--prometheus", "prometheus:9090"), "must start with http:// or https://"),
        (("--prometheus", "http://p:9", "--every", "0s"), "--every must be at least 1 s"),
        (("--prometheus", "http://p:9", "--guard", "1s"), "--guard must be at least 60 s"),
        (("--prometheus", "http://p:9", "--step", "0.5s"), "--step must be a whole number"),
        (("--prometheus", "http://p:9", "--since", "30s"), "--since must be at least two"),
        (("--prometheus", "http://p:9", "--min-gain", "many"), "--min-gain must be a share"),
        (("--prometheus", "http://p:9", "--min-gain", "200%"), "--min-gain must be from 0%"),
        (("--prometheus", "http://p:9", "--emit", "best.txt"), "must end in .yaml or .yml"),
        (("--prometheus", "http://p:9", "--emit", "/no/b.yaml"), "folder of --emit"),
        (("--prometheus", "http://p:9", "--token-file", "/no"), "--token-file /no cannot"),
        (("--prometheus", "http://p:9", "--header", "x"), "--header must look like"),
        (("--prometheus", "http://p:9", "--profile", "/no"), "/no does not exist"),
        (("--prometheus", "http://p:9", "--listen", "x"), "--listen must be HOST:PORT"),
        (("--prometheus", "http://p:9", "--max-change", "1x"), "--max-change must be above 1"),
        (("--prometheus", "http://p:9", "--label", "job"), "--label must look like NAME=VALUE"),
        (
            ("--prometheus", "http://p:9", "--label", 'j"=x'),
            "--label must look like NAME=VALUE",
        ),
    ],
)
def test_what_cannot_be_watched_is_reported_at_once(
    home: Path, more: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UsageError) as shown:
        run_watch(options_of(home, "--once", "--force-profile", *more), NoWait())
    assert words in shown.value.message


@pytest.mark.slow
def test_a_run_and_its_result_are_watched_with_the_same_state(home: Path) -> None:
    run_dir = ROOT / "examples" / "demo" / "run"
    kept = home / "best.yaml.watch" / "state.json"
    seen = []
    for named in (run_dir, run_dir / "result.json"):
        more = ("--prometheus", "http://127.0.0.1:9", "--once", "--force-profile")
        with pytest.raises(UsageError, match="cannot be reached"):
            run_watch(options_of(home, *more, "--profile", str(named)), NoWait())
        seen.append(json.loads(kept.read_text())["profile_sha256"])
    assert seen[0] == seen[1]


def test_a_configuration_of_one_limit_is_what_is_served(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "best.yaml").unlink()
    (home / "served.yaml").write_text("model: none\nmax-num-seqs: 16\n")
    given = ("--prometheus", "http://127.0.0.1:9", "--once", "--force-profile")
    with pytest.raises(UsageError, match="cannot be reached"):
        run_watch(options_of(home, *given, "--config", str(home / "served.yaml")), NoWait())
    assert "at 16/512, state in" in capsys.readouterr().err


def test_a_file_to_watch_that_lacks_a_limit_says_how_it_can_be_watched(home: Path) -> None:
    (home / "best.yaml").write_text("model: none\nmax-num-seqs: 16\n")
    options = options_of(home, "--prometheus", "http://p:9", "--once", "--force-profile")
    with pytest.raises(UsageError, match="it lacks max-num-batched-tokens") as shown:
        run_watch(options, NoWait())
    assert shown.value.hint.startswith(
        "write into it what is served now, or name it with --config"
    )


def test_a_watch_without_a_guard_has_no_time_for_one(home: Path) -> None:
    given = ("--prometheus", "http://p:9", "--step", "20m")
    with pytest.raises(UsageError, match="--guard must be at least two steps"):
        options_of(home, *given)
    assert options_of(home, *given, "--no-guard").guard_s is None
    with pytest.raises(UsageError, match="--no-guard and --guard contradict each other"):
        options_of(home, *given, "--no-guard", "--guard", "1h")


@pytest.mark.engine
def test_a_profile_of_another_vllm_is_refused_before_it_is_needed(home: Path) -> None:
    options = options_of(home, "--once", "--prometheus", "http://p:9")
    with pytest.raises(UsageError, match=r"the profile was made with vLLM 0, here is") as shown:
        run_watch(options, NoWait())
    assert "--force-profile" in shown.value.hint


def test_help_opens_with_an_example_and_states_every_default() -> None:
    shown = CliRunner().invoke(watch, ["--help"]).output
    assert "tune watch --prometheus http://prometheus:9090 --profile runs/" in shown
    for name, default in (
        ("--every", "15m"),
        ("--min-gain", "5%"),
        ("--min-interval", "6h"),
        ("--confirmations", "2"),
        ("--guard", "30m"),
        ("--max-change", "4x"),
        ("--hook-timeout", "2m"),
        ("--since", "6h"),
    ):
        assert name in shown
        assert f"[default: {default}" in shown


class _Served:
    """Traffic and live metrics of a server, in Prometheus' place."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.server = trace, self

    def live(self, start_s: float, end_s: float) -> Live:
        """Return that all requests finished."""
        return Live(end_s - start_s, (math.inf,), (float(len(self.trace)),), 1.0, is_there=True)

    def of_one_replica(self, *_: float) -> Self:
        """Return the one there is."""
        return self

    def between(self, *_: float) -> Trace:
        """Return what came."""
        return self.trace


def test_a_guard_goes_by_what_came_whatever_a_run_kept_in_flight(home: Path) -> None:
    """The run that is checked was of a closed loop; the server's clients are of none."""
    baseline = replace(read_baseline(home / "profile.yaml"), concurrency=2)
    served: Any = _Served(steady(200, per_s=4.0, prompt=200, output=80))
    retune, before = RetuneOptions(is_forced=True), not_none(baseline.sketch)
    assert retune.aim(baseline, served.trace).plan.concurrency == 2
    check = ShadowCheck(retune, None, baseline, before, served)
    sample = check.guard_sample(0.0, 50.0, [EngineLimits(4, 512), EngineLimits(8, 512)])
    assert sample.why_not == ""
    for predicted in sample.predicted.values():
        assert isinstance(predicted, Measurement)
        assert predicted.utilisation is not None  # a closed loop has none
