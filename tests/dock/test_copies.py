"""faults.md E10: packing must not copy what zero-copy saved."""

import subprocess
import sys

PEAK = """
import resource, torch
from rlkit.dock import TransferDock

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

dock = TransferDock()
for i in range(2):  # the first, a small one, loads code
    rows = 1024 if i else 8
    payload = torch.zeros(rows, 32_768, dtype=torch.int64) + 1
    before = peak()
    dock.put({"response_ids": payload}, range(i * 10_000, i * 10_000 + rows))
    values = dock.get("train", ["response_ids"], rows).batch.columns["response_ids"].load()
    assert values.nbytes == payload.nbytes
print((peak() - before) / payload.nbytes)
"""


def test_putting_and_getting_256_mib_takes_little_more_than_one_copy():
    ran = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 1.2
