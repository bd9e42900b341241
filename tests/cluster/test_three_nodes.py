"""The Ray tests on three raylets: rows in three stores, process groups across nodes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit as rk

pytestmark = pytest.mark.ray

HERE = Path(__file__).resolve().parent
NUM_NODES = int(os.environ.get("RLKIT_TEST_NODES", "1"))
SUITE = [HERE / "test_numbers_agree.py", HERE / "test_edit_and_go_on.py", HERE.parent / "reshard"]
CROSSING = "two_actors or bit_equal_on_two or publishes_on_none"  # what crosses nodes
inside = pytest.mark.skipif(NUM_NODES == 1, reason="runs inside the others")
outside = pytest.mark.skipif(NUM_NODES > 1, reason="this is the run they start")


def passed_on_three(*args):
    """Tests that passed in a run of these files on three raylets."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "ray", "-p", "no:cacheprovider", *args],
        env=os.environ | {"RLKIT_TEST_NODES": "3"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    print(done.stdout.splitlines()[-1])
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@outside
@pytest.mark.slow
def test_what_crosses_nodes_works_on_three():
    expression = f"({CROSSING}) or test_three_nodes"
    assert passed_on_three("-k", expression, *SUITE, __file__) >= 6


@outside
@pytest.mark.slow
def test_the_suite_passes_on_three_nodes():
    assert passed_on_three(*SUITE, __file__) >= 15


@inside
def test_workers_of_a_group_sit_on_all_nodes(ray_cluster):
    group = ray_cluster.spawn(rk.ReferenceWorker, rk.models.tiny(), n=3, name="spread")
    assert len({row["node"] for row in group._describe()}) == 3


@inside
def test_rows_stay_on_the_node_that_made_them(ray_cluster):
    model = rk.models.tiny(pretrained="reverse_digits")
    rollout = ray_cluster.spawn(rk.RolloutWorker, model, n=3, name="spread_rollout")
    prompts = next(rk.tasks.reverse_digits(length=4).batches(size=6, steps=1))
    batch = rollout.generate(prompts, n=2)
    places = {part.place[:8] for part in batch.columns["response_ids"].parts}
    assert places == {row["node"] for row in rollout._describe()}
    assert len(batch["response"]) == 12


@inside
def test_a_process_group_across_nodes_sums(ray_cluster):
    model = rk.models.tiny()
    actor = ray_cluster.spawn(rk.ActorWorker, model, lr=1e-3, n=3, name="spread_actor")
    rollout = ray_cluster.spawn(rk.RolloutWorker, model, name="one_rollout")
    prompts = next(rk.tasks.reverse_digits(length=4).batches(size=6, steps=1))
    batch = rollout.generate(prompts, n=2)
    actor.update(batch, loss_fn=lambda logprobs, b: (b.token_mean(-logprobs), {}))
    first, *others = actor.weights()
    assert all((first[n] == w[n]).all() for w in others for n in first)
