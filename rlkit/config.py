"""Frozen dataclasses that cross a process or a file."""

import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from rlkit.checks import did_you_mean, whole

MIN_TEMPERATURE = 1e-3
"""The lowest of sampling; 0 is greedy."""


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Shape of a Llama-family decoder.

    The names of a Hugging Face ``config.json`` in rlkit's words.
    """

    vocab_size: int
    """V, rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_layers: int
    """Decoder blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int
    """Width of a head."""
    max_positions: int = 4096
    """Longest prompt + response, in tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding (Su et al., 2021)."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = False
    """Input and output embedding are one parameter."""
    qkv_bias: bool = False
    """Biases on q, k, v projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm on q and k heads (Qwen3)."""
    architecture: str = "LlamaForCausalLM"
    """Class named in a saved ``config.json``."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim",
        ):  # fmt: skip
            value = getattr(self, name)
            _need(value >= 1, f"ModelSpec.{name}: got {value}, need at least 1.")
        _need(
            self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
            f"ModelSpec: got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}; need a "
            "num_kv_heads that divides num_heads.",
        )
        _need(
            self.head_dim % 2 == 0,
            f"ModelSpec.head_dim: got {self.head_dim}, need an even number: rotary embeddings "
            "turn pairs.",
        )

    @property
    def num_parameters(self) -> int:
        """Count of weights, tied embeddings once."""
        qkv = self.hidden_size * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        bias = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        out = self.num_heads * self.head_dim * self.hidden_size
        layer = qkv + bias + out + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one model is cut over devices: sizes of the tensor, pipeline and data dimensions."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data parallel size."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _need(
                isinstance(value, int) and value >= 1,
                f"Layout.{item.name}: got {value!r}, need an integer of at least 1.",
            )

    @property
    def num_devices(self) -> int:
        """Devices the layout takes."""
        return self.tp * self.pp * self.dp


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
        fits = self.temperature == 0 or self.temperature >= MIN_TEMPERATURE
        _need(
            math.isfinite(self.temperature) and fits,
            f"temperature: got {self.temperature}, need 0 (greedy) or a finite number of at least "
            f"{MIN_TEMPERATURE}.",
        )
        _need(
            not isinstance(self.stop, str) and all(self.stop),
            f"stop: got {self.stop!r}, need a tuple of strings that are not empty.",
        )
        whole("top_k", self.top_k, least=0)
        _need(0 < self.top_p <= 1, f"top_p: got {self.top_p}, need above 0, at most 1 (1: all).")
        _need(0 <= self.min_p <= 1, f"min_p: got {self.min_p}, need 0 (all) to 1.")

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
            value = getattr(self, name)
            _need(value >= 0, f"LearningRate.{name}: got {value}, need at least 0.")

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
    _need(
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
        _need(
            self.max_grad_norm > 0,
            f"OptimConfig.max_grad_norm: got {self.max_grad_norm}, need a number above 0 (inf: "
            "no clipping).",
        )
        _need(
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
        for name, kind in known.items()
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(values.get(name), dict)
    }
    tuples = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}  # TOML, JSON
    return cls(**values | tuples | inner)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain values, for JSON and TOML."""
    return asdict(config)
