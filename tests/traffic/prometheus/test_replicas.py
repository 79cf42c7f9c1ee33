"""Which of several engines stands for all, by a Prometheus whose engines are known."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from support.prometheus_fake import FakePrometheus, answered, listening, send
from support.prometheus_parts import read, scraped
from support.prometheus_past import END_S, HOUR_S, MOVED, SCRAPES_S, TWINS, past
from tuner.traffic.prometheus import known_in_part
from tuner.traffic.prometheus.replicas import Replica, one_replica
from tuner.traffic.traces import ReadNotes, Remark

LATE = SCRAPES_S[SCRAPES_S > END_S - 1200]
# One comes for the last twenty minutes, and answers most by then.
PEAKY = (
    *(
        past(rate, seed=i, model="peaky", instance=f"{i}:80")
        for i, rate in enumerate((1, 2, 3))
    ),
    past(20.0, seed=9, model="peaky", instance="9:80", scrapes_s=LATE),
)
RANKS = tuple(
    past(0.5 + i, seed=i, model="ranks", instance="a:8000", engine=str(i)) for i in range(3)
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the metrics of some fleets, and sums over one that name no instance."""
    known = FakePrometheus.of(*TWINS, *MOVED, *PEAKY, *RANKS)
    for key, pairs in FakePrometheus.of(past(seed=4, model="summed")).series.items():
        known.series[tuple(label for label in key if label[0] != "instance")] = pairs
    with listening(lambda handler, asked: send(handler, answered(known, asked))) as found:
        yield found


def replica(url: str, model: str, **labels: str) -> Replica:
    return one_replica(scraped(url, model, **labels), 2.0 * HOUR_S, 30, until_s=END_S)


def test_gauges_without_a_number_are_as_those_that_are_missing() -> None:
    known = FakePrometheus.of(past(seed=4, model="mute"))
    for key, (at_s, values) in known.series.items():
        if re.search("num_requests_(running|waiting)|cache_usage", dict(key)["__name__"]):
            known.series[key] = at_s, np.full_like(values, np.nan)
    with listening(lambda handler, asked: send(handler, answered(known, asked))) as url:
        trace = read(url, "mute")
    assert len(trace) > 100
    said = " ".join(trace.notes.texts)
    assert "arrivals stand where requests finished" in said
    assert "% full" not in said


@pytest.mark.parametrize(
    ("model", "labels", "words"),
    [
        ("twins", {"instance": "a:8000"}, "2 engines served at once: this is the one with the"),
        ("peaky", {"instance": "1:80"}, "they finished 0.5 to 1.5 times as many requests each"),
        ("ranks", {"engine": "1"}, "the middle load, --label engine=1; they finished 0.3"),
    ],
)
def test_the_middle_one_of_those_that_last_stands_for_all(
    url: str, model: str, labels: dict[str, str], words: str
) -> None:
    found = replica(url, model)
    assert found.labels == labels
    assert words in Remark.of(found.remark).text


def test_who_took_the_place_of_another_or_was_named_is_one(url: str) -> None:
    assert replica(url, "moved") == Replica({})
    named = {"instance": "b:8000"}
    assert replica(url, "twins", **named) == Replica(named)


def test_sums_that_name_no_instance_are_told_apart_from_an_engine(url: str) -> None:
    assert "sums over several servers" in known_in_part(
        ReadNotes().with_remark(replica(url, "summed").remark)
    )
    named = {"engine": "0"}
    assert replica(url, "summed", **named) == Replica(named)
