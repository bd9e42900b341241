"""Memory of ``TorchBackend``: planned from the model's shape, and what autograd really keeps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlkit.algo.logprobs import rows_at_once
from rlkit.config import ModelSpec

FP32 = 4


def planned(
    spec: ModelSpec, lengths: Sequence[int], *, num_predicted: int, recompute: bool = False
) -> dict[str, int]:
    """Bytes by category at the fullest moment of ``forward_backward``, when all activations are
    there; everything is fp32.

    lengths [S]: tokens of each packed row that the model reads; num_predicted: response tokens.
    Activations are what autograd keeps of each block (Korthikanti et al., 2022, count the same way)
    and of logprobs; a loss, or entropies, come on top.
    """
    weights = FP32 * spec.num_parameters
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights + FP32 * num_tensors(spec),  # two moments, a count a tensor
        "activations": activations(spec, lengths, num_predicted, recompute=recompute),
    }


def num_tensors(spec: ModelSpec) -> int:
    """Parameters of the decoder, a tied one once."""
    a_layer = 9 + 3 * spec.qkv_bias + 2 * spec.qk_norm
    return a_layer * spec.num_layers + 2 + (not spec.tie_embeddings)


def activations(
    spec: ModelSpec, lengths: Sequence[int], num_predicted: int, *, recompute: bool = False
) -> int:
    """Bytes that autograd keeps between forward and backward; with ``recompute`` of one block at
    a time, beside the inputs of all of them.
    """
    num, longest = sum(lengths), max(lengths, default=0)
    even, padded = num == len(lengths) * longest, len(lengths) * longest
    hidden, query = spec.hidden_size, spec.num_heads * spec.head_dim
    both = query + 2 * spec.num_kv_heads * spec.head_dim  # q, k and v of a token
    # The stream before each half, and its norm; the MLP's gate, silu, up and their product.
    block = num * (4 * hidden + 4 * spec.intermediate_size)
    block += padded * (both + query + spec.num_heads)  # what attention reads, writes, normalises
    if not even:
        block += num * (both + query)  # before it is padded, and after
    if spec.qk_norm:
        block += num * (both - spec.num_kv_heads * spec.head_dim)
    blocks = spec.num_layers * block
    if recompute:
        blocks = spec.num_layers * num * hidden + block
    logits = min(num_predicted, rows_at_once(spec.vocab_size)) * spec.vocab_size
    ends = (num + num_predicted) * hidden + logits
    return FP32 * (blocks + ends)


@contextmanager
def saved_bytes(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Counts what autograd keeps in the ``with`` body: ``[bytes]``, parameters left out, a storage
    once.
    """
    seen = {p.untyped_storage().data_ptr() for p in parameters}
    found, kept = [0], []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(tensor)  # or its address might be another's later
            found[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
