"""What the engine runs inside vLLM's worker, beside the model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def reload_weights(worker: Any, kind: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill its parameters in place.

    On CPU vLLM drops a layer's weight once it is packed, so layers are rebuilt one by one; that
    leaves a head tied to the embeddings with its old pack (packed again here).
    """
    runner = worker.model_runner
    model = runner.get_model()
    if kind != "cpu":
        model.load_weights(iter(tensors.items()))
        return
    runner.reload_weights(weights_iterator=iter(tensors.items()))
    if getattr(model.config, "tie_word_embeddings", False):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        model.lm_head.weight = model.model.embed_tokens.weight
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


def cache_bytes(worker: Any) -> int:
    """Bytes of the key-value cache."""
    return sum(cache.nbytes for cache in worker.model_runner.kv_caches)
