"""Processes of a test of cut models, and how what they found compares with one process."""

import pickle
import time
import traceback
from queue import Empty

import pytest
import torch
from torch import multiprocessing

LIMIT_S = 600


def run_on_ranks(main, ranks: int) -> dict[int, dict]:
    """``main(rank, store)`` in as many processes: by rank what it returned."""
    spawn = multiprocessing.get_context("spawn")
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    queue = spawn.Queue()
    processes = [
        spawn.Process(target=_rank, args=(main, rank, store.port, queue)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results, end = {}, time.monotonic() + LIMIT_S
    try:
        while len(results) < len(processes):
            try:
                rank, result = queue.get(timeout=2)
            except Empty:
                gone = [p for rank, p in enumerate(processes) if rank not in results and p.exitcode]
                assert not gone, f"processes died: {gone}"
                assert time.monotonic() < end, f"no result of {ranks} ranks in {LIMIT_S} s"
                continue
            assert isinstance(result, bytes), result
            results[rank] = pickle.loads(result)
    finally:
        for process in processes:
            process.join(timeout=20 if len(results) == len(processes) else 0)
            process.kill()
    return results


def _rank(main, rank: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
        found = main(rank, store)
        queue.put((rank, pickle.dumps(found)))  # bytes: shared tensors would go with this process
    except BaseException:
        queue.put((rank, traceback.format_exc()))
        raise


def check(ranks: list[dict], one: dict) -> None:
    """Ranks that speak have all rows between them, and add up to one process's numbers."""
    speaking = [rank for rank in ranks if rank["speaks"]]
    rows = {uid: place for place, uid in enumerate(one["uids"])}
    lengths = one["lengths"]
    pieces = [one[name].split(lengths) for name in ("logprobs", "entropies")]
    assert sorted(uid for rank in speaking for uid in rank["uids"]) == sorted(rows)
    for rank in ranks:
        for name, expected in zip(("logprobs", "entropies"), pieces, strict=True):
            mine = torch.cat([expected[rows[uid]] for uid in rank["uids"]])
            torch.testing.assert_close(rank[name], mine, atol=1e-5, rtol=1e-4)
    for step, expected in enumerate(one["steps"]):
        for name, value in expected.items():
            got = [rank["steps"][step][name] for rank in speaking]
            if name in ("loss", "toy/entropy"):
                got = [sum(got)]
            assert got == pytest.approx([value] * len(got), rel=2e-5, abs=1e-5), (step, name)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], weight, atol=1e-4, rtol=1e-4)


def check_checkpoint(ranks: list[dict], one) -> None:
    """What ranks saved goes on to the bit there, and is what the backend of one process has."""
    assert all(rank["same"] for rank in ranks)
    weights, moments, steps = ranks[0]["saved"]
    assert moments.keys() == one.optimizer_state().keys()
    for name, value in one.optimizer_state().items():
        torch.testing.assert_close(moments[name], value, atol=1e-5, rtol=1e-4)
    one.load_state_dict(weights)
    one.load_optimizer_state(moments, num_steps=steps)


def by_rank(found: dict, case: str) -> list:
    return [found[rank][case] for rank in sorted(found) if found[rank][case] is not None]
