"""How long tokens took while how many requests ran, from a real Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from support.paths import ROOT
from support.prometheus_parts import need_prometheus, scraped, with_history
from support.prometheus_past import END_S, SCRAPES_S, START_S, PastEngine
from tuner.cli.commands import tune as command
from tuner.engine.shape import Drafts
from tuner.errors import Caveat, UsageError
from tuner.shadow.profiles import read_profile, write_profile
from tuner.traffic.prometheus.token_times import (
    ACCEPTED,
    DRAFTS,
    NAMES,
    TokenTimes,
    token_times,
)

L40S = ROOT / "profiles" / "gpu" / "meta-llama-3.1-8b.1xl40s.yaml"
RUNNING, PROMPT, OUTPUT = 12, 800, 400
# PastEngine answers a token each 20 ms.
ITL_S = 0.02
RATES = (0.8, 0.5, 0.3)


@dataclass(frozen=True, slots=True, eq=False)
class DecodingEngine(PastEngine):
    """A past in which the tokens between requests' first and last were timed."""

    name: str = NAMES[0]
    rates: tuple[float, ...] = ()

    def lines(self) -> list[str]:
        """Return the history with the times between tokens, and all in flight running."""
        own = f'instance="{self.instance}",model_name="{self.model}",engine="{self.engine}"'
        gauge = "vllm:num_requests_running"
        found = [line for line in PastEngine.lines(self) if not line.startswith(gauge)]
        for at_s in self.scrapes_s.tolist():
            passed = (at_s - self.arrived_s) / ITL_S
            count = int(np.clip(passed, 0, self.output - 1).astype(np.int64).sum())
            found += [
                f"{gauge}{{{own}}} {self.in_flight(at_s)} {at_s:.3f}",
                f"{self.name}_sum{{{own}}} {ITL_S * count} {at_s:.3f}",
                f"{self.name}_count{{{own}}} {count} {at_s:.3f}",
            ]
            if self.rates:
                found.append(f"{DRAFTS}{{{own}}} {count} {at_s:.3f}")
            found += [
                f'{ACCEPTED}{{{own},position="{i}"}} {int(rate * count)} {at_s:.3f}'
                for i, rate in enumerate(self.rates)
            ]
        return found


def steady(
    model: str, until_s: float = END_S, output: int = OUTPUT, **more: object
) -> DecodingEngine:
    """Return a server in which a dozen requests ran at any time, and then none."""
    arrived_s = np.arange(START_S, until_s, ITL_S * OUTPUT / RUNNING, dtype=np.float64)
    return DecodingEngine(
        arrived_s=arrived_s,
        prompt=np.full(arrived_s.size, PROMPT),
        output=np.full(arrived_s.size, output),
        scrapes_s=SCRAPES_S.astype(np.float64),
        model=model,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return a Prometheus that knows some servers."""
    need_prometheus()
    engines = (
        steady("steady"),
        steady("idle-later", START_S + 1800, name=NAMES[1]),
        steady("hardly", START_S + 2),
        steady("drafts", rates=RATES),
        steady("pair", instance="a:1"),
        steady("pair", output=OUTPUT // 2, instance="b:1"),
    )
    with with_history(tmp_path_factory.mktemp("past"), *engines) as found:
        yield found


def measured(url: str, model: str) -> TokenTimes:
    return token_times(scraped(url, model), END_S - START_S, 30, until_s=END_S)


@pytest.mark.parametrize("model", ["steady", "idle-later"])
def test_the_point_is_of_the_time_in_which_tokens_came(url: str, model: str) -> None:
    """Hours in which nothing runs do not count; a quarter of the prompts was cached."""
    found = measured(url, model)
    assert found.itl_s == pytest.approx(ITL_S)
    assert found.running == pytest.approx(RUNNING, rel=0.05)
    assert found.prompt_tokens == pytest.approx(0.75 * PROMPT, rel=0.01)
    assert found.output_tokens == OUTPUT


def test_too_few_tokens_are_refused_by_their_number(url: str) -> None:
    with pytest.raises(UsageError, match=r"counted \d+ times between tokens .* at least 2000"):
        measured(url, "hardly")


def test_with_labels_the_point_is_of_those_engines_alone(url: str, tmp_path: Path) -> None:
    """Half as long answers at the same pace: half as many run."""
    output = tmp_path / "mine.yaml"
    words = ["calibrate", "--profile", str(L40S), "--prometheus", url, "--model", "pair"]
    words += ["--label", "instance=b:1", "--since", "20h", "-o", str(output)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    assert f"a token takes {1e3 * ITL_S:.2f} ms with 5.9" in done.stdout


def test_the_command_corrects_by_what_prometheus_shows(url: str, tmp_path: Path) -> None:
    output = tmp_path / "mine.yaml"
    words = ["calibrate", "--profile", str(L40S), "--prometheus", url, "--model", "steady"]
    done = CliRunner().invoke(command, [*words, "--since", "20h", "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert f"a token takes {1e3 * ITL_S:.2f} ms with 11.9" in done.stdout
    assert f"corrected by itl={1e3 * ITL_S:.0f}ms@running=11.9" in read_profile(output).origin


def test_how_often_drafts_were_accepted_is_known_by_their_place(url: str) -> None:
    assert measured(url, "drafts").accepted == pytest.approx(RATES, abs=0.001)
    assert measured(url, "steady").accepted == ()


def test_a_profile_takes_the_rates_at_which_production_accepts(
    url: str, tmp_path: Path
) -> None:
    """Of a step's time is known what it was; how much it brings is another matter."""
    profile = tmp_path / "profile.yaml"
    drafting = read_profile(L40S)
    shape = replace(drafting.shape, drafts=Drafts("eagle3", 3))
    drafting = replace(drafting, shape=shape, accepted=(0.3, 0.1, 0.0))
    write_profile(profile, replace(drafting, caveats=(Caveat.DRAFTS_ON_RANDOM_TEXT,)))
    output = tmp_path / "mine.yaml"
    words = ["calibrate", "--prometheus", url, "--since", "20h", "-o", str(output)]
    words += ["--profile", str(profile), "--model"]
    done = CliRunner().invoke(command, [*words, "drafts"])
    assert done.exit_code == 0, done.output
    assert "brings an answer 2.60 tokens, its drafts accepted at 80%, 50%, 30%" in done.stdout
    assert f"a step takes {1e3 * ITL_S:.2f} ms with 11.9" in done.stdout
    assert read_profile(output).accepted == pytest.approx(RATES, abs=0.001)
    assert "another rate than of yours" not in done.stdout
    # Where Prometheus counts none, those of the profile stay.
    done = CliRunner().invoke(command, [*words, "steady"])
    assert done.exit_code == 0, done.output
    assert read_profile(output).accepted == (0.3, 0.1, 0.0)
    assert "numbers; there a step brings an answer 1.40 tokens" in done.stdout
    plain = [word if word != str(profile) else str(L40S) for word in words]
    done = CliRunner().invoke(command, [*plain, "drafts"])
    assert "production verifies 3 drafts a step, the profile's engine none" in str(
        done.exception
    )
