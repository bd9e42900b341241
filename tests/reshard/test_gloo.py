"""Plans carried out over the process groups of four processes."""

import gloo_ranks
import pytest
import torch
from torch import multiprocessing


@pytest.fixture(scope="module")
def found() -> dict[int, tuple]:
    """By rank: what gloo_ranks' three pieces of work return."""
    spawn = multiprocessing.get_context("spawn")
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    queue = spawn.Queue()
    processes = [
        spawn.Process(target=gloo_ranks.main, args=(rank, store.port, queue))
        for rank in range(gloo_ranks.RANKS)
    ]
    for process in processes:
        process.start()
    try:
        results = dict(queue.get(timeout=240) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=20)
            process.kill()
    assert all(isinstance(each, tuple) for each in results.values()), results
    return results


@pytest.mark.parametrize("case", gloo_ranks.CASES)
def test_weights_arrive_bit_by_bit_and_training_shards_come_back(found, case):
    assert [found[rank][0][case] for rank in range(4)] == [(True, True, True, 3)] * 4


def test_a_changed_element_is_found_and_no_rank_publishes(found):
    (by_sum, by_element), version, later = found[0][1]
    assert "1 pieces differ from what was sent, first ['model." in by_sum
    assert "weight[" in by_element
    assert "version 0 stays" in by_sum
    assert (version, later) == (0, 8)
    for rank in (1, 2, 3):
        errors, version, later = found[rank][1]
        assert ["pieces differ on other ranks" in error for error in errors] == [True] * 2
        assert (version, later) == (0, 8)


def test_a_rank_that_sends_nothing_is_named_and_the_version_stays(found):
    message, version = found[0][2]
    assert "waited in vain for bucket" in message
    assert "rank 1" in message
    assert version == 0
