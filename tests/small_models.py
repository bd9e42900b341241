"""Models of a few hundred weights, none of them at a value that would hide a mistake."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no download, ever

import torch

from rlkit.batch import Batch
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


def make_prompts(num: int, *, vocab_size: int = 23, longest: int = 9) -> list[list[int]]:
    """Random prompts of 1 to ``longest`` tokens, special tokens left out."""
    generator = torch.Generator().manual_seed(num)
    return [
        torch.randint(3, vocab_size, (1 + i % longest,), generator=generator).tolist()
        for i in range(num)
    ]


def as_batch(requests: list, responses: list) -> Batch:
    """What the trainer gets of an engine's responses, which are in the order of the requests."""
    prompts = [request.prompt_ids for request in requests for _ in request.uids]
    return Batch.from_columns(
        {
            "uid": [r.uid for r in responses],
            "prompt_ids": [torch.tensor(prompt) for prompt in prompts],
            "response_ids": [r.token_ids for r in responses],
            "response_mask": [torch.ones(len(r.token_ids), dtype=torch.int8) for r in responses],
            "rollout_logprobs": [r.logprobs for r in responses],
            "temperature": [float(r.temperature) for r in responses],
        }
    )
