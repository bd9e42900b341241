"""What all recipes share: numbers, what they leave, and what is around a step."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from rlkit.algo import clipped_policy_loss, decoupled_policy_loss, mismatch_metrics
from rlkit.algo.correction import Weight
from rlkit.algo.losses.ratios import check_clip
from rlkit.batch import Batch
from rlkit.checkpoint import Checkpointer, Restored
from rlkit.checks import did_you_mean, finite, fits, whole
from rlkit.config import SamplingParams
from rlkit.engines import TorchEngine
from rlkit.metrics import MetricLog, StepMetrics
from rlkit.models.pretrained import Pretrained, need_model
from rlkit.record import plain
from rlkit.reshard import Resharder
from rlkit.rewards import reward_metrics
from rlkit.tasks import Task, evaluate
from rlkit.types import LossFn

logger = logging.getLogger("rlkit.recipes")

Config = TypeVar("Config", bound="LoopConfig")
OnStep = Callable[[MetricLog], None]

COUNTS = {"steps": 0, "size": 1, "n": 1, "minibatches": 1}
COUNTS |= {"eval_every": 0, "eval_prompts": 1, "save_every": 0}
MAY_CHANGE = ("steps", "eval_every", "eval_prompts", "save_every")  # and the run is the same


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
    """Optimizer steps a train step, at most ``size``: a prompt's responses are not parted."""
    clip_low: float = 0.2
    """Lower clip of the ratio."""
    clip_high: float = 0.2
    """Upper clip of the ratio."""
    eval_every: int = 20
    """Train steps between evaluations; 0: never."""
    eval_prompts: int = 128
    """Held-out prompts of an evaluation."""
    save_every: int = 10
    """Train steps between checkpoints, for a run that has a checkpointer; 0: never. The last step
    is saved all the same."""
    engine: Any = TorchEngine
    """Class of what generates: ``TorchEngine``, or ``VLLMEngine``."""
    correction: Weight | None = None
    """Importance weight for what engine and trainer disagree on: ``truncated_importance_weight``,
    ``masked_importance_weight`` or a partial of one; None: the metrics ``mismatch/`` say how much
    it is, and nothing is done about it."""

    def __post_init__(self) -> None:
        for name, least in COUNTS.items():
            whole(self._called(name), getattr(self, name), least=least)
        self._finite("lr")
        check_clip(self.clip_low, self.clip_high)
        SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        if self.correction is not None:
            columns = ("old_logprobs", "rollout_logprobs", "response_mask")
            fits(self._called("correction"), self.correction, *columns)
        if self.minibatches > self.size:
            raise ValueError(
                f"{self._called('minibatches')}: got {self.minibatches}, need at most "
                f"size={self.size}, one a prompt."
            )

    def _called(self, name: str) -> str:
        return f"{type(self).__name__}.{name}"

    def _finite(self, name: str, *, most: float = math.inf) -> None:
        finite(self._called(name), getattr(self, name), most=most)

    def _needs_groups(self) -> None:
        if self.n < 2:
            raise ValueError(
                f"{self._called('n')}: got {self.n}, need at least 2 responses a prompt: alone in "
                "its group a response has no advantage. PPO's critic can do with 1."
            )


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
    """What is around the step of a recipe: going on, evaluation, log and checkpoints.

    An error inside ``with`` leaves with the run so far as its attribute ``run``.
    """

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
        self.held_out: Any = task.held_out(config.eval_prompts) if config.eval_every else None

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.run = self.run  # pyright: ignore[reportAttributeAccessIssue]
            error.add_note(
                f"The run so far is the error's attribute run: {self.run}. In a notebook's next "
                "cell: import sys; run = sys.last_value.run"
            )

    def start(self) -> Restored:
        """Go on from the newest checkpoint, if there is one; the first step's time begins here."""
        restored = Restored()
        if self.checkpoint is not None:
            restored = self.checkpoint.load(**self._state())
            self._compare(restored.counters.get("config", {}))
        self.run.resharder.reshard()  # connects the processes, outside the first step's time
        self.run.log.start()
        return restored

    def end_step(
        self,
        step: int,
        metrics: StepMetrics,
        batch: Batch,
        *,
        batches: Mapping[str, Batch] | None = None,
    ) -> None:
        """Evaluate and save if it is time to, and log; rows of ``batches`` are trained later."""
        run, config = self.run, self.config
        metrics = metrics | {"response/length_mean_tokens": batch.lengths("response_ids").mean()}
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics |= evaluate(run.rollout, self.held_out, self.task.verify)
        run.log.add(step, metrics | reward_metrics(batch))
        due = config.save_every and (step + 1) % config.save_every == 0
        due = due or step + 1 == config.steps
        if self.checkpoint is not None and due:
            counters = {"config": self._facts()}
            self.checkpoint.save(step, **self._state(), batches=batches, counters=counters)
        if self.on_step is not None:
            self.on_step(run.log)

    def _state(self) -> dict[str, Any]:
        workers = {"actor": self.run.actor, "critic": self.run.critic}
        workers = {name: group for name, group in workers.items() if group is not None}
        return {"workers": workers, "prompts": self.prompts, "log": self.run.log}

    def _facts(self) -> dict[str, str]:
        """The config as plain values."""
        numbers = {f.name: str(plain(getattr(self.config, f.name))) for f in fields(self.config)}
        return {"config": type(self.config).__name__} | numbers

    def _compare(self, saved: Mapping[str, str]) -> None:
        """Warn of numbers that are not those that the checkpoint was saved with."""
        new = {name: value for name, value in self._facts().items() if name not in MAY_CHANGE}
        changed = [f"{k}={v} (was {saved[k]})" for k, v in new.items() if saved.get(k, v) != v]
        if changed:
            said = ", ".join(changed)
            logger.warning("%s: its run goes on with other numbers: %s", self.checkpoint, said)


def policy_loss(config: LoopConfig) -> LossFn:
    """The clipped loss of a config, with its importance weight; logs ``mismatch/``, too."""
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    clipped = partial(clipped_policy_loss, **clip)
    if config.correction is not None:
        clipped = partial(decoupled_policy_loss, **clip, weight=config.correction)

    def loss_fn(logprobs: Any, batch: Any) -> Any:
        loss, metrics = clipped(logprobs, batch)
        return loss, metrics | mismatch_metrics(batch)

    return loss_fn


def check_parts(recipe: str, model: Pretrained, task: Task) -> None:
    """TypeError for a model that is none, ValueError for a task with another one's tokenizer."""
    need_model(model)
    prompt, _ = task.item(0)
    if task.tokenizer.encode(prompt) != model.tokenizer.encode(prompt):
        raise ValueError(
            f"{recipe}: got a task whose prompts a {task.tokenizer} encodes, need the model's "
            f"{model.tokenizer}. Pass tokenizer=model.tokenizer where the task is made."
        )


def checked(
    recipe: str,
    cls: type[Config],
    config: Config | None,
    wrong: Mapping[str, Any],
    checkpoint: Checkpointer | None,
) -> Config:
    """The config, or the default one.

    TypeError for numbers given otherwise than in a ``cls``, and for a checkpoint that is none; says
    how to give them.
    """
    if checkpoint is not None and not isinstance(checkpoint, Checkpointer):
        raise TypeError(
            f"{recipe}: got {checkpoint!r} as the checkpoint, need checkpoint=rk.Checkpointer"
            '("folder").'
        )
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
