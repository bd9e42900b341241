"""What all recipes share: numbers, what they leave, and what is around a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from rlkit.batch import Batch
from rlkit.checkpoint import Checkpointer, Restored
from rlkit.checks import did_you_mean
from rlkit.metrics import MetricLog, StepMetrics
from rlkit.reshard import Resharder
from rlkit.rewards import reward_metrics
from rlkit.tasks import Task, evaluate

Config = TypeVar("Config", bound="LoopConfig")
OnStep = Callable[[MetricLog], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Numbers that every recipe has."""

    steps: int = 100
    """Train steps."""
    size: int = 32
    """Prompts a step."""
    n: int = 8
    """Responses a prompt."""
    temperature: float = 1.0
    """Of sampling; the trainer's logprobs follow it."""
    max_new_tokens: int = 32
    """Longest response."""
    lr: float = 2e-4
    """AdamW's learning rate."""
    minibatches: int = 2
    """Optimizer steps a train step."""
    clip_low: float = 0.2
    """Lower clip of the ratio."""
    clip_high: float = 0.2
    """Upper clip of the ratio."""
    eval_every: int = 20
    """Train steps between evaluations; 0: never."""
    eval_prompts: int = 128
    """Held-out prompts of an evaluation."""
    save_every: int = 10
    """Train steps between checkpoints, for a run that has a checkpointer; the last step is saved,
    too."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Run:
    """What a recipe leaves: its log, and the parts, which work as long as the cluster is open."""

    log: MetricLog
    """A record a train step."""
    actor: Any
    """Group of the trained policy: ``run.actor.save_pretrained(folder)``."""
    rollout: Any
    """Group of engines that have its weights: ``rk.evaluate(run.rollout, ...)``."""
    reference: Any = None
    """Group of the policy that training began with; None where there is no KL."""
    critic: Any = None
    """Group of the trained critic; None but in PPO."""
    resharder: Resharder
    """From the actor to the rollout."""

    def __repr__(self) -> str:
        parts = [item.name for item in fields(self)[1:] if getattr(self, item.name) is not None]
        return f"Run({self.log}, {', '.join(parts)})"


class Loop:
    """What is around the step of a recipe: going on, evaluation, log and checkpoints."""

    def __init__(
        self,
        run: Run,
        task: Task,
        config: LoopConfig,
        *,
        checkpoint: Checkpointer | None,
        on_step: OnStep | None,
    ) -> None:
        self.run, self.task, self.config = run, task, config
        self.checkpoint, self.on_step = checkpoint, on_step
        self.prompts = task.stream(size=config.size)
        self.held_out = task.held_out(config.eval_prompts)

    def start(self) -> Restored:
        """Go on from the newest checkpoint, if there is one; the first step's time begins here."""
        restored = Restored()
        if self.checkpoint is not None:
            restored = self.checkpoint.load(**self._state())
        self.run.resharder.reshard()  # connects the processes, outside the first step's time
        self.run.log.start()
        return restored

    def end_step(
        self, step: int, metrics: StepMetrics, batch: Batch, *, carried: Batch | None = None
    ) -> None:
        """Evaluate and save if it is time to, and log; ``carried`` rows are trained later."""
        run, config = self.run, self.config
        metrics = metrics | {"response/length_mean_tokens": batch.lengths("response_ids").mean()}
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics |= evaluate(run.rollout, self.held_out, self.task.verify)
        run.log.add(step, metrics | reward_metrics(batch))
        due = (step + 1) % config.save_every == 0 or step + 1 == config.steps
        if self.checkpoint is not None and due:
            batches = {} if carried is None else {"carried": carried}
            self.checkpoint.save(step, **self._state(), batches=batches)
        if self.on_step is not None:
            self.on_step(run.log)

    def _state(self) -> dict[str, Any]:
        workers = {"actor": self.run.actor, "critic": self.run.critic}
        workers = {name: group for name, group in workers.items() if group is not None}
        return {"workers": workers, "prompts": self.prompts, "log": self.run.log}


def checked(
    recipe: str, cls: type[Config], config: Config | None, wrong: Mapping[str, Any]
) -> Config:
    """The config, or the default one.

    TypeError for numbers given otherwise than in a ``cls``; says how to give them.
    """
    known = [item.name for item in fields(cls)]
    if wrong:
        name, value = next(iter(wrong.items()))
        if name in known:
            more = f"Pass {cls.__name__}({name}={value!r})."
        else:
            more = f"{cls.__name__} has {known}.{did_you_mean(name, known)}"
        raise TypeError(
            f"{recipe}: got {name}={value!r}, need numbers of the run in a {cls.__name__}, the "
            f"fourth argument. {more}"
        )
    if config is not None and not isinstance(config, cls):
        raise TypeError(
            f"{recipe}: got {type(config).__name__} as the config, need a {cls.__name__} such as "
            f"{cls.__name__}({known[0]}=6)."
        )
    return config or cls()
