"""A Ray cluster whose head has no NPU: what needs none runs there, workers run where NPUs are."""

import os

import pytest

import rlkit as rk
from rlkit import device

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def nodes():
    from rlkit.cluster.connect import import_ray

    import_ray()
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 2, "object_store_memory": 200 << 20}
    head = {**args, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    started.add_node(**args, resources={device.NPU.ray_resource: 2})
    yield started
    started.shutdown()


def test_a_driver_on_a_node_without_npus_generates_on_one_that_has_them(nodes):
    model = rk.models.tiny(pretrained="reverse_digits")
    prompts = next(rk.tasks.reverse_digits(length=4).batches(size=3, steps=1))
    with rk.launch(devices="npu", address=nodes.address, timeout_s=120) as cluster:
        assert cluster.num_devices == 2
        rollout = cluster.spawn(rk.RolloutWorker, model, n=2)
        batch = rollout.generate(prompts, n=2)
        batch["rewards"] = rk.score(lambda prompt, response, answer: float(os.getpid()), batch)
        facts = rollout._describe()
        assert len({row["node"] for row in facts}) == 1  # the one with NPUs
        assert len(cluster.store.actors) == 2  # a store of rows on each, NPUs or not
        assert not {float(row["pid"]) for row in facts} & set(batch["rewards"].tolist())
        assert len(batch["response"]) == 6
