"""The staleness rule: AReaL's inequality, slots given back, and a resume."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.schedule import StalenessRule


def test_capacity_is_that_of_the_formula_by_hand():
    """(eta + version + 1) B - (accepted + running): (1 + 2 + 1) 4 - (9 + 3) = 4."""
    rule = StalenessRule(groups_per_step=4, max_staleness=1, version=2, running=3, accepted=9)
    assert rule.capacity == 4


def test_synchronous_waits_for_the_next_version():
    rule = StalenessRule(groups_per_step=4).submit(4).accept(4)
    assert rule.capacity == 0
    assert rule.advance().capacity == 4


def test_a_fraction_is_a_share_of_a_step():
    assert StalenessRule(groups_per_step=512, max_staleness=0.1).capacity == 563


def test_running_groups_may_be_bounded_apart_from_staleness():
    rule = StalenessRule(groups_per_step=4, max_staleness=math.inf, max_running=3)
    assert rule.submit(2).capacity == 1
    assert StalenessRule(groups_per_step=4, max_staleness=math.inf).capacity == math.inf


def test_a_dropped_group_gives_its_slot_back():
    rule = StalenessRule(groups_per_step=4).submit(4)
    assert rule.drop().capacity == 1
    assert rule.drop().dropped == 1
    assert rule.accept(4).drop_accepted(2).capacity == 2


def test_capacity_does_not_explode_after_a_resume():
    """Batch 4, eta 1, version 100: 408 if accepted is 0 (AReaL#1388), 8 if it is rebased."""
    lost = StalenessRule(groups_per_step=4, max_staleness=1, version=100)
    assert lost.capacity == 408
    assert lost.rebase(version=100).capacity == 8
    assert lost.rebase(version=100, untrained=3).capacity == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.submit(9), "got 9 groups, need at most the capacity of 8"),
        (lambda r: r.accept(), "got 1, need at most the 0 that run"),
        (lambda r: r.drop_accepted(), "at most the 0 untrained"),
        (lambda r: StalenessRule(groups_per_step=0), "groups_per_step: got 0"),
        (lambda r: StalenessRule(groups_per_step=1, max_staleness=-1), "max_staleness: got -1"),
        (lambda r: StalenessRule(groups_per_step=1, max_staleness=math.nan), "got nan"),
        (lambda r: StalenessRule(groups_per_step=1, max_running=0), "max_running: got 0"),
        (lambda r: StalenessRule(groups_per_step=1, running=-1), "running: got -1"),
    ],
)
def test_wrong_counts_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        change(StalenessRule(groups_per_step=4, max_staleness=1))


@given(
    st.integers(1, 9),
    st.integers(0, 4),
    st.lists(st.sampled_from(["submit", "accept", "drop", "train"]), max_size=60),
)
def test_any_order_of_events_keeps_the_inequality_and_counts_every_group(size, eta, events):
    rule = StalenessRule(groups_per_step=size, max_staleness=eta)
    submitted = 0
    for event in events:
        if event == "submit" and rule.capacity:
            assert rule.capacity >= 1
            rule, submitted = rule.submit(), submitted + 1
            in_order = rule.running + rule.accepted
            assert math.floor((in_order - 1) / size) <= rule.version + eta
        elif event in ("accept", "drop") and rule.running:
            rule = getattr(rule, event)()
        elif event == "train" and rule.accepted >= (rule.version + 1) * size:
            rule = rule.advance()
    assert submitted == rule.running + rule.accepted + rule.dropped
