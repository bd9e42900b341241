"""The transfer dock against copying, Ray's object store and TransferQueue: seconds, memory, ratios.

    python benchmarks/dock.py --mib 64 --repeats 9

Measured on one Ray node. A worker process puts 4 int64 columns of 2,048 tokens a row and gets them
back; the kinds take turns. Peak memory is that of another pair of processes, one that puts and one
that gets. TransferQueue (``pip install TransferQueue``) is left out where it is not installed.
"""

import argparse
import importlib.util
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

import rlkit as rk
from rlkit.dock import samplers
from rlkit.dock.controller import Controller
from rlkit.dock.messages import Facts, Notice, Request

COLUMNS = ("prompt_ids", "response_ids", "token_version", "tool_ids")
TOKENS, MEMCPYS, MS, MANY = 2048, 4, 1e3, 5
ROWS, GROUP_SIZE = 8192, 16  # of the controllers' work
HAS_TQ = importlib.util.find_spec("transfer_queue") is not None


class Mover:
    """Puts and gets in a process of its own; every method returns seconds, (put, get)."""

    def __init__(self, dock: rk.TransferDock, mib: int) -> None:
        self.dock, self.calls = dock, 0
        rows = mib * 2**20 // (8 * TOKENS * len(COLUMNS))
        self.columns = {name: torch.ones(rows, TOKENS, dtype=torch.int64) for name in COLUMNS}
        self.rows = rows

    def memcpy(self) -> tuple[float, float]:
        """``torch.clone`` of every column."""
        start = time.perf_counter()
        copies = {name: values.clone() for name, values in self.columns.items()}
        spent = time.perf_counter() - start
        assert len(copies) == len(COLUMNS)
        return spent, 0.0

    def ray_put_get(self) -> tuple[float, float]:
        """Ray's object store, of a dict of tensors."""
        import ray

        return timed(lambda: ray.put(self.columns), ray.get)

    def transfer_dock(self) -> tuple[float, float]:
        """A put, and a get of a stage."""
        self.calls += 1
        uids = self.calls * 100_000 + np.arange(self.rows)
        leases: list[Any] = []
        found = timed(
            lambda: self.dock.put(self.columns, uids), lambda _: leases.extend(self.take())
        )
        self.dock.ack(leases[0])
        self.dock.clear(uids)
        return found

    def give(self, first_uid: int) -> None:
        """Put all rows."""
        self.dock.put(self.columns, first_uid + np.arange(self.rows))

    def take(self) -> tuple[Any, Any]:
        """Lease and read all rows; returns the lease and the rows."""
        lease = self.dock.get("train", COLUMNS, self.rows)
        return lease, [lease.batch.columns[name].load() for name in COLUMNS]

    def take_and_ack(self) -> None:
        """Lease and read all rows, and be done with them."""
        lease, rows = self.take()
        assert sum(len(each) for each in rows) == len(COLUMNS) * self.rows
        self.dock.ack(lease)

    def transfer_queue(self) -> tuple[float, float]:
        """TransferQueue with its simple storage of two units."""
        import transfer_queue
        from tensordict import TensorDict

        transfer_queue.init()
        self.calls += 1
        client, part = transfer_queue.get_client(), f"part{self.calls}"
        data = TensorDict(self.columns, batch_size=self.rows)

        def get(_: object) -> object:
            meta = client.get_meta(list(COLUMNS), self.rows, part, task_name="train")
            return client.get_data(meta)

        found = timed(lambda: client.put(data, partition_id=part), get)
        client.clear_partition(part)
        return found


def timed(put: Callable[[], object], get: Callable[[object], object]) -> tuple[float, float]:
    """Seconds of a put and of a get of what it returned."""
    start = time.perf_counter()
    key = put()
    middle = time.perf_counter()
    get(key)
    return middle - start, time.perf_counter() - middle


def proportional_bytes() -> int:
    """Memory of this process and all below it, what is shared counted once (PSS)."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total


def peak_memory(cluster: Any, mib: int) -> float:
    """Memory above the payload at its highest while one process puts and another gets, in payloads.

    A first round of 2 MiB loads code.
    """
    dock = cluster.dock()
    for size in (2, mib):
        pair = [cluster.spawn(Mover, dock, size, name=f"{n}_{size}") for n in ("giver", "taker")]
        pair[0].memcpy(), pair[1].memcpy()
        before, peak, done = proportional_bytes(), [0], threading.Event()

        def watch(peak: list[int] = peak, done: threading.Event = done) -> None:
            while not done.is_set():
                peak[0] = max(peak[0], proportional_bytes())

        thread = threading.Thread(target=watch)
        thread.start()
        pair[0].give(size * 100_000)
        pair[1].take_and_ack()
        done.set()
        thread.join()
        extra = (peak[0] - before) / (size * 2**20)
    dock.transport.close()
    return extra


def write(num_writes: int, *, first_row: int) -> list[Notice]:
    """Notices of writes of all rows, in as many pieces."""
    found = []
    for uids in np.array_split(first_row + np.arange(ROWS), num_writes):
        lengths = np.full(len(uids), TOKENS)
        facts = Facts("ragged", "int64", 8 * lengths, lengths)
        columns = dict.fromkeys(COLUMNS, facts)
        node = f"node{len(found) % 8}"
        found.append(
            Notice(
                node=node, stage="rollout", uids=uids * 65_537, columns=columns,
                group_ids=uids // GROUP_SIZE,
            )
        )  # fmt: skip
    return found


def controller_ms(num_writes: int, sampler: Callable) -> dict[str, float]:
    """CPU milliseconds of each call for all rows, on a controller that had a batch before."""
    controller, spent = Controller("train"), {}
    request = Request(columns=COLUMNS, n=ROWS, least=ROWS, holder="actor/0", sampler=sampler)

    def work(name: str, call: Callable, *args: object, **options: object) -> object:
        start = time.process_time()
        value = call(*args, **options)
        spent[name] = spent.get(name, 0.0) + MS * (time.process_time() - start)
        return value

    for batch in range(2):
        spent.clear()
        notices = write(num_writes, first_row=batch * ROWS)
        work("notice", lambda told: [controller.notice(each) for each in told], notices)
        grant = work("get", controller.get, request, timeout_s=0)
        work("places by node", grant.places.by_node)
        uids, _ = work("ack", controller.ack, grant.token, "actor/0")
        work("forget", controller.forget, uids)
    return spent | {"in all": sum(spent.values())}


def print_controller(repeats: int) -> None:
    """A table, a row a sampler and number of writes; medians."""
    chosen = {"in_order": samplers.in_order}
    for sampler in (samplers.whole_groups, samplers.token_balanced):
        chosen[sampler.__name__] = partial(sampler, group_size=GROUP_SIZE)
    names = ("notice", "get", "places by node", "ack", "forget", "in all")
    print(f"controller: CPU ms for {ROWS} rows x {len(COLUMNS)} columns, metadata only (goal: 1)")
    print(f"{'sampler':16}{'writes':>8}" + "".join(f"{name:>16}" for name in names))
    for name, sampler in chosen.items():
        for num_writes in (1, 64):
            runs = [controller_ms(num_writes, sampler) for _ in range(MANY * repeats)]
            medians = [statistics.median(run[what] for run in runs) for what in names]
            print(f"{name:16}{num_writes:>8}" + "".join(f"{ms:16.2f}" for ms in medians))


def print_transfers(cluster: Any, mib: int, repeats: int) -> None:
    """A row a way of moving, and the ratios."""
    dock = cluster.dock()
    mover = cluster.spawn(Mover, dock, mib)
    kinds = ["memcpy", "ray_put_get", "transfer_dock"]
    if HAS_TQ:
        import transfer_queue

        transfer_queue.init()
        kinds.append("transfer_queue")
    else:
        print("TransferQueue is not installed: left out")
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for turn in range(repeats + 2):  # the first two warm up: connections, pages of memory
        for kind in kinds:
            seconds = getattr(mover, kind)()
            found[kind] += [seconds] if turn >= 2 else []
    print(f"{mib} MiB, medians of {repeats}{'':8}put ms    get ms  put + get ms    GB/s")
    total = {}
    for kind, runs in found.items():
        put, get = (statistics.median(run[i] for run in runs) for i in (0, 1))
        total[kind] = statistics.median(sum(run) for run in runs)
        rate = mib * 2**20 / total[kind] / 1e9
        print(f"{kind:24}{put * MS:12.1f}{get * MS:10.1f}{total[kind] * MS:14.1f}{rate:8.2f}")
    one = total["transfer_dock"]
    print(f"dock / memcpy: {one / total['memcpy']:.2f} (goal: at most {MEMCPYS})")
    print(f"ray.put + ray.get / dock: {total['ray_put_get'] / one:.2f}")
    if HAS_TQ:
        print(f"TransferQueue / dock: {total['transfer_queue'] / one:.2f} (goal: at least 5)")
        transfer_queue.close()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="MiB of the payload")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print_controller(args.repeats)
    with rk.launch(devices="cpu", seed=0) as cluster:
        extra = peak_memory(cluster, 4 * args.mib)
        print(f"peak memory above a payload of {4 * args.mib} MiB: {extra:.2f} of it (goal: 1.2)")
        print_transfers(cluster, args.mib, args.repeats)


if __name__ == "__main__":
    main()
