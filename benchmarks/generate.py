"""How fast TorchEngine generates, beside ``generate`` of transformers (and vLLM where installed).

    python benchmarks/generate.py --repeats 3
    python benchmarks/generate.py --models 0.2M 5M --sequences 64    # without the slow 135M

Random weights, fp32, temperature 1, prompts of 16 tokens, all sequences at once. Lengths are equal,
or drawn from a lognormal: then a call of transformers runs until its longest row ends, and what
shorter rows go on to sample is thrown away, while an engine stops each where it ends. A ratio is
tokens kept per second over transformers'. Engines also return logprobs, transformers doesn't; it
concatenates its cache anew for every token, so that long responses cost it more.

Systems take turns, ratios are medians over the repeats; CPU ratios are those of CPU seconds, which
other work on the machine disturbs less.
"""

import os

os.environ.pop("OPENBLAS_CORETYPE", None)  # it may force kernels of another processor
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
import transformers

import rlkit as rk
from rlkit.engines import Request
from rlkit.models import Pretrained, tiny_spec

PROMPT_TOKENS = 16
MEDIAN_TOKENS = {"0.2M": 128, "5M": 128, "135M": 32}
"""Equal length, and the median of long-tailed ones."""
SPECS = {
    "0.2M": replace(tiny_spec(), max_positions=1024),
    "5M": rk.ModelSpec(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        max_positions=1024,
        tie_embeddings=True,
    ),
    "135M": rk.ModelSpec(  # SmolLM2-135M
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=1024,
        tie_embeddings=True,
    ),
}

Generate = Callable[[list[int]], int]
"""Lengths of the responses -> tokens sampled; the prompts are as many."""


def make_prompts(spec: rk.ModelSpec, num: int) -> torch.Tensor:
    """[num, PROMPT_TOKENS] random ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, spec.vocab_size, (num, PROMPT_TOKENS), generator=generator)


def of_engine(model: Pretrained) -> Generate:
    """TorchEngine."""
    engine = rk.TorchEngine(model)

    def generate(lengths: list[int]) -> int:
        prompts = make_prompts(model.spec, len(lengths)).tolist()
        responses = engine.generate(
            [
                Request(prompt, [uid], rk.SamplingParams(max_new_tokens=length))
                for uid, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
        )
        return sum(len(response.token_ids) for response in responses)

    return generate


def of_transformers(model: Pretrained, folder: str) -> Generate:
    """One call of ``generate``."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None

    def generate(lengths: list[int]) -> int:
        ids = make_prompts(model.spec, len(lengths))
        with torch.inference_mode():
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=max(lengths),
                pad_token_id=0,
            )
        assert out.shape[1] == PROMPT_TOKENS + max(lengths)
        return sum(lengths)

    return generate


def of_vllm(model: Pretrained, folder: str) -> Generate:
    """vLLM on the CPU."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=1024)

    def generate(lengths: list[int]) -> int:
        prompts = make_prompts(model.spec, len(lengths)).tolist()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0) for n in lengths],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def long_tailed(num: int, median: int) -> list[int]:
    """Lognormal lengths, the longest of 64 about 7 times the median."""
    draws = np.random.default_rng(0).lognormal(np.log(median), 0.8, num)
    return draws.round().astype(int).clip(1, 1024 - PROMPT_TOKENS).tolist()


def measure(systems: dict[str, Generate], lengths: list[int], *, repeats: int) -> dict[str, object]:
    """One row: tokens per second of each system, and ratios to transformers."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, generate in systems.items():
            start = time.perf_counter(), time.process_time()
            assert generate(lengths) == sum(lengths)
            end = time.perf_counter(), time.process_time()
            seconds[name].append((end[0] - start[0], end[1] - start[1]))
    row: dict[str, object] = {}
    for name, found in seconds.items():
        row[f"{name} tokens/s"] = round(sum(lengths) / statistics.median(s for s, _ in found))
    for name in [name for name in systems if name != "transformers"]:
        for kind, at in (("", 0), (" CPU", 1)):
            ratios = [
                theirs[at] / ours[at]
                for theirs, ours in zip(seconds["transformers"], seconds[name], strict=True)
            ]
            row[f"{name} ratio{kind}"] = round(statistics.median(ratios), 2)
    return row


def measure_model(name: str, nums: list[int], *, repeats: int) -> list[dict[str, object]]:
    """Rows of one model."""
    model, rows = rk.models.tiny(spec=SPECS[name]), []
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        systems = {"transformers": of_transformers(model, folder), "TorchEngine": of_engine(model)}
        if importlib.util.find_spec("vllm"):
            systems["vLLM"] = of_vllm(model, folder)
    for generate in systems.values():
        generate([4] * max(nums))
    for num in nums:
        median = MEDIAN_TOKENS[name]
        for kind, lengths in (("equal", [median] * num), ("long", long_tailed(num, median))):
            facts = {"model": name, "sequences": num, "lengths": kind, "tokens": sum(lengths)}
            rows.append(facts | measure(systems, lengths, repeats=repeats))
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16, 64])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for name in options.models:
        rows += measure_model(name, options.sequences, repeats=options.repeats)
    print(f"measured, {options.threads} thread(s), medians of {options.repeats}")
    if not importlib.util.find_spec("vllm"):
        print("vLLM: not installed")
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
