"""What Prometheus cannot give is told in a sentence, with what to do and without secrets."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.prometheus_parts import (
    Page,
    need_prometheus,
    prometheus,
    read,
    refused,
    scraped,
    with_history,
)
from support.prometheus_past import BARE, HOUR_S, OLD, PLAIN, START_S
from tuner.replay.server.process import free_port
from tuner.traffic.prometheus import Scraped

# The password is "test": the example of Prometheus's own guide to basic authentication.
LOGIN = (
    "basic_auth_users: {admin: $2b$12$hNf2lSsxfm0.i4a.1kVpSOVyBCfIB51VRjgBUyv6kdnyTlgWj81Ay}\n"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prometheus that knows three servers' past."""
    need_prometheus()
    with with_history(tmp_path_factory.mktemp("prometheus"), PLAIN, OLD, BARE) as found:
        yield found


def test_several_models_are_listed_and_one_must_be_picked(url: str) -> None:
    said = refused(url)
    assert 'knows 3 models: "bare", "org/old "0.6"", "plain"' in said.message
    assert "--model" in said.hint
    unknown = refused(scraped(url, 'plain"} or up{x="'))
    assert 'knows no model "plain"} or up{x=""' in unknown.message
    assert 'it has "bare"' in unknown.message


def test_missing_data_is_named_with_where_it_was_looked_for(url: str) -> None:
    place = url.removeprefix("http://")
    early = refused(url, until_s=START_S - HOUR_S, since_s=HOUR_S)
    start = f"Prometheus at {place} has no vllm:request_prompt_tokens_count between 20"
    assert early.message.startswith(start)
    assert early.message.endswith("UTC")
    bare = refused(scraped(url, "bare"))
    assert "has no vllm:request_generation_tokens_bucket between" in bare.message


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"step_s": 0.5}, "--step must be a whole number of seconds, at least 1, got 0.5 s"),
        ({"since_s": 30, "step_s": 30}, "--since must be at least two steps of 30 s"),
        ({"since_s": 1e9, "step_s": 1}, "is more than 1,000,000 steps of 1 s"),
        (
            {"of": "prometheus:9090"},
            "the URL of Prometheus must start with http:// or https://",
        ),
        ({"of": "http://a:b:c/"}, "the address of Prometheus is not a URL"),
        ({"of": "http://me:secret@"}, "the URL of Prometheus must start with http://"),
        (
            {"of": "http://p:9090/graph?g0.expr=up"},
            "the URL of Prometheus must end before any ? or #",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_before_asking(
    asked: dict[str, Any], words: str
) -> None:
    said = refused(**({"of": "http://127.0.0.1:1"} | asked))
    assert words in said.message
    assert "secret" not in said.message + said.hint


def test_a_server_that_is_not_there_is_reported_soon() -> None:
    began_s, port = time.monotonic(), free_port()
    said = refused(f"http://me:secret@127.0.0.1:{port}")
    assert said.message == (
        f"Prometheus at 127.0.0.1:{port} cannot be reached: Connection refused"
    )
    assert time.monotonic() - began_s < 5
    usual_port = refused("http://me:secret@127.0.0.1")
    assert "127.0.0.1 " in usual_port.message
    assert "secret" not in usual_port.message


def test_a_path_without_an_api_and_a_page_of_another_kind_are_told_apart(url: str) -> None:
    lost = refused(f"{url}/some/where")
    assert lost.message.endswith("has no Prometheus API at this path (HTTP 404)")
    page = Page()
    try:
        for page.text in ("<html>log in</html>", "[]", '{"data": {"result": [1]}}'):
            said = refused(f"http://127.0.0.1:{page.port}")
            shown = f"127.0.0.1:{page.port} answers, but not as a Prometheus does"
            assert said.message == shown
    finally:
        page.close()


def test_a_login_is_asked_for_taken_from_the_url_and_never_shown(tmp_path: Path) -> None:
    need_prometheus()
    with with_history(tmp_path, PLAIN, web_config=LOGIN) as url:
        said = refused(url)
        assert "refuses without a login (HTTP 401)" in said.message
        assert "--header" in said.hint
        wrong = refused(Scraped(url, headers={"Authorization": "Bearer secret"}))
        assert "secret" not in wrong.message + wrong.hint
        trace = read(url.replace("http://", "http://admin:test@"), "plain")
    assert len(trace) == len(PLAIN.arrived_s)
    assert "admin" not in f"{trace.source} {trace.notes}"


def test_a_certificate_that_is_not_trusted_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_prometheus()
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here: apt-get install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    web_config = f"tls_server_config: {{cert_file: {certificate}, key_file: {key}}}\n"
    with prometheus(tmp_path, web_config=web_config) as plain_url:
        url = plain_url.replace("http://", "https://")
        said = refused(url)
        assert "is not trusted: self" in said.message
        assert "--no-verify" in said.hint
        unchecked = refused(Scraped(url, verify=False))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        trusted = refused(url)
    for empty in (unchecked, trusted):
        assert "has no vllm:request_prompt_tokens_count" in empty.message
