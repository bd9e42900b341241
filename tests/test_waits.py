"""Waits for peers that interrupts reach, but not at the moment when the peers arrive."""

import signal
import time
from types import SimpleNamespace

import pytest
import torch

from rlkit import waits
from rlkit.backends.ranks import close_world, meeting, open_world
from rlkit.checks import PeerError
from rlkit.config import Layout


@pytest.fixture(autouse=True)
def world():
    open_world(Layout(), None, torch.device("cpu"))
    yield
    close_world()


def peers_that_come_after(seconds):
    """A collective whose barrier this rank enters and is interrupted in, before the others come."""
    end_s = time.monotonic() + seconds
    work = SimpleNamespace(is_completed=lambda: time.monotonic() > end_s, wait=lambda: None)

    def barrier():
        signal.raise_signal(signal.SIGINT)
        waits.finish(work)

    return SimpleNamespace(barrier=barrier)


def meet(peers, done):
    with meeting(peers):
        done.append("what all ranks do together")


def test_a_rank_that_is_interrupted_while_its_peers_arrive_goes_in_with_them():
    done = []
    with pytest.raises(KeyboardInterrupt):
        meet(peers_that_come_after(0.05), done)
    assert done == ["what all ranks do together"]


def test_a_rank_that_is_interrupted_waits_no_longer_for_peers_that_do_not_come(monkeypatch):
    monkeypatch.setattr(waits, "GRACE_S", 0.05)
    done, start_s = [], time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        meet(peers_that_come_after(60), done)
    assert done == []
    assert time.monotonic() - start_s < 30


def alone_or_all(come):
    """A collective on whose other ranks the same error comes, or not."""
    return SimpleNamespace(barrier=lambda: None, all_come=lambda within_s: come)


def fails(error, *, all_come=False):
    """A call that all ranks make together and this one leaves."""
    with meeting(alone_or_all(all_come)):
        raise error


def test_a_rank_that_fails_alone_inside_says_to_respawn_now_and_in_later_calls():
    with pytest.raises(MemoryError, match="no room") as caught:
        fails(MemoryError("no room"))
    assert "cluster.respawn(group)" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"whose ranks lost each other.*cluster.respawn"):
        meet(None, [])


def test_a_rank_whose_peer_fails_inside_says_to_respawn():
    with pytest.raises(PeerError, match=r"a rank failed or died meanwhile.*cluster.respawn"):
        fails(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))


def test_an_error_that_all_ranks_have_leaves_them_together():
    told = ArithmeticError("by design")
    told.__rlkit_told__ = True
    with pytest.raises(ArithmeticError):
        fails(told)
    with pytest.raises(MemoryError):
        fails(MemoryError("no room"), all_come=True)
    done = []
    with meeting(None):
        done.append("what all ranks do together")
    assert done
