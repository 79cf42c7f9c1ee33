"""No secret stands in a text that leaves memory, whatever form it has there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.cli import run
from tuner.cli.console import say, show_result
from tuner.redact import REDACTED, is_secret, redacted_content, redacted_text
from tuner.replay.process import last_words
from tuner.run.directory import RunDir

SECRET = "s3cr3t-PW"
HUB = "hf_AbCdEfGhIjKlMnOpQrStUvWx"

TEXTS = [
    f"https://me:{SECRET}@hub.example/m",
    f"https://me:{SECRET}/with@and/slash@hub.example/m",
    f"postgresql+psycopg://host/db?user=me&password={SECRET}",
    f"sqlite:///file?api_key={SECRET}&x=1",
    f"me:{SECRET}@prometheus:9090",
    f"401 for url: https://h/m?token={SECRET}&sig={SECRET} after 3 tries",
    f"requests.exceptions.ProxyError: http://me:{SECRET}@proxy:3128 refused",
    f"{{'api_key': ['{SECRET}'], 'hf_token': '{SECRET}', 'model': 'm'}}",
    f"Namespace(api_key='{SECRET}', hf_token={SECRET}, max_num_seqs=8)",
    f"Authorization: Bearer {SECRET}",
    f"sent X-Auth: {SECRET}",
    f"Set-Cookie: session={SECRET}; Path=/",
    f"PGPASSWORD={SECRET} psql",
    f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f"OSError: Bearer {SECRET} is not allowed",
    f"the token {HUB} is not valid",
    json.dumps({"password": SECRET, "kept": 1}),
    f"sas={SECRET}",
    f"auth={SECRET}",
    f"hf-tokens={SECRET}",
    f"curl -u me:{SECRET} http://h/metrics",
    f"wget --user='me:{SECRET}' http://h",
    f'["curl", "--proxy-user", "me:{SECRET}", "http://h"]',
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_a_text_is_hidden_and_the_rest_stays(text: str) -> None:
    shown = redacted_text(text)
    assert SECRET not in shown
    assert HUB not in shown
    assert REDACTED in shown
    assert redacted_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "max-num-batched-tokens=2048, max_num_seqs=8",
        "trial 3 race 8/512 e2e p95 1.2 s",
        "give it again: --engine-arg api-key=…",
        "--engine-arg must look like KEY=VALUE, got x",
        "left out api-key, which is a secret: set VLLM_API_KEY",
        "api_key=None, hf_token=False",
        "--api-key=$(KEY) ${VLLM_API_KEY:?} $KEY",
        "http://prometheus:9090/api/v1 and s3://bucket/a/b at 12:30",
        "cannot open [/models/qwen]; searching live",
        "image: mine:1@sha256:0123abcd",
        "docker run -u 1000:1000 --user=0:0 m; curl -u $NAME:$PASS -u me:$PASS h; -u me",
        "prompt_tokens=5 token_ids=[1, 2] num_tokens=7",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert redacted_text(text) == text


@given(st.text())
def test_any_text_can_be_shown_twice(text: str) -> None:
    shown = redacted_text(text)
    assert redacted_text(shown) == shown


@pytest.mark.parametrize(
    "part",
    [
        *("a", "a=", "token=", "://", "://a@", "'a':", "x-auth: ", "token=[", "'token':'"),
        *("a:", "token='", "eyJ", "eyJaaaaaaaa.", "Bearer ", "hf_", "?key=", "-u a"),
    ],
)
def test_a_long_text_takes_no_longer_for_its_form(part: str) -> None:
    text = part * (200_000 // len(part))
    began_s = time.process_time()
    redacted_text(text)
    # A quadratic pattern takes minutes.
    assert time.process_time() - began_s < 10


def test_names_that_hold_secrets_are_known_and_counts_of_tokens_are_none() -> None:
    secret = "auth sas X-Auth hf-tokens api_tokens signature pwd api-key hf_token passwd-file"
    secret += " ssl-keyfile-password client_secret accessToken x.aws_secret_access_key"
    secret += " Authorization auth-credentials DB_PASS PGPASS GITHUB_PAT"
    plain = "max-num-batched-tokens tokens prompt_tokens author tokenizer tokenizer-mode model"
    plain += " ssl-keyfile long-prefill-token-threshold return-tokens-as-token-ids"
    plain += " allow-credentials compilation-config.pass_config"
    assert [name for name in secret.split() if not is_secret(name)] == []
    assert [name for name in plain.split() if is_secret(name)] == []


def test_nothing_of_a_run_directory_holds_a_secret(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run", resume=False)
    folder.write_json("run.json", {"options": {"notes": TEXTS, "cause": [TEXTS[0]]}})
    folder.write_lines("trials.jsonl", [{"cause": text} for text in TEXTS])
    folder.close()
    for path in (tmp_path / "run").iterdir():
        assert SECRET not in path.read_text()
        assert HUB not in path.read_text()
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert kept["options"]["notes"] == redacted_content(TEXTS)


def test_nothing_that_is_said_holds_a_secret_or_moves_the_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in TEXTS:
        say(text)
        show_result({"why": text}, [text], as_json=True)
        show_result({}, [text], as_json=False)
    say("\x1b]0;owned\x07\x1b[2Jfile\r\x9b31m")
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert HUB not in out + err
    assert "\x1b" not in err
    assert "\x9b" not in err
    assert r"\x1b[2Jfile\x0d\x9b31m" in err


def test_an_engines_last_words_hold_no_secret(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    for text in TEXTS:
        log.write_text(f"INFO all is well\nOSError: {text}\n")
        assert SECRET not in last_words(log)
        assert HUB not in last_words(log)


def test_a_defect_is_reported_without_a_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(TEXTS[0])

    monkeypatch.setattr("tuner.cli.traces.run_inspect", fail)
    assert run(["trace", "inspect", "x.jsonl"]) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: https://<redacted>@hub.example/m" in err
    assert SECRET not in err
