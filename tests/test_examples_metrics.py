"""Alert rules and dashboard: Prometheus takes them, and they name metrics that there are."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from support.examples_parts import SCHEDULE, need, ran, succeeded
from tuner.drift.check import DriftVerdict
from tuner.drift.watch.handover import Rollout
from tuner.drift.watch.health import WatchMetrics
from tuner.drift.watch.loop import Watcher
from tuner.drift.watch.policy import Policy
from tuner.drift.watch.publish import Publisher
from tuner.drift.watch.state import Counts, Last, StateDir, WatchState
from tuner.emit.names import Format
from tuner.shadow.profiles import read_profile

RENAMED = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"} | {
    f"vllm:gpu_prefix_cache_{what}" for what in ("hits", "queries")
}
"""What older versions of vLLM called a metric; the current ones are looked up in vLLM."""


@pytest.fixture
def promtool(tmp_path: Path) -> Path:
    """Return a folder with the rules, their test and the configuration side by side."""
    need("promtool", "prometheus")
    for path in (*(SCHEDULE / "prometheus").iterdir(), SCHEDULE / "compose" / "prometheus.yml"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_prometheus_takes_the_rules_and_they_fire_when_they_should(promtool: Path) -> None:
    succeeded("promtool", "check", "config", "prometheus.yml", cwd=promtool)
    succeeded("promtool", "test", "rules", "alerts_test.yaml", cwd=promtool)
    tested = (promtool / "alerts_test.yaml").read_text()
    alerts = {rule["alert"] for rule in alert_rules()}
    assert set(re.findall(r"alertname: (\w+)", tested)) == alerts
    rules = promtool / "alerts.yaml"
    rules.write_text(re.sub(r">(=?) 0\b", r"<\1 0", rules.read_text()))
    assert ran("promtool", "test", "rules", "alerts_test.yaml", cwd=promtool).returncode == 1


def alert_rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    groups = yaml.safe_load((SCHEDULE / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    loaded: dict[str, Any] = json.loads((SCHEDULE / "grafana" / "dashboard.json").read_text())
    return loaded


def expressions() -> list[str]:
    """Return every PromQL expression of the examples, Grafana's variables filled in."""
    shown = dashboard()
    found = [t["expr"] for panel in shown["panels"] for t in panel.get("targets", ())]
    found += [note["expr"] for note in shown["annotations"]["list"]]
    for name, value in {"$__rate_interval": "5m", "$__range": "1d", "$model": ".*"}.items():
        found = [text.replace(name, value) for text in found]
    return [*found, *(rule["expr"] for rule in alert_rules())]


def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    need("promtool", "prometheus")
    texts = expressions()
    assert len(texts) > 20
    assert [text for text in texts if "$" in text] == []
    rules = [{"record": f"tried:{n}", "expr": text} for n, text in enumerate(texts)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "tried", "rules": rules}]}))
    assert f"{len(texts)} rules found" in succeeded("promtool", "check", "rules", path)


def test_every_metric_of_vllm_has_a_name_that_vllm_gives_it() -> None:
    names = set(re.findall(r"vllm:\w+", " ".join(expressions())))
    assert len(names) > 8
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        pytest.skip("vLLM is not installed: make setup")
    source = Path(package.origin).parent / "v1" / "metrics" / "loggers.py"
    known = set(re.findall(r'"(vllm:\w+)"', source.read_text())) | RENAMED
    stems = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}
    assert stems - known == set()


class Noon:
    """A clock at which it is always the same time."""

    def now_s(self) -> float:
        """Return it."""
        return 1.79e9

    def elapsed_s(self) -> float:
        """Return none."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Wait for nothing."""


def a_page(folder: Path) -> str:
    """Return the page of a watcher that has seen something."""
    counts = Counts(checks={str(verdict): 1 for verdict in DriftVerdict})
    last = Last(check_s=1.79e9, gain_ratio=0.1)
    profile = read_profile(SCHEDULE.parents[1] / "profiles" / "demo.profile.yaml")
    publisher = Publisher(folder / "best.yaml", Format.VLLM, profile, {})
    with StateDir(folder / "state") as store:
        store.state = WatchState(counts=counts, last=last)
        watcher = Watcher(
            store=store,
            rollout=Rollout(store, publisher, None, None, Noon(), print),
            policy=Policy(),
            every_s=900,
            tuned_for=profile.current_limits,
            sample=lambda _: pytest.fail("a page asks nobody"),
            sketch=lambda _: pytest.fail("a page measures nothing"),
            check=lambda *_: pytest.fail("a page decides nothing"),
            clock=Noon(),
            notify=print,
        )
        registry = CollectorRegistry()
        registry.register(WatchMetrics(watcher, lambda: watcher.current))
        return generate_latest(registry).decode()


def test_every_metric_of_the_watcher_is_on_its_page(tmp_path: Path) -> None:
    names = set(re.findall(r"tune_\w+", " ".join(expressions())))
    assert len(names) == 8
    shown = set(re.findall(r"^(tune_\w+)", a_page(tmp_path), re.MULTILINE))
    assert names - shown == set()


def test_every_verdict_that_is_asked_for_is_one() -> None:
    asked = re.findall(r'verdict(=~?)"([^"]+)"', " ".join(expressions()))
    assert len(asked) == 2
    for how, text in asked:
        pattern = text if how == "=~" else re.escape(text)
        assert [v for v in DriftVerdict if re.fullmatch(pattern, v)] != []


def test_the_dashboard_s_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            sources = [panel["datasource"], *(t["datasource"] for t in panel["targets"])]
            assert all(source["uid"] == "${datasource}" for source in sources)
