"""A watch changes the file when it should, whatever fails around it, and never otherwise."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.watch_parts import (
    EIGHT,
    FOUR,
    HOUR_S,
    MINUTE_S,
    SERVED,
    THIRTY,
    TOO_LITTLE,
    TRAFFIC,
    UNCHANGED,
    JumpingClock,
    a_world,
    pays,
)
from tuner.drift.check import Checked
from tuner.drift.watch.policy import Act
from tuner.drift.watch.publish import Publisher, Text
from tuner.emit.names import Format
from tuner.emit.sources import read_emitted
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError
from tuner.files import ExpectedText
from tuner.traffic.sketch import TrafficSketch, sketch_of
from tuner.traffic.traces import Trace


def test_a_verdict_that_stays_becomes_a_file_with_its_reasons(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        assert world.rounds(UNCHANGED, pays(), pays()) == [Act.NONE, Act.CONFIRM, Act.CONFIRM]
        assert world.path.read_text() == SERVED
        world.clock.sleep(HOUR_S)
        assert world.rounds(pays()) == [Act.CHANGE]
        text = world.path.read_text()
        assert world.hook.seen == [("change", text)]
        read = read_emitted(world.path)
        assert (read.limits, read.values["enforce-eager"]) == (EIGHT, True)
        for words in (
            f"tuned 2027-01-15 on {len(TRAFFIC):,} requests of busy.jsonl (sha256 ",
            "PREDICTED by the shadow of a profile of 2026-01-31, not measured",
            "against the current max-num-seqs 4, max-num-batched-tokens 2048:",
            "e2e_p95 falls by 30.0% (25.0% … 35.0%)",
            "why: arrival_rate shifted",
            f"evidence: {tmp_path / 'state'}",
        ):
            assert words in text
        assert (read.facts["method"], read.facts["tuned-at"]) == ("shadow", "2027-01-15")
        # From now on the new limits are the current ones, and today's traffic the baseline.
        world.rounds(UNCHANGED)
        assert world.script.checked_at == [*[FOUR] * 5, EIGHT]
        before = world.script.tuned_for[-1]
        assert world.script.tuned_for[:-1] == [None] * 5
        assert before is not None
        assert before.sha256 == TRAFFIC.sha256


def test_a_file_that_others_edit_is_told_though_traffic_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        world.rounds(UNCHANGED)
        assert "but the configuration" not in world.words
        world.path.write_text(SERVED.replace("max-num-seqs: 4", "max-num-seqs: 8"))
        world.rounds(UNCHANGED)
        told = "nothing differs, but the configuration has 8/2048 and the baseline 4/2048"
        assert f"unchanged: {told}; nothing to change" in world.words
        assert world.watcher.store.state.last.why == told


def test_a_configuration_that_has_no_goodput_at_all_is_left(tmp_path: Path) -> None:
    """How much more another has is no share of nothing."""
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        assert world.lasts(replace(pays(), gain=None)) == [Act.CONFIRM, Act.CHANGE]
        assert read_emitted(world.path).limits == EIGHT
        assert "re-tune pays without end at 8/2048" in world.words


def seen_since(start_s: float, end_s: float = math.inf) -> Callable[[float, float], Checked]:
    """Return checks that say that a re-tune pays if they see the least of that time."""
    return lambda since_s, until_s: (
        pays() if since_s < end_s and until_s > start_s else UNCHANGED
    )


@pytest.mark.slow
def test_one_odd_hour_never_changes_the_file_however_many_checks_see_it(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    for began_ago_s in (0.0, 7 * MINUTE_S, HOUR_S):
        with a_world(tmp_path) as world:
            start_s = world.clock.now_s() - began_ago_s
            found = world.rounds(*[seen_since(start_s, start_s + HOUR_S)] * 40)
            assert found.count(Act.CONFIRM) >= 20
            assert Act.CHANGE not in found
            assert found[-1] == Act.NONE
            assert world.path.read_text() == SERVED


def test_what_lasts_changes_the_file_an_hour_and_a_check_after_it_was_noticed(
    tmp_path: Path,
) -> None:
    with a_world(tmp_path) as world:
        start_s = world.clock.now_s() - MINUTE_S
        found = world.rounds(*[seen_since(start_s)] * 6)
        assert found == [*[Act.CONFIRM] * 5, Act.CHANGE]
        # The last check is of what came an hour after the first verdict and later, alone.
        first_s, last_s = world.script.looked[0][1], world.script.looked[-1][1]
        assert world.script.looked[-1][0] == first_s + HOUR_S
        assert last_s - first_s == HOUR_S + 15 * MINUTE_S
        assert "the later traffic alone is shifted, re-tune pays" in world.words


def test_later_traffic_is_waited_for_until_it_holds_enough(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        quiet_until_s = world.clock.now_s() + 3 * HOUR_S

        def few(since_s: float, until_s: float) -> Checked:
            is_later = until_s - since_s < 6 * HOUR_S
            return TOO_LITTLE if is_later and until_s < quiet_until_s else pays()

        found = world.rounds(*[few] * 13)
        assert found == [*[Act.CONFIRM] * 12, Act.CHANGE]
        assert "not yet: the later traffic alone is too little data" in world.words
        assert world.watcher.store.state.counts.checks == {"shifted, re-tune pays": 13}


def test_the_next_change_waits_for_its_time_across_processes(tmp_path: Path) -> None:
    clock = JumpingClock()
    for verdict, expected in (
        (pays(), Act.CONFIRM),
        (pays(), Act.CHANGE),
        (pays(THIRTY), Act.CONFIRM),
        (pays(THIRTY), Act.TOO_SOON),
    ):
        # A process for each round, as from cron.
        with a_world(tmp_path, clock=clock) as world:
            assert world.rounds(verdict) == [expected]
        clock.sleep(HOUR_S)
    clock.sleep(6 * HOUR_S)
    with a_world(tmp_path, clock=clock) as world:
        assert world.rounds(pays(THIRTY)) == [Act.CHANGE]
        assert read_emitted(world.path).limits == THIRTY
        assert world.watcher.store.state.counts.changes == 2


def test_partial_data_gives_no_verdict_and_refutes_none(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        assert world.rounds(pays(), TOO_LITTLE) == [Act.CONFIRM, Act.NONE]
        world.clock.sleep(HOUR_S)
        assert world.rounds(pays()) == [Act.CHANGE]
        assert world.watcher.store.state.counts.checks == {
            "shifted, re-tune pays": 2,
            "too little data": 1,
        }


def test_rounds_begin_as_often_as_asked_however_long_they_take(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.script.outages.append("slow")
        world.rounds(UNCHANGED, UNCHANGED)
        assert world.clock.waits_s == [2.0, 898.0, 900.0]


def test_a_manifest_is_edited_in_place_and_the_state_knows_what_is_in_use(
    tmp_path: Path,
) -> None:
    manifest = (
        "services:\n  vllm:\n    image: vllm/vllm-openai # ours\n"
        "    command: [toy, --max-num-seqs, '4', --max-num-batched-tokens, '2048']\n"
    )
    (tmp_path / "best.yaml").write_text(manifest)
    with a_world(tmp_path, chosen=Format.DOCKER_COMPOSE) as world:
        world.lasts(pays())
        world.rounds(UNCHANGED)
        text = world.path.read_text()
        assert "vllm/vllm-openai # ours" in text
        assert "'8'" in text
        assert "max-num-seqs-tuner/gain: e2e_p95 falls by 30.0%" in text
        assert world.script.checked_at == [FOUR, FOUR, FOUR, EIGHT]


def test_what_a_manifest_says_is_in_use_and_one_without_a_place_is_refused_at_once(
    tmp_path: Path,
) -> None:
    service = "  {}:\n    image: vllm/vllm-openai\n    command: toy --max-num-seqs={} {}\n"
    budget = "--max-num-batched-tokens 2k"
    manifest = tmp_path / "best.yaml"
    manifest.write_text("services:\n" + service.format("chat", 32, budget))
    with a_world(tmp_path, chosen=Format.DOCKER_COMPOSE) as world:
        world.rounds(UNCHANGED)
        # Somebody edits it by hand, and then leaves the token budget to a variable.
        manifest.write_text("services:\n" + service.format("chat", 16, budget))
        world.rounds(UNCHANGED)
        assert world.script.checked_at == [EngineLimits(32, 2000), EngineLimits(16, 2000)]
        held = "--max-num-batched-tokens $BUDGET"
        manifest.write_text("services:\n" + service.format("chat", 64, held))
        with pytest.raises(UsageError, match="does not say both limits as numbers"):
            _ = world.watcher.current
        manifest.write_text("services:\n" + service.format("chat", 16, ""))
        with pytest.raises(UsageError, match="sets one of the two limits alone"):
            _ = world.watcher.current
        two = service.format("chat", 16, budget) + service.format("code", 8, budget)
        manifest.write_text("services:\n" + two)
        with pytest.raises(UsageError, match="2 services that run vLLM among chat, code"):
            _ = world.watcher.current


def test_a_key_that_the_file_leaves_out_is_still_named_in_the_next(tmp_path: Path) -> None:
    remark = "# left out api-key, which is a secret: set VLLM_API_KEY in the environment\n"
    (tmp_path / "best.yaml").write_text(remark + SERVED)
    with a_world(tmp_path) as world:
        world.lasts(pays())
        assert remark in world.path.read_text()
        assert "max-num-seqs: 8" in world.path.read_text()


def test_a_secret_in_the_file_stays_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text(SERVED + "api-key: invented\n")
    with a_world(tmp_path) as world:
        world.lasts(pays())
        assert "api-key: invented" in world.path.read_text()
        assert stat.S_IMODE(world.path.stat().st_mode) == 0o600
        assert "invented" not in world.words


def test_a_file_that_is_no_configuration_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text("shopping: list\n")
    with a_world(tmp_path) as world:
        (found,) = world.rounds(pays())
        assert "is no configuration that tune wrote" in found
        assert world.path.read_text() == "shopping: list\n"


EDIT = "max-model-len: 4096\n"


class HastyPublisher(Publisher):
    """Others edit the file while the new one is being written."""

    def write(self, text: Text, held: ExpectedText) -> None:
        """Write, after the edit."""
        with self.path.open("a") as file:
            file.write(EDIT)
        Publisher.write(self, text, held)


@pytest.mark.parametrize("when", ["check", "sketch", "write"])
def test_an_edit_made_while_the_watch_was_busy_stays_and_nothing_is_written_over_it(
    tmp_path: Path, when: str
) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        world.rounds(pays())
        world.clock.sleep(HOUR_S)

        def edit() -> None:
            world.path.write_text(SERVED + EDIT)

        def sketch(trace: Trace) -> TrafficSketch:
            edit()
            return sketch_of(trace)

        watcher, publisher = world.watcher, world.watcher.rollout.publisher
        if when == "check":
            world.script.meanwhile = edit
        elif when == "sketch":
            watcher.sketch = sketch
        else:
            watcher.rollout.publisher = HastyPublisher(
                world.path, Format.VLLM, publisher.profile, publisher.values
            )
        world.rounds(pays())
        assert world.path.read_text() == SERVED + EDIT
        assert world.hook.seen == []
        assert "was changed by others meanwhile and is left alone" in world.words
        assert "the change to 8/2048 is dropped" in world.words
        assert world.watcher.store.state.handover is None
        assert not list((tmp_path / "state").glob("traffic-*"))
        # The next round starts from the file as it is now.
        world.script.meanwhile, watcher.sketch = None, sketch_of
        watcher.rollout.publisher = publisher
        assert world.rounds(pays()) == [Act.CHANGE]
        read = read_emitted(world.path)
        assert (read.limits, read.values["max-model-len"]) == (EIGHT, 4096)


def test_limits_that_somebody_set_during_the_check_stay_and_are_checked_anew(
    tmp_path: Path,
) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    others = SERVED.replace("max-num-seqs: 4", "max-num-seqs: 32")
    with a_world(tmp_path) as world:
        world.rounds(pays())
        world.clock.sleep(HOUR_S)
        world.script.meanwhile = lambda: world.path.write_text(others)
        world.rounds(pays())
        assert world.path.read_text() == others
        # A verdict on four is none on thirty-two: it begins anew.
        world.script.meanwhile = None
        assert world.rounds(pays()) == [Act.CONFIRM]
        assert world.script.checked_at[-1] == THIRTY


def test_a_file_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.rounds(pays())
        world.clock.sleep(HOUR_S)
        world.script.meanwhile = lambda: world.path.write_text(SERVED)
        world.rounds(pays())
        assert world.path.read_text() == SERVED
        assert "is left alone" in world.words
