"""CPU milliseconds of a controller's work for 8,192 rows of 4 columns: what it adds to moving them.

    python benchmarks/dock_controller.py

Metadata only, in one process; medians. "one write" has all rows in a notice, "64 writes" as many as
there are workers, each in a notice of its own.
"""

import statistics
import time
from functools import partial

import numpy as np
import torch

from rlkit.dock import samplers
from rlkit.dock.controller import Controller
from rlkit.dock.messages import Facts, Notice, Request
from rlkit.rows import Rows

ROWS, GROUP_SIZE, REPEATS = 8192, 16, 9
COLUMNS = ("prompt_ids", "response_ids", "old_logprobs", "rewards")


def notices(num_writes: int) -> list[Notice]:
    """Writes of all rows, in as many pieces."""
    found = []
    for uids in np.array_split(np.arange(ROWS), num_writes):
        lengths = torch.full((len(uids),), 2048)
        rows = Rows(torch.empty(0).expand(0), torch.zeros(len(uids), dtype=torch.int64))
        facts = Facts.of(rows)
        facts = Facts("ragged", "int64", facts.nbytes, lengths.numpy())
        found.append(
            Notice(
                node=f"node{len(found) % 8}",
                stage="rollout",
                uids=uids * 65_537,
                columns=dict.fromkeys(COLUMNS, facts),
                group_ids=uids // GROUP_SIZE,
            )
        )
    return found


def once(num_writes: int, sampler: object) -> dict[str, float]:
    """Milliseconds of each call on a fresh controller."""
    controller, spent = Controller("train"), {}
    request = Request(columns=COLUMNS, n=ROWS, least=ROWS, holder="actor/0", sampler=sampler)

    def timed(name: str, call: object, *args: object, **options: object) -> object:
        start = time.process_time()
        value = call(*args, **options)
        spent[name] = spent.get(name, 0.0) + 1e3 * (time.process_time() - start)
        return value

    for notice in notices(num_writes):
        timed("notice", controller.notice, notice)
    grant = timed("get", controller.get, request, timeout_s=0)
    timed("places by node", grant.places.by_node)
    uids, _ = timed("ack", controller.ack, grant.token, "actor/0")
    timed("forget", controller.forget, uids)
    return spent


def main() -> None:
    """Print a table, a row a sampler and number of writes."""
    chosen = {
        "in_order": samplers.in_order,
        "whole_groups": partial(samplers.whole_groups, group_size=GROUP_SIZE),
        "token_balanced": partial(samplers.token_balanced, group_size=GROUP_SIZE),
    }
    names = ("notice", "get", "places by node", "ack", "forget")
    print(f"CPU ms for {ROWS} rows x {len(COLUMNS)} columns (measured)")
    print(f"{'sampler':16}{'writes':>8}" + "".join(f"{name:>16}" for name in names))
    for name, sampler in chosen.items():
        for num_writes in (1, 64):
            runs = [once(num_writes, sampler) for _ in range(REPEATS)]
            medians = [statistics.median(run[what] for run in runs) for what in names]
            print(f"{name:16}{num_writes:>8}" + "".join(f"{ms:16.2f}" for ms in medians))


if __name__ == "__main__":
    main()
