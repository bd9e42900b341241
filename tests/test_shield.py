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
