"""Frozen dataclasses that cross a process or a file."""

import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from numbers import Real
from typing import Any, get_args

from rlkit.checks import did_you_mean, need, whole
from rlkit.layout import Layout
from rlkit.model_spec import LatentAttention, MixtureOfExperts, ModelSpec

__all__ = [
    "LatentAttention",
    "Layout",
    "LearningRate",
    "MixtureOfExperts",
    "ModelSpec",
    "OptimConfig",
    "SamplingParams",
    "constant",
    "cosine",
    "from_dict",
    "linear",
    "to_dict",
]

MIN_TEMPERATURE = 1e-3
"""The lowest of sampling; 0 is greedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an engine picks tokens."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    max_new_tokens: int = 32
    """Longest response, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; they belong to it."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; their tokens belong to it, ``Response.text`` ends before."""
    top_k: int = 0
    """Samples from the k most likely tokens alone; 0: from all."""
    top_p: float = 1.0
    """Samples from the fewest most likely tokens that have this share of the probability."""
    min_p: float = 0.0
    """Samples from tokens with at least this share of the highest probability."""

    def __post_init__(self) -> None:
        whole("max_new_tokens", self.max_new_tokens)
        # Below, logits / temperature leaves the range in which float32 tells logprobs apart.
        number = isinstance(self.temperature, Real)
        fits = number and (self.temperature == 0 or self.temperature >= MIN_TEMPERATURE)
        need(
            fits and math.isfinite(self.temperature),
            f"temperature: got {self.temperature}, need 0 (greedy) or a finite number of at least "
            f"{MIN_TEMPERATURE}.",
        )
        need(
            not isinstance(self.stop, str) and all(self.stop),
            f"stop: got {self.stop!r}, need a tuple of strings that are not empty.",
        )
        whole("top_k", self.top_k, least=0)
        need(0 < self.top_p <= 1, f"top_p: got {self.top_p}, need above 0, at most 1 (1: all).")
        need(0 <= self.min_p <= 1, f"min_p: got {self.min_p}, need 0 (all) to 1.")

    @property
    def cuts(self) -> bool:
        """Tokens may be cut off by top_k, top_p or min_p."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Factor on the learning rate by optimizer step.

    Linear warm-up, then flat, linear or cosine decay.
    """

    warmup_steps: int = 0
    """Steps from 0 to the full rate."""
    decay_steps: int = 0
    """Optimizer steps after the warm-up until ``final``; 0 keeps the rate constant."""
    final: float = 0.0
    """Factor at the end of the decay, kept from there on."""
    cosine: bool = False
    """Half a cosine (Loshchilov and Hutter, 2017) in place of a straight line."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "decay_steps"):
            whole(f"LearningRate.{name}", getattr(self, name), least=0)

    def __call__(self, step: int) -> float:
        """Factor for optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps == 0:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        falling = 0.5 * (1 + math.cos(math.pi * done)) if self.cosine else 1.0 - done
        return self.final + (1.0 - self.final) * falling


def constant(*, warmup_steps: int = 0) -> LearningRate:
    """Full rate after the warm-up."""
    return LearningRate(warmup_steps=warmup_steps)


def linear(total_steps: int, *, warmup_steps: int = 0, final: float = 0.0) -> LearningRate:
    """Straight line from the full rate to ``final`` of it at ``total_steps``."""
    return LearningRate(
        warmup_steps=warmup_steps, decay_steps=_decay(total_steps, warmup_steps), final=final
    )


def cosine(total_steps: int, *, warmup_steps: int = 0, final: float = 0.0) -> LearningRate:
    """Half a cosine from the full rate to ``final`` of it at ``total_steps``."""
    return LearningRate(
        warmup_steps=warmup_steps,
        decay_steps=_decay(total_steps, warmup_steps),
        final=final,
        cosine=True,
    )


def _decay(total_steps: int, warmup_steps: int) -> int:
    need(
        total_steps > warmup_steps,
        f"total_steps: got {total_steps}, need more than warmup_steps={warmup_steps}.",
    )
    return total_steps - warmup_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, 2019) with gradient clipping.

    The rate itself is the worker's ``lr``.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay, times the learning rate."""
    max_grad_norm: float = 1.0
    """Global L2 norm at which gradients are clipped; ``inf`` never clips."""
    lr_schedule: LearningRate = field(default_factory=LearningRate)
    """Factor on ``lr`` by optimizer step."""

    def __post_init__(self) -> None:
        need(
            self.max_grad_norm > 0,
            f"OptimConfig.max_grad_norm: got {self.max_grad_norm}, need a number above 0 (inf: "
            "no clipping).",
        )
        need(
            all(0 <= beta < 1 for beta in self.betas) and len(self.betas) == 2,
            f"OptimConfig.betas: got {self.betas}, need two numbers in [0, 1).",
        )


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Build config ``cls`` from a mapping (a TOML table).

    Unknown keys are an error that lists the known ones.
    """
    known = {item.name: item.type for item in fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"{cls.__name__}: got unknown keys {unknown}, need keys among {[*known]}."
            f"{did_you_mean(unknown[0], known)}"
        )
    inner = {
        name: from_dict(kind, values[name])
        for name, kinds in known.items()
        for kind in get_args(kinds) or (kinds,)  # `X | None`: X
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(values.get(name), dict)
    }
    tuples = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}  # TOML, JSON
    return cls(**values | tuples | inner)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain values, for JSON and TOML."""
    return asdict(config)
