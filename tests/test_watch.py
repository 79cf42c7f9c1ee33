"""A watch changes the file when it should, whatever fails around it, and never otherwise."""

from __future__ import annotations

import stat
from pathlib import Path

from watch_parts import (
    EIGHT,
    FOUR,
    HOUR_S,
    THIRTY,
    TOO_LITTLE,
    TRAFFIC,
    UNCHANGED,
    JumpingClock,
    a_world,
    pays,
)

from tuner.emit.names import Format
from tuner.emit.sources import read_emitted
from tuner.watch.policy import Act

SERVED = (
    "# mine\nmodel: toy\nenforce-eager: true\nmax-num-seqs: 4\nmax-num-batched-tokens: 2048\n"
)


def test_a_verdict_that_stays_becomes_a_file_with_its_reasons(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text(SERVED)
    with a_world(tmp_path) as world:
        assert world.rounds(UNCHANGED, pays()) == [Act.NONE, Act.CONFIRM]
        assert world.path.read_text() == SERVED
        assert world.rounds(pays()) == [Act.CHANGE]
        text = world.path.read_text()
        assert world.hook.seen == [("change", text)]
        read = read_emitted(world.path)
        assert (read.limits, read.values["enforce-eager"]) == (EIGHT, True)
        for words in (
            f"tuned 2027-01-15 on {len(TRAFFIC):,} requests of busy.jsonl (sha256 ",
            "PREDICTED by the shadow of a profile of 2026-01-31, not measured",
            "against the present max-num-seqs 4, max-num-batched-tokens 2048:",
            "e2e_p95 falls by 30.0% (25.0% … 35.0%)",
            "why: arrival_rate shifted",
            f"evidence: {tmp_path / 'state'}",
        ):
            assert words in text
        assert (read.facts["method"], read.facts["tuned-at"]) == ("shadow", "2027-01-15")
        # From now on the new limits are the present ones, and today's traffic the baseline.
        world.rounds(UNCHANGED)
        assert world.script.checked_at == [FOUR, FOUR, FOUR, EIGHT]
        before = world.script.tuned_for[-1]
        assert world.script.tuned_for[:-1] == [None] * 3
        assert before is not None
        assert before.sha256 == TRAFFIC.sha256


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
    clock.sleep(6 * HOUR_S)
    with a_world(tmp_path, clock=clock) as world:
        assert world.rounds(pays(THIRTY)) == [Act.CHANGE]
        assert read_emitted(world.path).limits == THIRTY
        assert world.watcher.book.state.counts.changes == 2


def test_partial_data_gives_no_verdict_and_refutes_none(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        found = world.rounds(pays(), TOO_LITTLE, pays())
        assert found == [Act.CONFIRM, Act.NONE, Act.CHANGE]
        assert world.watcher.book.state.counts.checks == {
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
        world.rounds(pays(), pays(), UNCHANGED)
        text = world.path.read_text()
        assert "vllm/vllm-openai # ours" in text
        assert "'8'" in text
        assert "max-num-seqs-tuner/gain: e2e_p95 falls by 30.0%" in text
        assert world.script.checked_at == [FOUR, FOUR, EIGHT]


def test_a_key_that_the_file_leaves_out_is_still_named_in_the_next(tmp_path: Path) -> None:
    remark = "# left out api-key, which is a secret: set VLLM_API_KEY in the environment\n"
    (tmp_path / "best.yaml").write_text(remark + SERVED)
    with a_world(tmp_path) as world:
        world.rounds(pays(), pays())
        assert remark in world.path.read_text()
        assert "max-num-seqs: 8" in world.path.read_text()


def test_a_secret_in_the_file_stays_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text(SERVED + "api-key: invented\n")
    with a_world(tmp_path) as world:
        world.rounds(pays(), pays())
        assert "api-key: invented" in world.path.read_text()
        assert stat.S_IMODE(world.path.stat().st_mode) == 0o600
        assert "invented" not in world.words


def test_a_file_that_is_no_configuration_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "best.yaml").write_text("shopping: list\n")
    with a_world(tmp_path) as world:
        (found,) = world.rounds(pays())
        assert "is no configuration that tune wrote" in found
        assert world.path.read_text() == "shopping: list\n"
