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

from rlkit.config import ModelSpec
from rlkit.models.decoder import Critic, Decoder
from rlkit.models.hf_config import spec_from_hf, spec_to_hf
from rlkit.models.tokenizer import CharTokenizer, Tokenizer, from_folder


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


def need_model(model: Any) -> Pretrained:
    """The model; TypeError for what is none, such as its name."""
    if isinstance(model, Pretrained):
        return model
    raise TypeError(
        f"model: got {model!r}, need rk.models.tiny() or rk.models.load(folder). Nothing is "
        "downloaded by name."
    )


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


def shapes(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Parameters of a dense model by name, ``meta`` tensors."""
    with torch.device("meta"):
        return dict(Decoder(spec).to(dtype).tie().named_parameters())


def load(folder: str | os.PathLike[str]) -> Pretrained:
    """Read a Hugging Face checkpoint folder (Llama, Qwen2, Qwen3, Qwen3-MoE; safetensors only)."""
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{folder / 'config.json'}: not found, need a Hugging Face checkpoint folder. Nothing "
            "is downloaded: pass the path of a folder that is on this machine."
        )
    config = _read_json(folder / "config.json")
    spec = spec_from_hf(config)
    model = Pretrained(spec, _tokenizer(folder, config), _read_weights(folder, spec))
    if spec.moe is None:
        try:
            check_weights(shapes(spec), model.weights, tied=spec.tie_embeddings)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
    return model


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


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    path, named = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: not found, need a tokenizer.json beside config.json. transformers writes one "
            "from older files: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    names = _read_json(named) if named.exists() else {}
    if (characters := names.get("rlkit_characters")) is not None:
        return CharTokenizer(path.read_text(), characters=characters, eos_id=2, pad_id=0, bos_id=1)
    return from_folder(folder, names=names, config=config)


def _read_weights(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            weights |= load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path}: can't be read ({error}); the file is cut short or not safetensors. "
                "Copy it again."
            ) from error
    if not spec.tie_embeddings and "lm_head.weight" not in weights:
        raise ValueError(f"{folder}: no lm_head.weight and tie_word_embeddings is false.")
    tied = weights.get("model.embed_tokens.weight") if spec.tie_embeddings else None
    if tied is not None and not torch.equal(weights.pop("lm_head.weight", tied).to(tied), tied):
        raise ValueError(
            f"{folder}: got an lm_head.weight other than model.embed_tokens.weight, need equal "
            'ones where config.json ties them, or "tie_word_embeddings": false in it.'
        )
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """``model.safetensors``, or the files that its index names, or those that there are."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    named = set(_read_json(index).get("weight_map", {}).values()) if index.exists() else set()
    absent = sorted(name for name in named if not (folder / name).exists())
    if absent:
        raise FileNotFoundError(
            f"{folder}: got no {', '.join(absent[:3])}, need all {len(named)} files that "
            f"{index.name} names; {len(absent)} are missing. Copy them, too."
        )
    files = [folder / name for name in sorted(named)] or sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder}: no .safetensors file, need the checkpoint's weights in it. Of a "
            "pytorch_model.bin transformers makes one: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)."
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the text's bytes, too
        raise ValueError(f"{path}: not JSON ({error}). Copy it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: got a {type(values).__name__}, need a JSON object.")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
