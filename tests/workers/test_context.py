"""A worker's place in a layout: its data-parallel rank, and who speaks for a copy of the model."""

import pytest

import rlkit as rk


def test_without_a_layout_every_rank_is_a_copy_of_its_own():
    found = [rk.WorkerContext.at(rank, 3, None) for rank in range(3)]
    assert [(c.dp_rank, c.dp_size, c.speaks) for c in found] == [(i, 3, True) for i in range(3)]
    assert found[0].layout == rk.Layout(dp=3)


@pytest.mark.parametrize(
    ("layout", "dp_ranks", "speakers"),
    [
        (rk.Layout(tp=2), [0, 0], [0]),
        (rk.Layout(pp=2), [0, 0], [0]),
        (rk.Layout(tp=2, dp=2), [0, 0, 1, 1], [0, 2]),
        (rk.Layout(pp=2, dp=2), [0, 1, 0, 1], [0, 1]),
        (rk.Layout(tp=2, pp=2, dp=2), [0, 0, 1, 1, 0, 0, 1, 1], [0, 2]),
        (rk.Layout(ep=2), [0, 1], [0, 1]),
        (rk.Layout(tp=2, ep=2, expert_tp=1), [0, 0], [0]),
    ],
)
def test_one_rank_speaks_for_each_copy_of_the_model(layout, dp_ranks, speakers):
    size = layout.num_devices
    found = [rk.WorkerContext.at(rank, size, layout) for rank in range(size)]
    assert [context.dp_rank for context in found] == dp_ranks
    assert {context.dp_size for context in found} == {max(dp_ranks) + 1}
    assert [context.rank for context in found if context.speaks] == speakers


def test_dp_follows_from_the_number_of_workers():
    context = rk.WorkerContext.at(3, 4, rk.Layout(tp=2))
    assert (context.dp_rank, context.dp_size, context.layout.dp) == (1, 2, 2)


def test_a_number_of_workers_that_the_layout_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="got 3 devices, need a multiple of 2"):
        rk.WorkerContext.at(0, 3, rk.Layout(tp=2))


@pytest.mark.parametrize(
    ("worker", "layout", "message"),
    [
        (rk.ActorWorker, rk.Layout(pp=2), "got layout PP2, need pp=1 and ep=1"),
        (rk.ReferenceWorker, rk.Layout(pp=2), "got layout PP2, need pp=1 and ep=1"),
        (rk.RolloutWorker, rk.Layout(tp=2), "got layout TP2, need one that leaves the model whole"),
    ],
)
def test_workers_refuse_a_layout_that_cuts_what_they_do_not(worker, layout, message):
    context = rk.WorkerContext.at(0, 2, layout)
    with pytest.raises(ValueError, match=message):
        worker(rk.models.tiny(), context=context)
