"""Who replays in which round, and what counts as a round."""

from __future__ import annotations

from tuner.engine.limits import EngineLimits
from tuner.search.objective import Score, Tier
from tuner.search.race import RaceRun, by_round, compared, missing_in, whole_rounds

CURRENT, BEST, OTHER = EngineLimits(16, 2048), EngineLimits(8, 2048), EngineLimits(12, 2048)
FIELD = [BEST, OTHER, CURRENT]


def a_run(limits: EngineLimits, number: int, attempt: str = "a", value: float = 1.0) -> RaceRun:
    return RaceRun(limits, number, Score(Tier.GOOD, value, "e2e_p99"), attempt)


def test_the_order_of_a_round_turns_around_from_one_to_the_next() -> None:
    assert missing_in([], 1, FIELD, "a") == FIELD
    assert missing_in([], 2, FIELD, "a") == FIELD[::-1]


def test_what_has_replayed_in_a_round_is_not_replayed_in_it_again() -> None:
    runs = [a_run(BEST, 1), a_run(OTHER, 1)]
    assert missing_in(runs, 1, FIELD, "a") == [CURRENT]
    assert missing_in([*runs, a_run(CURRENT, 1)], 1, FIELD, "a") == []


def test_a_round_that_another_process_left_half_done_is_run_anew() -> None:
    halfway = [a_run(BEST, 1, "before"), a_run(OTHER, 1, "before")]
    assert missing_in(halfway, 1, FIELD, "now") == FIELD
    # A whole one of another process, as of a worker, counts.
    whole = [*halfway, a_run(CURRENT, 1, "before")]
    assert missing_in(whole, 1, FIELD, "now") == []


def test_a_replay_that_was_cut_short_is_no_part_of_a_round() -> None:
    cut = RaceRun(CURRENT, 1, Score(Tier.CUT, 9.0, "cut short"))
    assert by_round([a_run(BEST, 1), cut], CURRENT) == {}
    assert whole_rounds([a_run(BEST, 1), cut], FIELD) == 0


def test_rounds_count_in_which_two_replayed() -> None:
    runs = [a_run(BEST, 1), a_run(CURRENT, 1), a_run(BEST, 2), a_run(OTHER, 2), a_run(BEST, 3)]
    assert whole_rounds(runs, FIELD) == 2
    assert (
        by_round([a_run(BEST, 1, value=1.0), a_run(BEST, 1, value=2.0)], BEST)[
            1, "a"
        ].score.value
        == 2.0
    )


def test_what_an_interruption_split_off_is_compared_with_nothing_of_another_process() -> None:
    first, split = [a_run(BEST, 1), a_run(CURRENT, 1)], a_run(BEST, 2)
    late = a_run(CURRENT, 2, "after")
    assert whole_rounds([*first, split, late], FIELD) == 1
    again = [a_run(BEST, 2, "after"), late]
    assert whole_rounds([*first, split, *again], FIELD) == 2
    assert compared([*first, split, *again]) == [*first, *again]
    assert set(by_round([split], BEST)) & set(by_round(again, CURRENT)) == set()
