"""A model as it travels.

Shape, tokenizer and weights; loaded from and saved to Hugging Face folders.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.config import MixtureOfExperts, ModelSpec
from rlkit.models.decoder import Critic, Decoder
from rlkit.models.tokenizer import CharTokenizer, Tokenizer, from_folder

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


class Pretrained:
    """Weights by Hugging Face name, the shape they belong to, and the tokenizer.

    Cheap to pass to workers. ``module`` is the class that the weights are of.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        weights: Mapping[str, Tensor],
        *,
        module: type[Decoder] = Decoder,
    ) -> None:
        self.spec, self.tokenizer, self.weights = spec, tokenizer, dict(weights)
        self.module = module

    def build(self, *, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
        """A decoder with a copy of these weights."""
        with torch.device("meta"):
            decoder = self.module(self.spec)
        decoder = decoder.to_empty(device=device).to(dtype).tie()
        load_weights(decoder, self.weights)
        return decoder

    def as_critic(self) -> "Pretrained":
        """A critic that starts from this policy's body; its head is 0, and so is every value."""
        body = {k: v for k, v in self.weights.items() if k != "lm_head.weight"}
        like = self.weights["model.norm.weight"]  # [hidden]
        head = {"weight": torch.zeros_like(like)[None], "bias": torch.zeros_like(like[:1])}
        weights = body | {f"value_head.{name}": value for name, value in head.items()}
        return Pretrained(self.spec, self.tokenizer, weights, module=Critic)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a folder that transformers and vLLM load.

        Config.json, model.safetensors, tokenizer files.
        """
        return save(folder, self.spec, self.tokenizer, self.weights)

    def __repr__(self) -> str:
        return f"Pretrained({self.spec.architecture}, {self.spec.num_parameters:,} parameters)"


def check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, tied: bool) -> None:
    """ValueError that names what is missing from ``weights``, left over or of another shape.

    With ``tied`` embeddings an output head may be among them; it is passed over.
    """
    head = {"lm_head.weight"} if tied else set()
    missing = sorted(set(own) - set(weights) - head)
    unknown = sorted(set(weights) - set(own) - head)
    if missing or unknown:
        raise ValueError(
            f"weights: missing {missing[:3]} ({len(missing)}), not of this model {unknown[:3]} "
            f"({len(unknown)}); "
            "need exactly the model's parameters. Was the checkpoint made for another shape?"
        )
    for name, parameter in own.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(
                f"{name}: got shape {tuple(weights[name].shape)}, need {tuple(parameter.shape)}."
            )


def load_weights(decoder: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a decoder, all or none; errors as of ``check_weights``."""
    own = dict(decoder.named_parameters())
    check_weights(own, weights, tied=decoder.spec.tie_embeddings)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def load(folder: str | os.PathLike[str]) -> Pretrained:
    """Read a Hugging Face checkpoint folder (Llama, Qwen2, Qwen3, Qwen3-MoE; safetensors only)."""
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    spec = spec_from_hf(config)
    return Pretrained(spec, _tokenizer(folder, config), _read_weights(folder, spec))


def save(
    folder: str | os.PathLike[str],
    spec: ModelSpec,
    tokenizer: Tokenizer,
    weights: Mapping[str, Tensor],
) -> Path:
    """Write a Hugging Face checkpoint folder; a tied output embedding is written once."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    keep = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in weights.items()
        if not (spec.tie_embeddings and name == "lm_head.weight")
    }
    dtype = str(next(iter(keep.values())).dtype)[6:]
    save_file(keep, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", spec_to_hf(spec, tokenizer, dtype=dtype))
    (folder / "tokenizer.json").write_text(tokenizer.text)
    extra = (
        {"rlkit_characters": tokenizer.characters} if isinstance(tokenizer, CharTokenizer) else {}
    )
    _write_json(folder / "tokenizer_config.json", tokenizer.config() | extra)
    return folder


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


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found, need a tokenizer.json beside config.json.")
    named = folder / "tokenizer_config.json"
    characters = json.loads(named.read_text()).get("rlkit_characters") if named.exists() else None
    if characters is not None:
        return CharTokenizer(path.read_text(), characters=characters, eos_id=2, pad_id=0, bos_id=1)
    return from_folder(folder, config=dict(config))


def _read_weights(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    whole = folder / "model.safetensors"  # else the parts of a checkpoint in several files
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder}: no .safetensors file, need the checkpoint's weights in it."
        )
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            weights |= load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path}: can't be read ({error}); the file is cut short or not safetensors. "
                "Copy it again."
            ) from error
    if not spec.tie_embeddings and "lm_head.weight" not in weights:
        raise ValueError(f"{folder}: no lm_head.weight and tie_word_embeddings is false.")
    return weights


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found, need a Hugging Face checkpoint folder.")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}).") from error


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
