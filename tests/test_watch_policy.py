"""The watch acts on a verdict only when it is large, repeated and not too soon."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.protocol import EngineLimits
from tuner.errors import UsageError
from tuner.watch.policy import (
    Act,
    Memory,
    Policy,
    Proposal,
    alike,
    changed,
    decide,
    rolled_back,
)

LIMITS = st.builds(EngineLimits, st.integers(1, 64), st.sampled_from([512, 2048, 8192]))
PROPOSALS = st.none() | st.builds(Proposal, LIMITS, st.floats(0, 0.5), st.booleans())
POLICIES = st.builds(Policy, st.floats(0, 0.3), st.floats(0, 5000), st.integers(1, 4))
ROUNDS = st.lists(st.tuples(st.floats(0, 2000), PROPOSALS), max_size=40)
EIGHT = Proposal(EngineLimits(8, 2048), 0.2)


def acts(
    policy: Policy, rounds: list[tuple[float, Proposal | None]], memory: Memory | None = None
) -> list[tuple[float, Act]]:
    """Return when what is done; every change is made at once."""
    at_s, found, memory = 1e9, [], memory or Memory()
    for later_s, proposal in rounds:
        at_s += later_s
        act, memory = decide(policy, memory, proposal, at_s, on_guard=False)
        found.append((at_s, act))
        if act is Act.CHANGE:
            memory = changed(memory, at_s)
    return found


@given(POLICIES, ROUNDS)
def test_two_changes_are_never_closer_than_the_minimum_time(
    policy: Policy, rounds: list[tuple[float, Proposal | None]]
) -> None:
    times_s = [at_s for at_s, act in acts(policy, rounds) if act is Act.CHANGE]
    for before_s, after_s in pairwise(times_s):
        assert after_s - before_s >= policy.least_interval_s - 1e-6


@given(POLICIES, ROUNDS)
def test_before_a_change_the_same_verdict_stood_as_often_as_asked(
    policy: Policy, rounds: list[tuple[float, Proposal | None]]
) -> None:
    found = acts(policy, rounds)
    for at, (_, act) in enumerate(found):
        if act is not Act.CHANGE:
            continue
        assert at + 1 >= policy.confirmations
        verdicts = [proposal for _, proposal in rounds[at + 1 - policy.confirmations : at + 1]]
        for earlier, later in zip([verdicts[0], *verdicts], verdicts, strict=False):
            assert earlier is not None
            assert later is not None
            assert alike(earlier.limits, later.limits)
            assert later.meets_more or later.gain_ratio >= policy.least_gain_ratio


@given(POLICIES, st.floats(0.3, 0.9), st.floats(0, 10_000), st.none() | st.floats(0, 2e9))
def test_a_gain_that_stays_is_taken_in_the_end(
    policy: Policy, gain_ratio: float, later_s: float, last_change_s: float | None
) -> None:
    # Even if the last change lies in the future, as after the clock was put back.
    proposal = Proposal(EngineLimits(8, 2048), gain_ratio)
    rounds: list[tuple[float, Proposal | None]] = [(later_s, proposal)] * policy.confirmations
    rounds += [(policy.least_interval_s + 1.0, proposal)] * 2
    found = acts(policy, rounds, Memory(last_change_s=last_change_s))
    assert Act.CHANGE in [act for _, act in found]


@given(POLICIES, ROUNDS, LIMITS)
def test_what_was_rolled_back_does_not_come_again(
    policy: Policy, rounds: list[tuple[float, Proposal | None]], barred: EngineLimits
) -> None:
    memory = rolled_back(Memory(), barred, 0.0)
    for (_, act), (_, proposal) in zip(acts(policy, rounds, memory), rounds, strict=True):
        if act is Act.CHANGE:
            assert proposal is not None
            assert not alike(proposal.limits, barred)


def test_each_reason_to_wait_is_told() -> None:
    policy = Policy(0.05, 1000.0, 2)
    fresh, once = Memory(), Memory(EIGHT.limits, 1)
    soon = replace(once, last_change_s=500.0)

    def act(memory: Memory, proposal: Proposal | None, *, on_guard: bool = False) -> Act:
        return decide(policy, memory, proposal, 1000.0, on_guard=on_guard)[0]

    assert act(once, None) is Act.NONE
    assert act(once, replace(EIGHT, gain_ratio=0.049)) is Act.TOO_SMALL
    assert act(once, replace(EIGHT, gain_ratio=0.049, meets_more=True)) is Act.CHANGE
    assert act(fresh, EIGHT) is Act.CONFIRM
    assert act(once, replace(EIGHT, limits=EngineLimits(17, 2048))) is Act.CONFIRM
    assert act(once, EIGHT, on_guard=True) is Act.GUARDED
    assert act(soon, EIGHT) is Act.TOO_SOON
    assert act(replace(once, barred=(EIGHT.limits,)), EIGHT) is Act.BARRED
    assert act(once, EIGHT) is Act.CHANGE


def test_a_verdict_that_was_refuted_counts_from_the_start_again() -> None:
    rounds = [(900.0, EIGHT), (900.0, None), (900.0, EIGHT), (900.0, EIGHT)]
    found = [act for _, act in acts(Policy(), rounds)]
    assert found == [Act.CONFIRM, Act.NONE, Act.CONFIRM, Act.CHANGE]


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
