"""The watch acts on a verdict only when it is large, lasting and not too soon."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.drift.watch.policy import (
    ODD_SHARE,
    Act,
    ChangeProposal,
    Memory,
    Policy,
    alike,
    changed,
    confirm,
    later_from_s,
    next_act,
    rolled_back,
)
from tuner.engine.limits import EngineLimits
from tuner.errors import UsageError

LIMITS = st.builds(EngineLimits, st.integers(1, 64), st.sampled_from([512, 2048, 8192]))
PROPOSALS = st.none() | st.builds(ChangeProposal, LIMITS, st.floats(0, 0.5), st.booleans())
POLICIES = st.builds(
    Policy, st.floats(0, 0.3), st.floats(0, 5000), st.integers(1, 4), st.floats(300, 6000)
)
ROUNDS = st.lists(st.tuples(st.floats(0, 2000), PROPOSALS), max_size=40)
EIGHT = ChangeProposal(EngineLimits(8, 2048), 0.2)
Looking = Callable[[float, float], ChangeProposal | None]
"""What a check of a stretch of time finds."""


def acts(
    policy: Policy, rounds: list[tuple[float, Looking]], memory: Memory | None = None
) -> list[tuple[float, Act]]:
    """Return when what is done; every change is made at once, and ends the need for it."""
    at_s, found, memory = 1e9, [], memory or Memory()
    for rest_s, look in rounds:
        at_s += rest_s
        proposal = look(at_s - policy.since_s, at_s)
        act, memory = next_act(policy, memory, proposal, at_s, on_guard=False)
        from_s = later_from_s(policy, memory, at_s)
        if act is Act.CONFIRM and from_s is not None:
            later = look(from_s, at_s)
            act, memory = confirm(policy, memory, later, at_s, on_guard=False)
        found.append((at_s, act))
        if act is Act.CHANGE:
            memory = changed(memory, at_s)
    return found


def always(rounds: list[tuple[float, ChangeProposal | None]]) -> list[tuple[float, Looking]]:
    """Return rounds in which a check finds the same on whatever stretch it looks at."""

    def saying(proposal: ChangeProposal | None) -> Looking:
        return lambda _, __: proposal

    return [(rest_s, saying(proposal)) for rest_s, proposal in rounds]


def during(start_s: float, end_s: float) -> Looking:
    """Return checks that find that a re-tune pays if they see the least of that time."""
    return lambda from_s, until_s: EIGHT if from_s < end_s and until_s > start_s else None


@given(POLICIES, ROUNDS)
def test_two_changes_are_never_closer_than_the_minimum_time(
    policy: Policy, rounds: list[tuple[float, ChangeProposal | None]]
) -> None:
    times_s = [at_s for at_s, act in acts(policy, always(rounds)) if act is Act.CHANGE]
    for before_s, after_s in pairwise(times_s):
        assert after_s - before_s >= policy.min_interval_s - 1e-6


@given(POLICIES, ROUNDS)
def test_before_a_change_the_verdict_stood_as_often_as_asked_on_traffic_of_its_own(
    policy: Policy, rounds: list[tuple[float, ChangeProposal | None]]
) -> None:
    found = acts(policy, always(rounds))
    for at, (changed_s, act) in enumerate(found):
        if act is not Act.CHANGE:
            continue
        first_s, later = changed_s, rounds[at][1]
        for (at_s, _), (_, earlier) in zip(found[at::-1], rounds[at::-1], strict=True):
            assert later is not None
            if earlier is None or not alike(earlier.limits, later.limits):
                break
            if earlier.gain_ratio < policy.min_gain_ratio and not earlier.meets_more:
                break
            first_s, later = at_s, earlier
        min_s = (policy.confirmations - 1) * ODD_SHARE * policy.since_s
        assert changed_s - first_s >= min_s


@given(
    st.integers(2, 4), st.floats(600, 90_000), st.floats(0.01, 1), st.floats(1, 3600), st.data()
)
def test_what_lasts_no_longer_than_a_sixth_of_a_look_back_never_changes_anything(
    confirmations: int, since_s: float, share: float, every_s: float, data: st.DataObject
) -> None:
    policy = Policy(0.05, 0.0, confirmations, since_s)
    lasting_s = share * since_s / 6
    start_s = 1e9 + data.draw(st.floats(0, every_s))
    checks = min(int((since_s + lasting_s) / every_s) + 3, 300)
    odd = during(start_s, start_s + lasting_s)
    assert Act.CHANGE not in [act for _, act in acts(policy, [(every_s, odd)] * checks)]


@given(st.floats(600, 90_000), st.floats(60, 3600))
def test_what_lasts_is_acted_upon_soon_after_a_sixth_of_a_look_back(
    since_s: float, every_s: float
) -> None:
    policy = Policy(0.05, 0.0, 2, since_s)
    start_s = 1e9 + 2 * every_s
    checks = int(since_s / every_s) + 10
    found = acts(policy, [(every_s, during(start_s, math.inf))] * checks)
    changed_s = next(at_s for at_s, act in found if act is Act.CHANGE)
    assert changed_s - start_s <= ODD_SHARE * since_s + policy.min_later_s + 2 * every_s


@given(POLICIES, st.floats(0.3, 0.9), st.floats(0, 10_000), st.none() | st.floats(0, 2e9))
def test_a_gain_that_stays_is_taken_in_the_end(
    policy: Policy, gain_ratio: float, later_s: float, last_change_s: float | None
) -> None:
    # Even if the last change lies in the future, as after the clock was put back.
    proposal = ChangeProposal(EngineLimits(8, 2048), gain_ratio)
    step_s = ODD_SHARE * policy.since_s + policy.min_later_s + 1.0
    checks = policy.confirmations + math.ceil(policy.min_interval_s / step_s) + 2
    rounds: list[tuple[float, ChangeProposal | None]] = [(later_s, proposal)]
    rounds += [(step_s, proposal)] * checks
    found = acts(policy, always(rounds), Memory(last_change_s=last_change_s))
    assert Act.CHANGE in [act for _, act in found]


@given(POLICIES, ROUNDS, LIMITS)
def test_what_was_rolled_back_does_not_come_again(
    policy: Policy, rounds: list[tuple[float, ChangeProposal | None]], barred: EngineLimits
) -> None:
    memory = rolled_back(Memory(), barred, 0.0)
    found = acts(policy, always(rounds), memory)
    for (_, act), (_, proposal) in zip(found, rounds, strict=True):
        if act is Act.CHANGE:
            assert proposal is not None
            assert not alike(proposal.limits, barred)


def test_each_reason_to_wait_is_reported() -> None:
    policy = Policy(0.05, 1000.0, 2, 600.0)
    fresh, once = Memory(), Memory(EIGHT.limits, 1, verdict_s=500.0)
    soon = replace(once, last_change_s=500.0)

    def first(memory: Memory, proposal: ChangeProposal | None) -> Act:
        return next_act(policy, memory, proposal, 1000.0, on_guard=False)[0]

    assert first(once, None) is Act.NONE
    assert first(once, replace(EIGHT, gain_ratio=0.049)) is Act.TOO_SMALL
    assert first(fresh, replace(EIGHT, gain_ratio=0.049, meets_more=True)) is Act.CONFIRM
    assert first(replace(once, barred=(EIGHT.limits,)), EIGHT) is Act.BARRED
    assert first(fresh, EIGHT) is Act.CONFIRM
    assert first(once, EIGHT) is Act.CONFIRM

    def later(
        memory: Memory, proposal: ChangeProposal | None, *, on_guard: bool = False
    ) -> Act:
        return confirm(policy, memory, proposal, 1000.0, on_guard=on_guard)[0]

    assert later(once, None) is Act.CONFIRM
    assert later(once, replace(EIGHT, limits=EngineLimits(17, 2048))) is Act.CONFIRM
    assert later(once, replace(EIGHT, against=EngineLimits(4, 2048))) is Act.CONFIRM
    assert later(once, replace(EIGHT, gain_ratio=0.049)) is Act.CONFIRM
    assert later(once, EIGHT, on_guard=True) is Act.GUARDED
    assert later(soon, EIGHT) is Act.TOO_SOON
    assert later(once, EIGHT) is Act.CHANGE


def test_a_verdict_that_was_refuted_counts_from_the_start_again() -> None:
    rounds = [(5000.0, EIGHT), (5000.0, None), (5000.0, EIGHT), (5000.0, EIGHT)]
    found = [act for _, act in acts(Policy(), always(rounds))]
    assert found == [Act.CONFIRM, Act.NONE, Act.CONFIRM, Act.CHANGE]


def test_a_verdict_that_waits_for_its_time_is_renewed_and_acted_on_by_traffic_of_then() -> None:
    # Lasting, but over by the time that another change is allowed.
    policy, over_s = Policy(min_interval_s=6 * 3600.0), 1e9 + 3 * 3600.0
    memory = Memory(last_change_s=1e9)
    found = acts(policy, [(900.0, during(1e9, over_s))] * 60, memory)
    assert Act.TOO_SOON in [act for _, act in found]
    assert Act.CHANGE not in [act for _, act in found]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1.0, 0.0, 1), "--min-gain must be from 0% to below 100%, got 100%"),
        ((0.1, -1.0, 1), "--min-interval must be at least 0 s"),
        ((0.1, 0.0, 0), "--confirmations must be at least 1, got 0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(
    values: tuple[float, float, int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Policy(*values)
