"""The tiny decoder that learns in seconds on a laptop, with shipped weights after a short
supervised warm-up.
"""

from pathlib import Path

import torch

from rlkit.checks import did_you_mean
from rlkit.config import ModelSpec
from rlkit.models.decoder import Decoder, fresh
from rlkit.models.pretrained import Pretrained, load
from rlkit.models.tokenizer import char_tokenizer

WEIGHTS = Path(__file__).parent / "weights"


def tiny_spec(vocab_size: int = 23) -> ModelSpec:
    """0.23M parameters: 2 layers of width 96."""
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_layers=2,
        num_heads=3,
        num_kv_heads=3,
        head_dim=32,
        max_positions=128,
    )


def tiny(
    *, pretrained: str | None = None, spec: ModelSpec | None = None, seed: int = 0
) -> Pretrained:
    """A tiny character-level model: random weights from ``seed``, or the shipped warm start named
    ``pretrained``.

    A ``spec`` with experts (``rk.config.MixtureOfExperts``) is for ``rk.MegatronBackend``.
    Shipped folders lie in ``rlkit/models/weights``; ``scripts/make_tiny_weights.py`` makes them.
    """
    if pretrained is not None:
        shipped = sorted(p.name for p in WEIGHTS.iterdir() if p.is_dir())
        if pretrained not in shipped:
            raise ValueError(
                f"pretrained: got {pretrained!r}, need one of {shipped}, or a folder through "
                f"rk.models.load(folder).{did_you_mean(pretrained, shipped)}"
            )
        if spec is not None:
            raise ValueError(
                "tiny: got both pretrained and spec; shipped weights have their own shape."
            )
        model = load(WEIGHTS / pretrained)
        model.weights = {name: tensor.float() for name, tensor in model.weights.items()}
        return model
    tokenizer = char_tokenizer()
    spec = spec or tiny_spec(tokenizer.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    if spec.moe is not None and spec.mla is None:
        return Pretrained(spec, tokenizer, _with_experts(spec, generator))
    return Pretrained(spec, tokenizer, Decoder(spec).reset(generator).weights())


def _with_experts(spec: ModelSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Fresh weights by Hugging Face name of a shape that the decoder does not compute."""
    from rlkit.reshard.plan_tables import parameters

    weights: dict[str, torch.Tensor] = {}
    for each in parameters(spec, dtype="float32"):
        shape = each.shape[1:] if each.experts else each.shape
        for layer in each.instances:
            for expert in range(each.shape[0]) if each.experts else [None]:
                name = each.named(layer, expert)
                weights[name] = fresh(name, torch.empty(shape), generator)
    return weights
