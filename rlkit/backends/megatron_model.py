"""A ModelSpec as a model of megatron-core: configuration, layers, and what is ours in them.

Attention and norms are rlkit's: Megatron's own attention without TransformerEngine knows no packed
sequences, and its torch norm no sequence parallelism.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.config import Layout, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOptions:
    """What MegatronBackend may do differently; none of it changes numbers beyond rounding."""

    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the tokens, too."""
    distributed_optimizer: bool = False
    """Spread AdamW's moments over data- and context-parallel ranks."""
    recompute: bool = False
    """Keep only each layer's input in the forward pass; compute the rest again in the backward."""


def check_model(spec: ModelSpec, layout: Layout, options: MegatronOptions, *, kind: str) -> None:
    """ValueError for what this backend does not compute."""
    moe = spec.moe
    plain = moe is None or not (moe.num_shared_experts or moe.num_dense_layers or moe.router_bias)
    if spec.mla or not plain:
        raise ValueError(
            f"MegatronBackend: got a {spec.architecture} shape with latent attention, shared "
            "experts, dense layers or a router bias; need Llama, Qwen2, Qwen3 or Qwen3-MoE."
        )
    if spec.num_kv_heads % layout.tp:
        raise ValueError(
            f"MegatronBackend: got tp={layout.tp} for {spec.num_kv_heads} key-value heads, need a "
            "tp that divides them. Lower tp, or raise pp."
        )
    same = layout.tp * layout.cp == layout.tp_of_experts * layout.ep
    if layout.pp > 1 and not same and not layout.rank_order.endswith("pp"):
        raise ValueError(
            f"Layout.rank_order: got {layout.rank_order!r} for {layout.short()}, whose experts "
            "have another dp than the rest of their layer; need pp last, as in Layout's default."
        )
    if options.sequence_parallel and layout.tp == 1:
        raise ValueError(
            "MegatronOptions.sequence_parallel: got True with tp=1, need tp of at least 2. "
            "Leave it out."
        )
    if moe and layout.tp_of_experts > 1 and kind == "cpu":
        raise ValueError(
            f"MegatronBackend: got expert_tp={layout.tp_of_experts} on a CPU, need expert_tp=1: "
            "gloo does not gather parts of different lengths, as tokens of an expert are."
        )
    if moe and layout.tp > 1 and not options.sequence_parallel:
        raise ValueError(
            f"MegatronBackend: got experts with tp={layout.tp} without sequence parallelism, which "
            "Megatron does not train; need MegatronOptions(sequence_parallel=True)."
        )


def make_config(
    spec: ModelSpec, layout: Layout, options: MegatronOptions, device: torch.device
) -> Any:
    """TransformerConfig of a model in a layout."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,  # in the layers, too: else q and k norms get no tp sum
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp_of_experts,
        sequence_parallel=options.sequence_parallel,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_layout=_stages(spec, layout),
        variable_seq_lengths=True,  # packed micro-batches differ in length, and so do ranks
        moe_token_dispatcher_type="alltoall",  # the one for that
        calculate_per_token_loss=True,  # gradients are added up over ranks, never averaged
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        **_experts(spec),
        **(recompute if options.recompute else {}),
    )


def _stages(spec: ModelSpec, layout: Layout) -> list[list[str]] | None:
    """What each pipeline stage holds; None for one stage."""
    if layout.pp == 1:
        return None
    stages = [["decoder"] * num for num in layout.layers_of_stages(spec.num_layers)]
    stages[0] = ["embedding", *stages[0]]
    stages[-1] = [*stages[-1], "loss"]
    return stages


def _experts(spec: ModelSpec) -> dict[str, Any]:
    if spec.moe is None:
        return {}
    return {
        "num_moe_experts": spec.moe.num_experts,
        "moe_ffn_hidden_size": spec.moe.intermediate_size,
        "moe_router_topk": spec.moe.experts_per_token,
        "moe_router_load_balancing_type": "none",  # no auxiliary loss: the user's loss is all
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def make_model(spec: ModelSpec, config: Any, *, vocab_rows: int) -> nn.Module:
    """This rank's stage of the model, weights not set."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    model = GPTModel(
        config,
        _layers(spec, config),
        vocab_rows,
        spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=spec.tie_embeddings,
    )
    _mark_cut(model)
    if model.post_process:
        # The rows that predict something are picked before the output layer, of whole sequences.
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1
    return model


def _layers(spec: ModelSpec, config: Any) -> Any:
    """What this rank's stage is built of."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import transformer_block

    block: Any = transformer_block
    layer: Any = get_gpt_layer_local_spec(
        num_experts=spec.moe and spec.moe.num_experts,
        qk_layernorm=spec.qk_norm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    stage = parallel_state.get_pipeline_model_parallel_rank()
    num = block.get_num_layers_to_build(config, None, stage)
    return block.TransformerBlockSubmodules([layer] * num, Norm)


def _mark_cut(model: nn.Module) -> None:
    """Say which parameters are cut: Megatron's initialisation would, and we leave it out.

    Of all others the norm of gradients counts those of one tensor-parallel rank.
    """
    from megatron.core import tensor_parallel as tp

    cut = tp.ColumnParallelLinear, tp.RowParallelLinear, tp.VocabParallelEmbedding
    for module in model.modules():
        if isinstance(module, cut):
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


class Norm(nn.RMSNorm):
    """RMSNorm whose gradient Megatron adds up over tensor-parallel ranks under sequence
    parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CoreAttention(nn.Module):
    """Causal attention inside each packed sequence, on this rank's heads."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> Tensor:
        """query [N, H, D], key and value [N, K, D] -> [N, H x D]."""
        return packed_seq_params.attend(0, query, key, value).flatten(1)


def packed_params(lengths: Tensor, attend: Any, device: torch.device) -> Any:
    """What Megatron's layers are told of S packed sequences of lengths [S], on all cp ranks."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    longest = int(lengths.max())
    found = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    found.attend = attend  # type: ignore[attr-defined]
    return found
