"""AReaL: generation never waits for training, and the loss makes up for stale samples."""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rlkit.algo import group_metrics, group_relative, importance_weight
from rlkit.algo.correction import Weight
from rlkit.batch import Batch
from rlkit.checkpoint import Checkpointer
from rlkit.checks import whole
from rlkit.cluster import RolloutFeed
from rlkit.metrics import MetricLog
from rlkit.models import Pretrained
from rlkit.recipes.loop import Loop, LoopConfig, OnStep, Run, check_parts, checked, policy_loss
from rlkit.reshard import Resharder
from rlkit.schedule import Backlog, Inline, StalenessRule, asynchronous
from rlkit.tasks import Task, score
from rlkit.types import RewardFn
from rlkit.workers import ActorWorker, RolloutWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class AREALConfig(LoopConfig):
    """Numbers of an asynchronous run."""

    max_staleness: int = 4
    """Train steps that generation may be ahead; 0 is synchronous."""
    max_age: int | None = None
    """Versions that a half-written response may be behind before it begins again; None: any."""
    correction: Weight | None = importance_weight
    """Importance weight for stale samples, not capped; None: a clipped loss without one."""

    def __post_init__(self) -> None:
        LoopConfig.__post_init__(self)
        self._needs_groups()
        whole("AREALConfig.max_staleness", self.max_staleness, least=0, what="train step")
        if self.max_age is not None:
            whole("AREALConfig.max_age", self.max_age, least=0, what="version")


def areal(
    cluster: Any,
    model: Pretrained,
    task: Task,
    config: AREALConfig | None = None,
    *,
    on_step: OnStep | None = None,
    checkpoint: Checkpointer | None = None,
    reward_fn: RewardFn | None = None,
    **wrong: Any,
) -> Run:
    """Asynchronous RL with decoupled PPO (AReaL, 2505.24298, 2025): the trained actor, and the log;
    arguments as those of ``grpo``.

    Groups are scored as they end; a step takes the oldest ``size`` of them. A checkpoint has those
    that are ready, and the prompts of those that are not. On a cluster of one process generation
    and training take turns.
    """
    config = checked("areal", AREALConfig, config, wrong, checkpoint)
    check_parts("areal", model, task)
    loss_fn = policy_loss(config)
    rollout = cluster.spawn(
        RolloutWorker, model, engine=config.engine, max_new_tokens=config.max_new_tokens
    )
    actor = cluster.spawn(ActorWorker, model, lr=config.lr)
    resharder = Resharder(source=actor, target=rollout)
    run = Run(log=MetricLog(), actor=actor, rollout=rollout, resharder=resharder)
    how = {"n": config.n, "temperature": config.temperature, "max_age": config.max_age}
    feed = RolloutFeed(rollout, **how)

    def prepare(chunk: Batch) -> None:
        chunk["rewards"] = score(reward_fn or task.verify, chunk)
        chunk["advantages"] = chunk.expand(group_relative(chunk["rewards"], chunk["group_ids"]))

    def train(batch: Batch) -> dict[str, Any]:
        batch["old_logprobs"] = actor.compute_logprobs(batch)  # proximal: of the weights of now
        return {"metrics": actor.update(batch, loss_fn=loss_fn, minibatches=config.minibatches)}

    with Loop(run, task, config, checkpoint=checkpoint, on_step=on_step) as loop:
        restored = loop.start()
        backlog = Backlog(loop.prompts, **restored.batches)
        rule = StalenessRule(
            groups_per_step=config.size,
            max_staleness=config.max_staleness,
            version=restored.next_step,
        )
        parts = (feed, prepare, train, resharder.reshard, Inline() if rollout.in_process else None)
        steps = range(restored.next_step, config.steps)
        with closing(asynchronous(backlog, *parts, rule=rule)) as records:
            for step, record in zip(steps, records, strict=False):
                batch, ages = record["batch"], {k: v for k, v in record.items() if "staleness" in k}
                signal = group_metrics(batch["rewards"], batch["group_ids"])
                with backlog.held() as batches:
                    metrics = record["metrics"] | ages | signal
                    loop.end_step(step, metrics, batch, batches=batches)
    return run
