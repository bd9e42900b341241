"""Waits for peers that interrupts reach, but not at the moment when the peers arrive."""

import signal
import time
from types import SimpleNamespace

import pytest

from rlkit import waits
from rlkit.backends.ranks import meeting


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
