"""Collectives of device npu, over two processes: rlkit's groups, and torch's own calls."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlkit import device
from rlkit.workers.context import Collective

SIZE = 2


def of_rank(rank: int, length: int = 3) -> torch.Tensor:
    return torch.arange(float(length), device="npu") + 10 * rank


def in_a_group(rank: int, store: dist.Store) -> dict:
    """What rlkit's process group makes of tensors on the device and in host memory."""
    group = device.process_group("npu", store=store, rank=rank, size=SIZE, timeout_s=120)
    peers, found = Collective(group, rank=rank, size=SIZE, name="peers"), {}
    for name, make in (("device", of_rank), ("host", lambda rank: of_rank(rank).cpu())):
        summed, sent = make(rank), make(rank)
        peers.sum_(summed)
        peers.broadcast_(sent, root=1)
        found |= {f"sum on {name}": summed, f"broadcast on {name}": sent}
    peers.barrier()
    gathered = [[torch.zeros(3, device="npu") for _ in range(SIZE)]]
    group.allgather(gathered, [of_rank(rank)]).wait()
    found["all_gather"] = gathered[0]
    message = of_rank(5) if rank == 0 else torch.zeros(3, device="npu")
    (group.send if rank == 0 else group.recv)([message], 1 - rank, 0).wait()
    found["message"] = message
    return found


def by_torch(rank: int, store: dist.Store) -> dict:
    """What torch.distributed's functions make of them."""
    dist.init_process_group("cpu:gloo,npu:hccl", store=store, rank=rank, world_size=SIZE)
    single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # since torch 2.13
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    found = {name: torch.zeros(n, device="npu") for name, n in (("gathered", 6), ("scattered", 3))}
    single(found["gathered"], of_rank(rank))
    scatter(found["scattered"], of_rank(rank, 6))
    found["all_reduce"], found["exchanged"] = of_rank(rank), torch.zeros(2, device="npu")
    dist.all_reduce(found["all_reduce"], op=dist.ReduceOp.MAX)
    dist.all_to_all_single(found["exchanged"], of_rank(rank, 2))
    found["objects"] = [None] * SIZE
    dist.all_gather_object(found["objects"], rank)
    dist.barrier()
    dist.destroy_process_group()
    return found


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    store = dist.FileStore(f"{folder}/store", SIZE)
    found = in_a_group(rank, dist.PrefixStore("group", store))
    found |= by_torch(rank, dist.PrefixStore("torch", store))
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found: tensors on its own device, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run, (str(folder),), SIZE)
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


@pytest.mark.parametrize("where", ["device", "host"])
def test_sums_and_broadcasts_reach_all_ranks(where, ranks):
    for found in ranks:
        assert found[f"sum on {where}"].tolist() == [10, 12, 14]
        assert found[f"broadcast on {where}"].tolist() == [10, 11, 12]


def test_results_lie_on_the_device_of_the_rank(ranks):
    for rank, found in enumerate(ranks):
        assert found["sum on device"].device == torch.device("npu", rank)
        assert found["sum on host"].device == torch.device("cpu")


def test_all_gather_has_the_ranks_in_order(ranks):
    for found in ranks:
        assert [x.tolist() for x in found["all_gather"]] == [[0, 1, 2], [10, 11, 12]]
        assert found["gathered"].tolist() == [0, 1, 2, 10, 11, 12]


def test_what_one_rank_sends_the_other_receives(ranks):
    assert ranks[1]["message"].tolist() == [50, 51, 52]


def test_reduce_scatter_leaves_each_rank_its_part(ranks):
    assert [found["scattered"].tolist() for found in ranks] == [[10, 12, 14], [16, 18, 20]]


def test_torch_distributed_reduces_and_exchanges(ranks):
    assert [found["all_reduce"].tolist() for found in ranks] == [[10, 11, 12]] * 2
    assert [found["exchanged"].tolist() for found in ranks] == [[0, 10], [1, 11]]
    assert [found["objects"] for found in ranks] == [[0, 1]] * 2


def test_hccl_refuses_a_tensor_in_host_memory(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    backend, _ = device._collective(device.NPU, store, 0, 1, timedelta(seconds=30))
    assert backend.name() == "hccl"
    with pytest.raises(RuntimeError, match="need one on npu"):
        backend.allreduce([torch.ones(2)])
