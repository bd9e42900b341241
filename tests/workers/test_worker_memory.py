"""What the built-in workers say that they hold."""

import torch

from rlkit import trace
from rlkit.models import tiny
from rlkit.reshard import ReshardReport
from rlkit.tasks import reverse_digits
from rlkit.trace import storage_bytes
from rlkit.workers import ActorWorker, ReferenceWorker, RolloutWorker
from rlkit.workers.memory import of_backend, of_engine


def weights_bytes(worker):
    return storage_bytes(worker.backend.state_dict().values())


def loss(logprobs, batch):
    return batch.token_mean(-logprobs), {}


def batch_of(model):
    rollout = RolloutWorker(model, max_new_tokens=4)
    prompts = next(iter(reverse_digits(length=3).batches(size=2, steps=1)))
    return rollout, rollout.generate(prompts, n=2)


def test_an_actor_holds_weights_first_and_moments_after_a_step():
    model = tiny(seed=0)
    actor = ActorWorker(model)
    size = weights_bytes(actor)
    assert actor.memory() == {"weights": size, "gradients": 0, "optimizer": 0}
    actor.update(batch_of(model)[1], loss_fn=loss)
    found = actor.memory()
    assert (found["weights"], found["gradients"]) == (size, 0)
    assert 2 * size <= found["optimizer"] < 2.01 * size  # two moments, and a count a parameter


def test_the_update_is_sampled_where_it_holds_gradients():
    model = tiny(seed=0)
    actor = ActorWorker(model)
    batch = batch_of(model)[1]
    with trace.use(trace.Trace()), trace.stage_span("update", actor, worker="actor/0") as stage:
        actor.update(batch, loss_fn=loss)
        looks = list(stage._looks)
    assert [look.get("gradients", 0) for look in looks] == [0, weights_bytes(actor)]


def test_a_reference_holds_weights():
    reference = ReferenceWorker(tiny(seed=0))
    assert reference.memory()["weights"] == weights_bytes(reference)
    assert reference.memory()["optimizer"] == 0


def test_an_engine_holds_its_cache_from_the_first_prompt_until_it_sleeps():
    rollout = RolloutWorker(tiny(seed=0), max_new_tokens=4)
    assert set(rollout.memory()) == {"weights"}
    rollout, _ = batch_of(tiny(seed=0))
    assert rollout.memory()["kv_cache"] == storage_bytes([rollout.engine.cache.data]) > 0
    rollout.sleep()
    assert set(rollout.memory()) == {"weights"}


def test_weights_that_were_received_are_gather_buffers_until_they_are_published():
    actor, rollout = ActorWorker(tiny(seed=1)), RolloutWorker(tiny(seed=0))
    report = ReshardReport(seconds=0, bytes=0, peak_gib=0, verified=True, version=1)
    rollout.stage_weights({k: t.clone() for k, t in actor.weights().items()}, report)
    assert rollout.memory()["gather_buffers"] == rollout.memory()["weights"]
    rollout.publish_weights(version=1)
    assert "gather_buffers" not in rollout.memory()


def test_a_backend_or_an_engine_that_knows_more_is_asked():
    class Own:
        def memory(self):
            return {"weights": 5, "communicators": 7, "gather_buffers": 1}

    assert of_backend(Own()) == {"weights": 5, "communicators": 7, "gather_buffers": 1}
    staged = {"a": torch.zeros(4)}
    assert of_engine(Own(), staged) == {"weights": 5, "communicators": 7, "gather_buffers": 17}


def test_a_backend_without_an_optimizer_holds_its_weights():
    class Plain:
        def state_dict(self):
            return {"a": torch.zeros(4)}

    assert of_backend(Plain()) == {"weights": 16}
