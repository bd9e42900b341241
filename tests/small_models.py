"""Models of a few hundred weights, none of them at a value that would hide a mistake."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no download, ever

import torch

from rlkit.config import ModelSpec
from rlkit.models import Pretrained, tiny

FAMILIES = {
    "llama": {},
    "llama with grouped queries": {"num_kv_heads": 1},
    "llama of one layer": {"num_layers": 1, "hidden_size": 3, "intermediate_size": 1},
    "llama with tied embeddings": {"tie_embeddings": True},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
    "qwen2 with tied embeddings": {
        "architecture": "Qwen2ForCausalLM",
        "qkv_bias": True,
        "tie_embeddings": True,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "num_kv_heads": 1},
}


def make_spec(**changes) -> ModelSpec:
    """Odd sizes on purpose."""
    sizes = {
        "vocab_size": 23,
        "hidden_size": 15,
        "intermediate_size": 22,
        "num_layers": 2,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 6,
        "max_positions": 64,
        "rope_theta": 500.0,
        "norm_eps": 1e-4,
    }
    return ModelSpec(**(sizes | changes))


def make_model(seed: int = 1, **changes) -> Pretrained:
    """Norms off 1, biases off 0, logits that span several nats."""
    model = tiny(spec=make_spec(**changes), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.weights.items():
        if tensor.ndim == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        elif "embed" in name or "lm_head" in name:
            tensor *= 40
    return model
