"""A gate is written so that what takes it does, and says what it leaves out."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.gate_parts import a_gate
from tuner.emit.gate import WRITERS
from tuner.emit.names import GateFormat
from tuner.errors import UsageError
from tuner.gate import SETTINGS, GateLimits
from tuner.replay.server.process import free_port

ANSWER = replace(a_gate(), gate=GateLimits(6, 3, 0.25, 100), capacity=1.25, in_flight=5.5)


def test_every_form_is_written_with_what_it_rests_on() -> None:
    assert set(WRITERS) == set(GateFormat)
    for chosen, write in WRITERS.items():
        comments = [line for line in write(ANSWER).splitlines() if line.startswith("# ")]
        text = "\n".join(comments)
        assert "max-num-seqs 8" in text, chosen
        assert "P(better) 1.00" in text, chosen
        assert str(ANSWER.gate) in text, chosen


def test_the_middleware_reads_what_is_written_for_it() -> None:
    last = WRITERS[GateFormat.MIDDLEWARE](ANSWER).splitlines()[-1]
    name, value = last.split("=", 1)
    assert name == SETTINGS
    assert GateLimits.parse(value) == ANSWER.gate


def test_vllm_bounds_the_engine_and_the_queue_together() -> None:
    assert yaml.safe_load(WRITERS[GateFormat.VLLM](ANSWER)) == {"max-num-queued-reqs": 9}


@pytest.mark.engine
def test_vllm_takes_its_own_limit() -> None:
    from tuner.engine.compat.serve import parse_serve_values

    values = yaml.safe_load(WRITERS[GateFormat.VLLM](ANSWER))
    assert parse_serve_values(values).max_num_queued_reqs == 9


def test_nginx_takes_the_file(tmp_path: Path) -> None:
    places = f"{os.environ['PATH']}:/usr/sbin"
    nginx = shutil.which("nginx", path=places)
    if nginx is None:
        pytest.skip("no nginx here: apt-get install nginx-light")
    text = WRITERS[GateFormat.NGINX](ANSWER)
    assert "limit_conn tune_gate 9;" in text
    (tmp_path / "gate.conf").write_text(text.replace("8080", str(free_port())))
    paths = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{paths}"
        f"include {tmp_path}/gate.conf;\n}}\n"
    )
    command = [nginx, "-t", "-e", "stderr", "-p", str(tmp_path), "-c", "nginx.conf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_envoy_never_gets_a_queue_of_nothing_which_would_refuse_all() -> None:
    for gate, pending in ((ANSWER.gate, 3), (GateLimits(6), 1)):
        (cluster,) = yaml.safe_load(WRITERS[GateFormat.ENVOY](replace(ANSWER, gate=gate)))
        (bounds,) = cluster["circuit_breakers"]["thresholds"]
        assert bounds["max_connections"] == 6
        assert bounds["max_pending_requests"] == pending


def test_kubernetes_takes_the_autoscaler() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    hpa = yaml.safe_load(WRITERS[GateFormat.HPA](ANSWER))
    validate(hpa, "1.30", strict=True)
    # Four fifths of what the gate lets in are less than the requests in flight at capacity.
    assert hpa["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == "4"
    keda = yaml.safe_load(WRITERS[GateFormat.KEDA](ANSWER))
    assert keda["spec"]["triggers"][0]["metadata"]["threshold"] == "4"


def test_nothing_scales_to_slos_that_hold_at_no_load() -> None:
    hopeless = replace(ANSWER, capacity=None, in_flight=None)
    for chosen in (GateFormat.KEDA, GateFormat.HPA):
        with pytest.raises(UsageError, match="hold at no load"):
            WRITERS[chosen](hopeless)
