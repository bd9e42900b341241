"""What each of two, then of four processes does in test_torch_parallel.py."""

import torch
from megatron_ranks import (
    BUDGET,
    both,
    context_of,
    dense_model,
    fails,
    few_rows,
    loss_fn,
    make_batch,
    moments_travel,
)

import rlkit as rk
from rlkit.config import Layout
from rlkit.reshard import Shards, allgather_swap, reshard_over, separate
from rlkit.reshard.plan_layouts import Held, plan_between

SP = rk.TorchOptions(sequence_parallel=True)
RECOMPUTE = rk.TorchOptions(sequence_parallel=True, recompute=True)
FSDP = rk.TorchOptions(fully_shard=True)
FSDP_RECOMPUTE = rk.TorchOptions(fully_shard=True, recompute=True)
FSDP_SP = rk.TorchOptions(fully_shard=True, sequence_parallel=True)
DENSE = {
    "TP2 of an odd vocabulary": ("odd", Layout(tp=2), None),
    "TP2": ("qwen3", Layout(tp=2), None),
    "TP2, biases, tied": ("qwen2", Layout(tp=2), None),
    "TP2, sequence parallel": ("qwen3", Layout(tp=2), SP),
    "TP2, sequence parallel, tied, recomputed": ("qwen2", Layout(tp=2), RECOMPUTE),
    "FSDP2": ("qwen3", Layout(dp=2), FSDP),
    "FSDP2, biases, tied, recomputed": ("qwen2", Layout(dp=2), FSDP_RECOMPUTE),
    "TP2 DP2, sequence parallel, tied": ("qwen2", Layout(tp=2, dp=2), SP),
    "TP2 FSDP2, sequence parallel, tied": ("qwen2", Layout(tp=2, dp=2), FSDP_SP),
    "DP2 before TP2": ("llama", Layout(tp=2, dp=2, rank_order="dp-tp-cp-ep-pp"), FSDP),
}


def weights_move(backend, context) -> dict:
    """Weights after a step on their way to a whole copy on each rank; what an engine does then."""
    batch = make_batch().shard(context.dp_rank, context.dp_size)
    backend.forward_backward_all(batch.microbatches(BUDGET), loss_fn)
    backend.step()
    spec, dtype, num = backend.decoder.spec, "float32", context.layout.num_devices
    held = Held(model=spec, layout=backend.layout, form=backend.form, dtype=dtype)
    whole = Held(model=spec, layout=Layout(), form=separate, dtype=dtype)
    plan = plan_between(held, whole, devices=num, strategy=allgather_swap)
    expected = {name: w.clone() for name, w in backend.state_dict().items()}
    shards = Shards(plan, context.rank, backend.shards)
    group = torch.distributed.distributed_c10d._get_default_group()
    reshard_over(group, shards, version=1, elementwise=True)
    generation = shards.generation
    shards.to_training()
    pairs = (generation, expected), (expected, backend.state_dict())
    return {
        "names": [one.keys() == two.keys() for one, two in pairs],
        "same": [all(torch.equal(one[name], w) for name, w in two.items()) for one, two in pairs],
    }


def swapped(backend, context) -> dict:
    """Weights and moments go to host memory and come back; training goes on as if not."""
    actor = rk.ActorWorker(
        dense_model("qwen3"), backend=lambda model, **_: backend, context=context
    )
    before = {name: t.clone() for name, t in backend.resident().items()}
    actor.offload()
    away = sum(t.untyped_storage().nbytes() for t in backend.resident().values())
    actor.onload()
    after = backend.resident()
    same = all(torch.equal(before[name], t) for name, t in after.items())
    return both(backend, context) | {"same": same, "away": away, "memory": backend.memory()}


def critic(backend, context) -> dict:
    """A critic, whose values are those of one process."""
    model = dense_model("qwen3").as_critic()
    model.weights["value_head.weight"] += torch.linspace(-1, 1, 16)
    backend = rk.TorchBackend(model, lr=1e-2, context=context, options=backend.options)
    batch = make_batch()
    value_loss = lambda values, batch: (batch.token_mean((values - 1) ** 2), {})
    mine = batch.shard(context.dp_rank, context.dp_size)
    backend.forward_backward_all(mine.microbatches(BUDGET), value_loss)
    found = backend.step()["grad_norm"], backend.forward(batch)[0].tensor
    one = rk.TorchBackend(model, lr=1e-2)
    one.forward_backward(batch, value_loss)
    return {"found": found, "expected": (one.step()["grad_norm"], one.forward(batch)[0].tensor)}


MORE = {
    "weights, TP2 of an odd vocabulary": ("odd", Layout(tp=2), None, weights_move),
    "errors, FSDP2": ("qwen3", Layout(dp=2), FSDP, fails),
    "few rows, FSDP2": ("qwen3", Layout(dp=2), FSDP, few_rows),
    "moments, TP2 FSDP2": ("qwen2", Layout(tp=2, dp=2), FSDP, moments_travel),
    "weights, FSDP2": ("qwen2", Layout(dp=2), FSDP, weights_move),
    "weights, TP2 FSDP2": ("qwen3", Layout(tp=2, dp=2), FSDP, weights_move),
    "swap, TP2 FSDP2": ("qwen3", Layout(tp=2, dp=2), FSDP, swapped),
    "critic, TP2 FSDP2": ("qwen3", Layout(tp=2, dp=2), FSDP_SP, critic),
}


def on_two(rank: int, store) -> dict:
    """The cases of two ranks."""
    return cases(rank, store, ranks=2)


def odd_on_two(rank: int, store) -> dict:
    """Those of another vocabulary: DTensor of torch 2.10 takes two in a process for one."""
    return cases(rank, store, ranks=2, odd=True)


def on_four(rank: int, store) -> dict:
    """The cases of four ranks."""
    return cases(rank, store, ranks=4)


def cases(rank: int, store, *, ranks: int, odd: bool = False) -> dict:
    found = {}
    for name, (family, layout, options, *rest) in (DENSE | MORE).items():
        if layout.num_devices == ranks and (family == "odd") == odd:
            context = context_of(layout, rank, store, name)
            model, work = dense_model(family), rest[0] if rest else both
            backend = rk.TorchBackend(model, lr=1e-2, context=context, options=options)
            found[name] = work(backend, context)
    return found
