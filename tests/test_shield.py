"""Interrupts that come at a bad moment are neither lost nor early."""

import signal
import time

import pytest

from rlkit.shield import shield, when_collected


class Owner:
    pass


def test_an_interrupt_inside_is_raised_at_the_end():
    done = []

    def step():
        with shield:
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == ["whole"]


def test_an_interrupt_inside_a_finalizer_is_raised_soon_after_it():
    done = []

    def free():
        signal.raise_signal(signal.SIGINT)
        done.append("whole")

    def collect():
        when_collected(Owner(), free)
        time.sleep(20)  # until the interrupt

    with pytest.raises(KeyboardInterrupt):
        collect()
    assert done == ["whole"]


def test_a_finalizer_may_run_while_the_shield_is_entered():
    owner = Owner()
    when_collected(owner, lambda: None)
    with shield._lock:
        del owner


class LockWithAFinalizer:
    """The shield's lock; when it is released by the thread that leaves, an owner is collected."""

    def __init__(self, lock):
        self.lock, self.collects = lock, False

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *exc):
        self.lock.release()
        if self.collects:
            self.collects = False
            when_collected(Owner(), lambda: None)


def test_a_finalizer_that_runs_while_the_shield_is_left_takes_no_interrupt_away(monkeypatch):
    before, lock = signal.getsignal(signal.SIGINT), LockWithAFinalizer(shield._lock)
    monkeypatch.setattr(shield, "_lock", lock)
    with shield:
        lock.collects = True
    assert signal.getsignal(signal.SIGINT) is before
