"""One trace of all processes: stages, store operations, weight moves and waits of a real step."""

import json

import pytest

import rlkit as rk
from rlkit import trace

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def recorded(ray_cluster):
    """The trace of two steps, two actors."""
    task = rk.tasks.reverse_digits(length=6, seed=0)
    model = rk.models.tiny(pretrained="reverse_digits")
    actor = ray_cluster.spawn(rk.ActorWorker, model, n=2, name="traced_actor")
    rollout = ray_cluster.spawn(rk.RolloutWorker, model, name="traced_rollout")
    resharder = rk.Resharder(source=actor, target=rollout)
    with trace.use(trace.Trace()) as recorded:
        for prompts in task.batches(size=8, steps=2):
            batch = rollout.generate(prompts, n=4)
            batch["rewards"] = rk.score(task.verify, batch)
            advantages = rk.algo.group_relative(batch["rewards"], batch["group_ids"])
            batch["advantages"] = batch.expand(advantages)
            batch["old_logprobs"] = actor.compute_logprobs(batch)
            actor.update(batch, loss_fn=lambda logprobs, b: (b.token_mean(-logprobs), {}))
            resharder.reshard()
    return recorded


@pytest.fixture(scope="module")
def frame(recorded):
    return recorded.frame()


def test_every_kind_of_span_is_there_with_its_worker(frame):
    found = set(zip(frame.worker, frame.stage, strict=True))
    assert {
        ("traced_rollout/0", "generate"),
        ("traced_rollout/0", "store/put"),
        ("traced_actor/0", "store/fetch"),
        ("traced_actor/1", "update"),
        ("traced_actor/1", "wait/sum"),
        ("driver", "wait/update"),
        ("driver", "store/fetch"),
        ("driver", "reshard"),
        ("traced_actor/0", "reshard/transfer"),
    } <= found


def test_a_span_inside_a_stage_lies_in_it_and_has_its_call(frame):
    (stage,) = frame[(frame.stage == "update") & (frame.worker == "traced_actor/0")][
        -1:
    ].itertuples()
    inside = frame[(frame.call == stage.call) & (frame.worker == stage.worker)]
    assert (inside.start_s >= stage.start_s).all()
    assert (inside.end_s <= stage.end_s).all()
    assert len(inside) > 2


def test_stages_have_memory_that_categories_and_residual_explain(frame):
    (update,) = frame[(frame.stage == "update") & (frame.worker == "traced_actor/0")][-1:].to_dict(
        "records"
    )
    known = ("weights", "gradients", "optimizer", "activations")
    parts = {name: update.get(f"peak/{name}_bytes") for name in (*known, "residual")}
    assert parts["weights"] == 226_080 * 4
    assert parts["optimizer"] >= 2 * parts["weights"]
    assert sum(value for value in parts.values()) == update["peak/allocated_bytes"]


def test_the_pictures_are_drawn_from_it(frame, tmp_path):
    import matplotlib.pyplot as plt

    for name, draw in (("timeline", rk.viz.plot_timeline), ("memory", rk.viz.plot_memory)):
        drawn = draw(frame)
        figure = getattr(drawn, "figure", drawn)
        figure.savefig(tmp_path / f"{name}.png")
        plt.close(figure)
    idle = trace.idle_fractions(frame).set_index("worker")
    assert idle.idle_fraction.between(0, 1).all()
    assert idle.waiting_s["driver"] > 0


def test_chrome_gets_a_process_a_node_and_a_thread_a_worker(recorded, frame, tmp_path):
    events = json.loads(recorded.to_chrome(tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(frame.worker) <= names
