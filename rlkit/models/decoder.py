"""A Llama-family decoder with the parameter names of Hugging Face checkpoints.

Tokens are packed: ids [N] and positions [N] of any number of sequences. How tokens attend is passed
in, so the same weights train on packed sequences and decode with a cache.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlkit.algo.logprobs import per_token_from_hidden
from rlkit.config import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, D], k [N, K, D], v [N, K, D]) -> [N, H, D]."""


class RMSNorm(nn.Module):
    """x over its root mean square, times a learned weight (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        if type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32:
            return cast(Tensor, _Normed.apply(x, self.weight, self.eps))
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class _Normed(torch.autograd.Function):
    """``F.rms_norm`` in half the passes over x that torch makes on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        scaled = x * inverse
        both = slope * scaled
        along = (both @ weight)[..., None].div_(x.shape[-1])  # [..., 1] what the norm takes away
        by_x = (slope * weight).addcmul_(scaled, along, value=-1).mul_(inverse)
        return by_x, both.flatten(0, -2).sum(0), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, H, D], halves paired as in Hugging Face checkpoints.

    Cos, sin [N, 1, D], as ``Decoder.rope`` has them.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)  # halves change places


class Attention(nn.Module):
    """Projections around the attention that is passed in."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width, head = spec.hidden_size, spec.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(width, spec.num_heads * head, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(width, spec.num_kv_heads * head, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(width, spec.num_kv_heads * head, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * head, width, bias=False)
        if spec.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(head, spec.norm_eps), RMSNorm(head, spec.norm_eps)
        self.normed = spec.qk_norm

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """x [N, hidden] -> [N, hidden]."""
        heads = (-1, self.head_dim)
        q, k, v = (p(x).unflatten(-1, heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(layer, rotate(q, *rope), rotate(k, *rope), v)  # [N, H, D]
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(spec), MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """x [N, hidden] -> [N, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rope, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, blocks and final norm: ``model.*`` of a checkpoint."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)


def fresh(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    """``weight`` drawn anew, in place: matrices normal, scaled by fan-in, embeddings by 0.02; norms
    are 1, biases 0.
    """
    if weight.ndim != 2:
        return weight.data.fill_(float(name.endswith("norm.weight")))
    embedding = "embed_tokens" in name or "lm_head" in name
    scale = 0.02 if embedding else 1 / math.sqrt(weight.shape[1])
    return weight.data.normal_(0.0, scale, generator=generator)


class Decoder(nn.Module):
    """Decoder language model.

    State_dict names are those of a Hugging Face Llama / Qwen2 / Qwen3 checkpoint.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.moe or spec.mla:
            raise ValueError(
                f"decoder: got a {spec.architecture} shape with experts or latent attention, need "
                "a dense one. backend=rk.MegatronBackend trains experts, engine=rk.VLLMEngine "
                "serves them; latent attention is for plans and simulations."
            )
        self.spec = spec
        self.recompute = (
            False  # a block's activations in the backward pass, in place of keeping them
        )
        self.model = Trunk(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.tie()

    def tie(self) -> "Decoder":
        """One parameter for both embeddings if the spec says so; ``to_empty`` parts them."""
        if self.spec.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

    def reset(self, generator: torch.Generator) -> "Decoder":
        """Fresh weights from ``generator``, see ``fresh``."""
        for name, parameter in self.named_parameters():
            fresh(name, parameter, generator)
        return self

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids, positions [N] int64 -> final hidden states [N, hidden]."""
        x = self.model.embed_tokens(ids)
        rope = self.rope(positions.to(x.device), x.dtype)
        for layer, block in enumerate(self.model.layers):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, layer, attend, use_reentrant=False)
            else:
                x = block(x, rope, layer, attend)
        return self.model.norm(x)

    def weights(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face name, detached, a tied one once."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> [M, V]; row i predicts the token after the one of row i."""
        return self.lm_head(hidden)

    def per_token(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """What training reads of M tokens: their logprobs [M], and entropies [M] if asked for, else
        none.

        hidden [M, hidden] where each token of targets [M] is predicted; temperature [M].
        """
        return per_token_from_hidden(
            hidden, self.lm_head.weight, targets, temperature=temperature, entropy=entropy
        )

    def check_entropy(self, *, wanted: bool) -> None:
        """A policy has one for each token."""

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D] of the rotary embedding (Su et al., 2021), computed in fp32; sin is
        negative in the first half, for ``rotate``.
        """
        half = torch.arange(0, self.spec.head_dim, 2, device=positions.device, dtype=torch.float32)
        angle = positions.float()[:, None] / self.spec.rope_theta ** (half / self.spec.head_dim)
        angle = torch.cat((-angle, angle), -1)[:, None]  # [N, 1, D]
        return angle.cos().to(dtype), angle.sin().to(dtype)


class Critic(Decoder):
    """A decoder with a value head in place of the output embedding: the return to expect."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(replace(spec, tie_embeddings=False))
        del self.lm_head
        self.value_head = nn.Linear(spec.hidden_size, 1)

    def per_token(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Values [M] of the states before M tokens, which are not looked at; no entropies."""
        self.check_entropy(wanted=entropy)
        values = self.value_head(hidden)[:, 0].float()  # [M, 1] -> [M]
        return values, values.new_zeros(0)

    def check_entropy(self, *, wanted: bool) -> None:
        """TypeError if it is wanted: a value has none."""
        if wanted:
            raise TypeError(
                "loss_fn: got a parameter 'entropy', which a critic has not; need (values, batch)."
            )
