"""Forms: which tensors a process really holds, made of the parameters of the table.

A form is a function ``(model, layout) -> Form``. Training frameworks and engines fuse matrices that
read the same input; where a row of a fused tensor comes from follows from ``Stored``.
"""

import math
from dataclasses import dataclass

from rlkit.config import Layout, ModelSpec
from rlkit.reshard.plan_tables import parameters


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a rank: the rank's rows of its parts, one below the other."""

    name: str
    """With ``{layer}``, or ``{local}`` for its number within the stage; of experts that are not
    stacked ``{expert}``, or ``{local_expert}`` for its number on the rank."""
    parts: tuple[str, ...]
    """Names of parameters."""
    by_group: bool = False
    """Rows go by key-value head: its queries, its key, its value, then those of the next."""

    @property
    def stacked(self) -> bool:
        """Experts are one tensor [experts of the rank, ...]."""
        return "expert}" not in self.name


@dataclass(frozen=True, slots=True)
class Form:
    """The tensors of a rank, and what they ask of the vocabulary."""

    stored: tuple[Stored, ...]
    vocab_multiple: int = 1
    """The padded vocabulary is a multiple of it, and of tp."""
    tied_name: str = ""
    """Name of the copy of a tied embedding on the last stage, if that is another than the first."""

    def rows_of_vocab(self, vocab_size: int, tp: int) -> int:
        """Rows of the padded embedding."""
        multiple = math.lcm(self.vocab_multiple, tp)
        return -(-vocab_size // multiple) * multiple


LAYER = "model.layers.{layer}."
_EXPERTS = LAYER + "mlp.experts.{expert}."


def separate(model: ModelSpec, layout: Layout) -> Form:
    """Every parameter a tensor of its own, as in Hugging Face checkpoints and rlkit's decoder."""
    stored = (Stored(p.name, (p.name,)) for p in parameters(model))
    return Form(tuple(stored), tied_name="model.embed_tokens.weight")


def vllm(model: ModelSpec, layout: Layout) -> Form:
    """vLLM's modules: q, k, v below each other, gate and up, stacked experts, padding to 64.

    Source: vllm/model_executor/models/{qwen2,qwen3_moe,deepseek_v2}.py, layers/fused_moe.
    """
    fused = [
        Stored(LAYER + f"self_attn.qkv_proj.{kind}", _qkv(kind)) for kind in ("weight", "bias")
    ]
    fused += [_gate_up(LAYER + prefix, "gate_up_proj.weight") for prefix in _MLPS]
    latent = tuple(LAYER + f"self_attn.{x}.weight" for x in ("q_a_proj", "kv_a_proj_with_mqa"))
    fused.append(Stored(LAYER + "self_attn.fused_qkv_a_proj.weight", latent))
    pair = (_EXPERTS + "gate_proj.weight", _EXPERTS + "up_proj.weight")
    fused.append(Stored(LAYER + "mlp.experts.w13_weight", pair))
    fused.append(Stored(LAYER + "mlp.experts.w2_weight", (_EXPERTS + "down_proj.weight",)))
    stored = _with_rest(model, fused, {})
    return Form(stored, vocab_multiple=64, tied_name="model.embed_tokens.weight")


def megatron(model: ModelSpec, layout: Layout) -> Form:
    """Megatron-core's modules: qkv by group, gate and up in linear_fc1, padding to 128 x tp.

    Source: megatron/core/models/gpt/gpt_layer_specs.py (local spec, sequential experts).
    """
    attention, mlp = "decoder.layers.{local}.self_attention.", "decoder.layers.{local}."
    fused = [
        Stored(attention + f"linear_qkv.{kind}", _qkv(kind), by_group=True)
        for kind in ("weight", "bias")
    ]
    fused += [
        Stored(mlp + f"{prefix}linear_fc1.weight", _gate_up(LAYER + prefix, "").parts)
        for prefix in _MLPS
    ]
    expert = mlp + "mlp.experts.local_experts.{local_expert}."
    pair = (_EXPERTS + "gate_proj.weight", _EXPERTS + "up_proj.weight")
    fused.append(Stored(expert + "linear_fc1.weight", pair))
    fused.append(Stored(expert + "linear_fc2.weight", (_EXPERTS + "down_proj.weight",)))
    return Form(_with_rest(model, fused, _MEGATRON), 128 * layout.tp, "output_layer.weight")


_MLPS = ("mlp.", "mlp.shared_experts.")
_MEGATRON = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
} | {
    LAYER + ours: "decoder.layers.{local}." + theirs
    for ours, theirs in {
        "input_layernorm.weight": "input_layernorm.weight",
        "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
        "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
        "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_layernorm.weight": "self_attention.q_layernorm.weight",
        "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_layernorm.weight": "self_attention.kv_layernorm.weight",
        "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
        "mlp.down_proj.weight": "mlp.linear_fc2.weight",
        "mlp.gate.weight": "mlp.router.weight",
        "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
        "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    }.items()
}


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(LAYER + f"self_attn.{name}_proj.{kind}" for name in "qkv")


def _gate_up(prefix: str, name: str) -> Stored:
    return Stored(prefix + name, (prefix + "gate_proj.weight", prefix + "up_proj.weight"))


def _with_rest(model: ModelSpec, fused: list[Stored], names: dict[str, str]) -> tuple[Stored, ...]:
    """The fused tensors that this model has, and every other parameter as a tensor of its own."""
    known = {p.name for p in parameters(model)}
    used = [each for each in fused if known.issuperset(each.parts)]
    covered = {part for each in used for part in each.parts}
    rest = [name for name in (p.name for p in parameters(model)) if name not in covered]
    return (*used, *(Stored(names.get(name, name), (name,)) for name in rest))
