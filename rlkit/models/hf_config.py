"""The shape of a model as a Hugging Face ``config.json`` has it."""

from collections.abc import Mapping
from typing import Any

from rlkit.config import MixtureOfExperts, ModelSpec
from rlkit.models.tokenizer import Tokenizer

ARCHITECTURES = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True},
}
"""Architectures with what each adds to Llama's; the decoder computes those without experts."""
EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
}
"""Fields of MixtureOfExperts by their names in a ``config.json``."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a ``config.json``; errors name what the decoder does not compute."""
    name = (config.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture: got {name!r}, need one of {sorted(ARCHITECTURES)}.")
    _check_computed(config, biased="qkv_bias" in ARCHITECTURES[name])
    rope = _rope(config)
    heads = config["num_attention_heads"]
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_positions=config.get("max_position_embeddings", 4096),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=config.get("tie_word_embeddings", False),
        architecture=name,
        moe=_experts(config) if "Moe" in name else None,
        **ARCHITECTURES[name],
    )


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip


def _check_computed(config: Mapping[str, Any], *, biased: bool) -> None:
    """ValueError if a ``config.json`` asks for what the decoder would leave out in silence."""
    missing = [name for name in SIZES if config.get(name) is None]
    if missing:
        raise ValueError(f"config.json: got no {', '.join(missing)}, need the model's sizes.")
    rope = _rope(config)
    kind, part = rope.get("rope_type", rope.get("type")), rope.get("partial_rotary_factor")
    if kind not in (None, "default") or part not in (None, 1.0):
        raise ValueError(f"rope: got {rope}, need plain rotary embeddings (rope_type 'default').")
    if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias", False):
        raise ValueError(
            "mlp: got another activation than silu or biases, need silu without biases."
        )
    if config.get("attention_bias") and not biased:
        raise ValueError("attention_bias: got true, need false but for Qwen2ForCausalLM.")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: got one, need weights that are not quantised.")
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window: got true, need full attention in every layer.")


def _experts(config: Mapping[str, Any]) -> MixtureOfExperts:
    """Experts of a ``config.json``; ValueError for a router or layers that backends leave out."""
    need = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    odd = {name: config[name] for name in need if config.get(name, need[name]) != need[name]}
    if odd or "norm_topk_prob" not in config:  # its default is False
        raise ValueError(
            f"experts: got {odd or 'no norm_topk_prob'}, need weights of the experts that add up "
            f"to 1, in every layer: {need}."
        )
    return MixtureOfExperts(**{ours: config[theirs] for ours, theirs in EXPERTS.items()})


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def spec_to_hf(spec: ModelSpec, tokenizer: Tokenizer, *, dtype: str) -> dict[str, Any]:
    """Content of ``config.json`` for a spec."""
    more = ARCHITECTURES.get(spec.architecture, {})
    for name in ("qkv_bias", "qk_norm", "moe"):
        got, need = getattr(spec, name), more.get(name, False)
        if name == "moe":
            got, need = got is not None, "Moe" in spec.architecture
        if got != need:
            raise ValueError(
                f"ModelSpec.{name}: got {got}, need {need} for {spec.architecture}: a checkpoint "
                f"says it by its architecture, one of {sorted(ARCHITECTURES)}."
            )
    experts: dict[str, Any] = {}
    if spec.moe is not None:
        experts = {theirs: getattr(spec.moe, ours) for ours, theirs in EXPERTS.items()}
        experts |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    model_type = spec.architecture.removesuffix("ForCausalLM").replace("Moe", "_moe").lower()
    return experts | {
        "architectures": [spec.architecture],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "torch_dtype": dtype,
    }
