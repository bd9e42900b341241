"""Resharder over process groups of several ranks, which are threads here."""

import signal
from types import SimpleNamespace

import pytest
import torch
from thread_groups import ThreadGroup

import rlkit as rk
from rlkit.reshard import Held, allgather_swap, direct, megatron, naive, separate, shard, vllm

SPEC = rk.ModelSpec(
    vocab_size=50, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, max_positions=64,
)  # fmt: skip


def cut_actor(layout, form):
    """An actor that says its group holds the model so, and hands out its rank's part."""

    class CutActor(rk.ActorWorker):
        def held(self):
            return Held(model=self.spec, layout=layout, form=form, dtype="float32")

        def shard(self):
            return shard(self.spec, layout, form, self.weights())[self.context.dp_rank]

    return CutActor


def groups(layout=None, form=separate, *, targets=1, rollout=rk.RolloutWorker, timeout_s=20):
    """Actors in a layout, or one that is whole, and engines with other weights."""
    actor = rk.ActorWorker if layout is None else cut_actor(layout, form)
    num = 1 if layout is None else layout.num_devices
    return (
        ThreadGroup(actor, rk.models.tiny(spec=SPEC, seed=1), n=num, timeout_s=timeout_s),
        ThreadGroup(rollout, rk.models.tiny(spec=SPEC, seed=2), n=targets, timeout_s=timeout_s),
    )


def weights(group):
    return [worker.weights() for worker in group.workers]


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", [direct, naive])
@pytest.mark.parametrize(
    ("layout", "form", "targets"),
    [
        (None, separate, 1),
        (rk.Layout(dp=2), separate, 2),
        (rk.Layout(tp=2), separate, 1),
        (rk.Layout(tp=2), megatron, 2),
        (rk.Layout(tp=1, pp=2), megatron, 1),
        (rk.Layout(tp=2, pp=1, dp=1), vllm, 1),
    ],
)
def test_engines_get_the_whole_model_from_ranks_that_cut_it(layout, form, targets, strategy):
    source, target = groups(layout, form, targets=targets)
    resharder = rk.Resharder(source=source, target=target, strategy=strategy)
    before = target.workers[0].held().model
    for version in (3, 4):  # over the same link
        for worker in source.workers:
            worker._version = version
            with torch.no_grad():
                next(iter(worker.weights().values())).add_(1)
        report = resharder.reshard()
        assert (report.version, report.verified) == (version, True)
        assert report.bytes == resharder.plan().nbytes >= targets * 4 * SPEC.num_parameters
        for found in weights(target):
            assert equal(source.workers[0].weights(), found)
    assert [worker.version for worker in target.workers] == [4] * targets
    assert before == SPEC


def test_all_ranks_that_hold_the_same_send_alike():
    source, target = groups(rk.Layout(dp=2), targets=2)
    moves = rk.Resharder(source=source, target=target).plan().moves
    sent = [int(moves.nbytes[moves.source == rank].sum()) for rank in (0, 1)]
    assert sent[0] == sent[1] == 4 * SPEC.num_parameters


class Stubborn(rk.RolloutWorker):
    """Fails on its second rank when all has arrived."""

    def stage_weights(self, tensors, report):
        if self.context.dp_rank == 1:
            raise MemoryError("no room")
        return super().stage_weights(tensors, report)


def test_an_error_on_one_engine_keeps_the_old_version_on_all():
    source, target = groups(rk.Layout(tp=2), targets=2, rollout=Stubborn)
    before = [{k: t.clone() for k, t in each.items()} for each in weights(target)]
    for worker in source.workers:
        worker._version = 7
    with pytest.raises(MemoryError, match="no room"):
        rk.Resharder(source=source, target=target).reshard()
    assert [worker.version for worker in target.workers] == [0, 0]
    assert all(equal(*pair) for pair in zip(before, weights(target), strict=True))
    assert all(worker.staged is None for worker in target.workers)


def test_a_rank_that_never_sends_is_named_and_the_next_call_connects_anew():
    source, target = groups(rk.Layout(tp=2), timeout_s=2)
    resharder = rk.Resharder(source=source, target=target)
    silent = source.workers[1]
    silent.send_weights = lambda *, version, link: None
    with pytest.raises(RuntimeError, match=r"waited in vain for bucket 0 from rank 1"):
        resharder.reshard()
    assert target.workers[0].version == 0
    del silent.send_weights
    assert resharder.reshard().verified
    assert equal(source.workers[0].weights(), target.workers[0].weights())


def test_an_interrupt_stops_what_was_started_and_the_next_reshard_connects_anew(monkeypatch):
    source, target = groups(rk.Layout(tp=2))
    resharder, stopped = rk.Resharder(source=source, target=target), []
    resharder.reshard()

    def start(self, name, args, kwargs):
        signal.raise_signal(signal.SIGINT)  # while the call is on its way
        return SimpleNamespace(result=lambda: None, cancel=lambda: stopped.append(name))

    with monkeypatch.context() as patch:
        patch.setattr(ThreadGroup, "start", start)
        patch.setattr(ThreadGroup, "version", 1)
        with pytest.raises(KeyboardInterrupt):
            resharder.reshard()
    assert stopped == ["receive_weights"]
    assert resharder.reshard().verified


def test_a_swap_between_groups_on_other_devices_says_why_not():
    source, target = groups(rk.Layout(tp=2))
    resharder = rk.Resharder(source=source, target=target, strategy=allgather_swap)
    with pytest.raises(ValueError, match=r"disjoint devices.*colocate the workers"):
        resharder.reshard()


def test_groups_that_share_devices_swap():
    source, target = groups(rk.Layout(tp=2), megatron, targets=2)
    target.beside = source
    resharder = rk.Resharder(source=source, target=target, strategy=allgather_swap)
    assert resharder.reshard().verified
    assert resharder.plan().swaps
    assert [worker.memory()["weights"] for worker in source.workers] == [0, 0]
    assert all(equal(source.workers[0].weights(), found) for found in weights(target))
