"""A decoder's forward pass in few operations, for engines.

The matrices that read the same input are one product, they lie [in, out], which a CPU multiplies
faster by few rows, and the residual stream is updated in place.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlkit.models.decoder import Attend, Block, Decoder, rotate
from rlkit.models.pretrained import load_weights


def fuse(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix [in, out] and bias [out] in place of several; theirs become views of it."""
    parts = [linear.weight.detach() for linear in linears]
    matrix = torch.cat(parts).t().contiguous()
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    start = 0
    for linear, part in zip(linears, parts, strict=True):
        mine = slice(start, start := start + len(part))
        linear.weight = nn.Parameter(matrix.t()[mine], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[mine], requires_grad=False)
    return matrix, bias


class FusedBlock:
    """A block whose q, k and v are one product, and gate and up another."""

    def __init__(self, block: Block) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.norms = block.input_layernorm, block.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if attention.normed else None
        self.qkv, self.qkv_bias = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out, _ = fuse([attention.o_proj])
        self.gate_up, _ = fuse([mlp.gate_proj, mlp.up_proj])
        self.down, _ = fuse([mlp.down_proj])
        self.width, self.head_dim = mlp.gate_proj.out_features, attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> None:
        """Update x [N, hidden] in place."""
        heads, both = self.num_heads, self.num_heads + self.num_kv_heads
        normed = self.norms[0](x)
        qkv = normed @ self.qkv if self.qkv_bias is None else self.qkv_bias.addmm(normed, self.qkv)
        qkv = qkv.unflatten(1, (-1, self.head_dim))  # [N, H + 2K, D]
        qk = qkv[:, :both]
        if self.head_norms:
            q_norm, k_norm = self.head_norms
            qk = torch.cat((q_norm(qk[:, :heads]), k_norm(qk[:, heads:])), 1)
        qk = rotate(qk, *rope)
        out = attend(layer, qk[:, :heads], qk[:, heads:], qkv[:, both:])  # [N, H, D]
        x.addmm_(out.flatten(1), self.out)
        gate_up = self.norms[1](x) @ self.gate_up
        x.addmm_(F.silu(gate_up[:, : self.width]).mul_(gate_up[:, self.width :]), self.down)


class FusedDecoder:
    """``decoder`` for inference; its parameters become views of the fused matrices.

    So weights loaded into it are in use at once, and nothing is held twice.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.inner = decoder.requires_grad_(False)
        self.head, _ = fuse([decoder.lm_head])
        if decoder.spec.tie_embeddings:
            decoder.model.embed_tokens.weight = decoder.lm_head.weight
        self.blocks = [FusedBlock(cast(Block, block)) for block in decoder.model.layers]
        self.free()

    def free(self) -> None:
        """Hold no more than the weights, until the next ``reserve``."""
        head_dim = self.inner.spec.head_dim
        self.rope = self.head.new_empty((0, 2, 1, head_dim))  # cos and sin by position

    def reserve(self, max_len: int) -> None:
        """Make the table of rotary embeddings for positions below ``max_len``, if it is shorter."""
        if len(self.rope) < max_len:
            at = torch.arange(max_len, device=self.head.device)
            self.rope = torch.stack(self.inner.rope(at, self.head.dtype), 1)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids, positions [N] int64, below what is reserved -> final hidden states [N, hidden]."""
        x = self.inner.model.embed_tokens(ids)
        cos, sin = self.rope[positions.to(x.device)].unbind(1)  # [N, 1, D]
        for layer, block in enumerate(self.blocks):
            block(x, (cos, sin), layer, attend)
        return self.inner.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> [M, V]; row i predicts the token after the one of row i."""
        return hidden @ self.head

    def weights(self) -> dict[str, Tensor]:
        """Weights by Hugging Face name."""
        return self.inner.weights()

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights."""
        load_weights(self.inner, tensors)
