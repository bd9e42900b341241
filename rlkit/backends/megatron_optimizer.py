"""AdamW of megatron-core, and its moments by the names of the weights."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.backends.megatron_model import MegatronOptions
from rlkit.config import OptimConfig
from rlkit.trace import storage_bytes

MOMENTS = ("exp_avg", "exp_avg_sq")


def with_gradients(module: nn.Module, config: Any, options: MegatronOptions) -> Any:
    """The model with buffers for gradients, which data-parallel ranks add up."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=options.distributed_optimizer
    )
    return DistributedDataParallel(config, buffers, module)


def make_optimizer(model: Any, optim: OptimConfig, options: MegatronOptions) -> Any:
    """AdamW over a model ``with_gradients``; its learning rate is set at each step."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=0.0,  # ``step`` clips, after it has looked at the norm
        use_distributed_optimizer=options.distributed_optimizer,
    )
    # No overrides: else norms and biases would not decay.
    return get_megatron_optimizer(
        config, [model], config_overrides={}, use_gloo_process_groups=False
    )


def reduced_norm(model: Any, optimizer: Any) -> float:
    """Add gradients up over ranks; their norm over all of them, each weight counted once."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([model])
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def update(optimizer: Any, *, rate: float, norm: float, max_norm: float) -> None:
    """One step of AdamW on gradients of this norm, clipped."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    if not math.isinf(max_norm):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip_grad_by_total_norm_fp32(parameters, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step_with_ready_grads()


def moments(module: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """What AdamW keeps of each of this rank's tensors, by name; nothing before its first step."""
    names: dict[Any, str] = {parameter: name for name, parameter in module.named_parameters()}
    states = [state for inner in _inner(optimizer) for state in inner.state.items()]
    return {names[parameter]: state for parameter, state in states}


def set_moments(
    module: nn.Module, optimizer: Any, values: Mapping[str, Mapping[str, Tensor]], *, steps: int
) -> None:
    """Replace the moments by ``values``, as moment -> name of the tensor -> value."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for inner in _inner(optimizer):
        inner.state.clear()
        for group in inner.param_groups if values else []:
            for parameter in group["params"]:
                state = {what: values[what][names[parameter]] for what in MOMENTS}
                inner.state[parameter] = state | {"step": torch.tensor(float(steps))}


def gradient_buffers(model: Any) -> list[Tensor]:
    """Memory that gradients lie in, all the time."""
    return [buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers)]


def bytes_held(tensors: Mapping[str, Tensor], model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of weights, buffers of gradients and moments."""
    states = [state for inner in _inner(optimizer) for state in inner.state.values()]
    kept = [x for state in states for x in state.values() if isinstance(x, Tensor)]
    return {
        "weights": storage_bytes(tensors.values()),
        "gradients": storage_bytes(gradient_buffers(model)),
        "optimizer": storage_bytes(kept),
    }


def _inner(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """torch's optimizers in Megatron's: experts have one of their own."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.optimizer is not None:
            yield each.optimizer
