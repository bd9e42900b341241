"""A run of seconds with one batch in flight, for the tests here; as a script, one to be killed.

    python short_run.py FOLDER STEPS local|ray
    python short_run.py                          # for each line "FOLDER STEPS" on stdin, in a fork

Five prompts, batches of two: batches reach over the end of an epoch. While a batch is trained, the
next one is there already, so every checkpoint has rows that are generated and not trained.
"""

import os
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative

PAIRS = [(f"{a}{b}>", f"{b}{a}") for a, b in ((1, 2), (3, 4), (5, 6), (7, 8), (9, 0))]
SPEC = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}


def loss_fn(logprobs, batch):
    return clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)


def reward(prompt: str, response: str, answer: str) -> float:
    """Many values, so that every group has a signal."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) - 0.1 * len(response)


def make_task(**changes) -> rk.tasks.Task:
    return rk.tasks.from_list(PAIRS, verify=reward, **changes)


def make_model(**changes) -> Any:
    sizes = {"vocab_size": 23, "num_kv_heads": 2, "head_dim": 8, "max_positions": 64}
    return rk.models.tiny(spec=rk.ModelSpec(**(SPEC | sizes | changes)), seed=1)


@dataclass
class Run:
    """The parts of a run, and what it has trained."""

    rollout: Any
    actor: Any
    resharder: Any
    prompts: Any
    log: rk.MetricLog = field(default_factory=rk.MetricLog)
    trained: list[int] = field(default_factory=list)
    """uids in the order in which they were trained."""
    texts: list[Any] = field(default_factory=list)
    """prompts, responses and rewards of the steps that this process ran."""

    @property
    def parts(self) -> dict[str, Any]:
        return {"workers": {"actor": self.actor}, "prompts": self.prompts, "log": self.log}


def make_run(cluster: Any, *, n: int = 1) -> Run:
    model = make_model()
    optim = rk.OptimConfig(lr_schedule=rk.config.linear(40, warmup_steps=3))
    rollout = cluster.spawn(rk.RolloutWorker, model, n=n, max_new_tokens=4)
    actor = cluster.spawn(rk.ActorWorker, model, lr=1e-2, optim=optim, n=n)
    resharder = rk.Resharder(source=actor, target=rollout)
    return Run(rollout, actor, resharder, make_task().stream(size=2))


def restore(run: Run, checkpoint: rk.Checkpointer | None) -> tuple[int, dict[str, Any]]:
    """The first step to run, and what is in flight."""
    restored = rk.checkpoint.Restored() if checkpoint is None else checkpoint.load(**run.parts)
    run.trained = restored.counters.get("trained", [])
    run.resharder.reshard()
    return restored.next_step, restored.batches


def train(run: Run, checkpoint: rk.Checkpointer | None, *, steps: int, stop: int = 10**9) -> Run:
    """Steps up to ``steps``, or to ``stop``, where the run is left; saved after each."""
    first, batches = restore(run, checkpoint)
    following = batches.get("following") or run.rollout.generate(next(run.prompts), n=3)
    for step in range(first, min(steps, stop)):
        batch, following = following, run.rollout.generate(next(run.prompts), n=3)
        batch["rewards"] = rk.score(reward, batch)
        batch["old_logprobs"] = run.actor.compute_logprobs(batch)
        advantages = group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)
        metrics = run.actor.update(batch, loss_fn=loss_fn, minibatches=2)
        run.resharder.reshard()
        run.log.add(step, metrics, reward=batch["rewards"].mean())
        run.trained = [*run.trained, *batch.uids.tolist()]
        run.texts.append((batch["prompt"], batch["response"], batch["rewards"].tolist()))
        if checkpoint is not None:
            counters = {"trained": run.trained}
            checkpoint.save(step, **run.parts, batches={"following": following}, counters=counters)
    return run


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    found = run.actor.weights()
    return found[0] if isinstance(found, list) else found


def records_of(run: Run) -> list[dict[str, Any]]:
    """The log without times."""
    timed = ("time/", "throughput/")
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in run.log.records]


def main(path: str, steps: str, backend: str) -> None:
    torch.set_num_threads(1)
    options = {"num_devices": 2, "timeout_s": 60.0} if backend == "ray" else {}
    with rk.launch(backend=backend, **options) as cluster:
        run = make_run(cluster)
        checkpoint = rk.Checkpointer(path)
        print("ready", os.getpid(), flush=True)
        train(run, checkpoint, steps=int(steps))
        print("done", flush=True)


def serve() -> None:
    """Runs in forks of this process, which has loaded all it needs and run nothing: loading takes
    seconds each time.
    """
    make_run(rk.launch(backend="local"))  # torch loads much of itself with the first optimizer
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                main(*line.split(), "local")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # runs have no end here, they are killed
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
