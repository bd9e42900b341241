"""Workers on Ray, a device npu each: Ray's NPU resource and the variable that names a worker's."""

import os

import pytest
import torch
from test_npu_step import grpo_loss

import rlkit as rk
from rlkit import device
from rlkit.algo import group_relative

pytestmark = pytest.mark.ray


class Looker:
    """Says what it sees of the devices."""

    def __init__(self, *, context=None) -> None:
        self.context = context

    def look(self) -> dict:
        import ray

        place = torch.ones(1, device=self.context.device).device
        return {
            "visible": os.environ.get(device.NPU.visible_variable),
            "num": torch.npu.device_count(),
            "resource": ray.get_runtime_context().get_accelerator_ids()["NPU"],
            "place": place,
            "pid": os.getpid(),
        }


@pytest.fixture(scope="module")
def cluster():
    """Five of the six devices that the driver may use; it has used one of them itself."""
    before = device.visible("npu")
    device.restrict("npu", list("134567"))
    torch.ones(2, device="npu")
    with rk.launch(devices="npu", num_devices=5, timeout_s=120) as started:
        yield started
    del os.environ[device.NPU.visible_variable]
    if before is not None:
        device.restrict("npu", before)


@pytest.fixture(scope="module")
def lookers(cluster):
    return cluster.spawn(Looker, n=2)


@pytest.fixture(scope="module")
def seen(lookers):
    return lookers.look()


def test_each_worker_sees_the_one_device_that_ray_gave_it(seen):
    assert [found["num"] for found in seen] == [1, 1]
    assert [found["visible"] for found in seen] == [found["resource"][0] for found in seen]
    assert {found["visible"] for found in seen} < set("134567")
    assert seen[0]["visible"] != seen[1]["visible"]


def test_a_colocated_worker_sees_the_device_of_its_neighbour(cluster, lookers, seen):
    beside = cluster.spawn(Looker, n=2, colocate_with=lookers, name="beside").look()
    assert [found["visible"] for found in beside] == [found["visible"] for found in seen]
    assert not {found["pid"] for found in beside} & {found["pid"] for found in seen}


def test_functions_of_the_user_run_without_a_device(cluster):
    batch = rk.Batch.from_columns({"response": ["a", "b"]})
    without = lambda response: [os.environ[device.NPU.visible_variable] == ""] * len(response)
    column = batch.on(cluster.store).apply(without, "response")
    assert column.load(batch.uids).values.tolist() == [True, True]


def test_more_workers_than_devices_is_an_error_that_counts_them(cluster, lookers):
    with pytest.raises(ValueError, match=r"4 more workers need 4 devices; 3 of 5 are free"):
        cluster.spawn(Looker, n=4, name="too_many")


def test_more_devices_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="need at most"):
        rk.launch(devices="npu", num_devices=9)


def grpo(cluster) -> dict:
    """Two GRPO steps with a rollout worker, two actor ranks and a reference beside them."""
    task, model = rk.tasks.reverse_digits(length=5), rk.models.tiny(pretrained="reverse_digits")
    found = {"tokens": [], "metrics": []}

    def share_right(prompt, response, answer):
        return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)

    rollout = cluster.spawn(rk.RolloutWorker, model)
    n = 2 if cluster.num_devices > 1 else 1
    actor = cluster.spawn(rk.ActorWorker, model, lr=1e-3, n=n)
    reference = cluster.spawn(rk.ReferenceWorker, model, n=n, colocate_with=actor)
    resharder = rk.Resharder(source=actor, target=rollout)
    for prompts in task.batches(size=4, steps=2):
        batch = rollout.generate(prompts, n=5)
        batch["rewards"] = rk.score(share_right, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        batch["ref_logprobs"] = reference.compute_logprobs(batch)
        batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))
        metrics = actor.update(batch, loss_fn=grpo_loss, minibatches=2)
        assert resharder.reshard().verified
        found["tokens"].append(batch["response_ids"])
        found["metrics"].append({k: v for k, v in metrics.items() if not isinstance(v, str)})
    weights = actor.weights()
    found["weights"] = weights if isinstance(weights, list) else [weights]
    return found


@pytest.mark.slow
def test_a_grpo_step_on_three_devices_is_that_of_one_cpu_process(cluster):
    """Tokens, metrics and weights; what comes back to the driver lies in host memory."""
    on_npu = grpo(cluster)
    with rk.launch(backend="local", devices="cpu") as local:
        on_cpu = grpo(local)
    assert all(torch.equal(a, b) for a, b in zip(on_npu["tokens"], on_cpu["tokens"], strict=True))
    for there, here in zip(on_npu["metrics"], on_cpu["metrics"], strict=True):
        assert there == pytest.approx(here, rel=1e-3, abs=1e-3)
    for weights in on_npu["weights"]:
        assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
        for name, expected in on_cpu["weights"][0].items():
            assert torch.allclose(weights[name], expected, atol=1e-3), name
