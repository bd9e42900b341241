from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rlkit.dock import samplers
from rlkit.dock.samplers import Ready

SAMPLERS = [
    samplers.in_order,
    samplers.token_balanced,
    samplers.oldest_version,
    partial(samplers.seeded_random, seed=3),
    partial(samplers.staleness_bounded, version=4, max_staleness=4),
]


def ready(group_ids, *, versions=None, tokens=None, uids=None):
    """Metadata of rows that arrived in this order."""
    n = len(group_ids)
    arrays = (uids or range(n), group_ids, versions or [0] * n, tokens or [1] * n)
    return Ready(*(np.asarray(a, dtype=np.int64) for a in arrays), lengths={})


def test_rows_that_straddle_two_groups_are_no_group():
    # Ascend/TransferQueue's sampler returns [1, 2, 3] of rows whose prompts are 0, 0, 1
    rows = ready([0, 0, 1], uids=[1, 2, 3])
    assert samplers.whole_groups(rows, 3, group_size=3).tolist() == []
    rows = ready([0, 1, 1, 1], uids=[2, 3, 4, 5])
    assert rows.uids[samplers.whole_groups(rows, 3, group_size=3)].tolist() == [3, 4, 5]


def test_the_group_that_is_whole_first_comes_first():
    rows = ready([7, 8, 8, 7])
    assert samplers.whole_groups(rows, 2, group_size=2).tolist() == [1, 2]


def test_groups_beyond_n_are_left():
    assert samplers.whole_groups(ready([0, 0, 1, 1]), 3, group_size=2).tolist() == [0, 1]


def test_a_group_larger_than_said_is_an_error():
    with pytest.raises(ValueError, match="3 rows of group 5 are ready"):
        samplers.whole_groups(ready([5, 5, 5]), 2, group_size=2)


def test_oldest_version_comes_first_and_a_group_is_as_old_as_its_oldest_row():
    rows = ready([0, 0, 1, 1], versions=[2, 2, 3, 1])
    assert samplers.oldest_version(rows, 2, group_size=2).tolist() == [2, 3]
    assert samplers.oldest_version(rows, 2).tolist() == [3, 0]


def test_stale_groups_are_left_out():
    rows = ready([0, 0, 1, 1], versions=[5, 3, 5, 4])
    sampler = partial(samplers.staleness_bounded, version=5, max_staleness=1)
    assert sampler(rows, 4, group_size=2).tolist() == [2, 3]
    assert sampler(rows, 4).tolist() == [3, 0, 2]


def test_staleness_of_zero_takes_only_the_present_version():
    rows = ready([0, 1], versions=[4, 5])
    assert samplers.staleness_bounded(rows, 2, version=5, max_staleness=0).tolist() == [1]


def test_balanced_hands_have_about_equal_tokens():
    tokens = np.random.default_rng(0).lognormal(5, 1, 64).astype(int).tolist()
    left, sums = list(range(64)), []
    while left:
        rows = ready(left, tokens=[tokens[i] for i in left])
        taken = samplers.token_balanced(rows, 16)
        sums.append(sum(tokens[left[i]] for i in taken))
        left = [left[i] for i in range(len(left)) if i not in set(taken.tolist())]
    in_order = [sum(tokens[i : i + 16]) for i in range(0, 64, 16)]
    assert len(sums) == 4
    assert max(sums) - min(sums) < 0.3 * (max(in_order) - min(in_order))


def test_random_order_depends_on_seed_and_uids_and_not_on_arrival():
    def order(uids, seed):
        rows = ready(uids, uids=uids)
        return rows.uids[samplers.seeded_random(rows, len(uids), seed=seed)].tolist()

    uids = list(range(20))
    assert order(uids, 1) == order(uids[::-1], 1)
    assert order(uids, 1) != order(uids, 2)
    assert order(uids, 1) != uids


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@given(groups=st.lists(st.integers(0, 5), max_size=30), n=st.integers(1, 12), data=st.data())
def test_any_sampler_takes_whole_groups_each_row_once(sampler, groups, n, data):
    size = data.draw(st.integers(1, 3))
    taken_of = dict.fromkeys(groups, 0)
    groups = [g for g in groups if (taken_of.update({g: taken_of[g] + 1}) or taken_of[g]) <= size]
    if size == 1:
        groups = list(range(len(groups)))
    tokens = data.draw(st.lists(st.integers(0, 99), min_size=len(groups), max_size=len(groups)))
    taken = sampler(ready(groups, tokens=tokens), n, group_size=size)
    whole = sum(groups.count(g) == size for g in set(groups))
    assert len(taken) == len(set(taken.tolist())) == size * min(n // size, whole)
    counts = {groups[i]: 0 for i in taken}
    for i in taken:
        counts[groups[i]] += 1
    assert set(counts.values()) <= {size}
