"""What each of four processes does in test_megatron.py."""

from types import SimpleNamespace

import torch
from small_models import make_model
from torch.multiprocessing.reductions import StorageWeakRef

import rlkit as rk
from rlkit.algo import logprobs
from rlkit.config import Layout, MixtureOfExperts, ModelSpec
from rlkit.models import Pretrained
from rlkit.reshard import Shards, allgather_swap, parameters, reshard_over, separate
from rlkit.reshard.plan_layouts import Held, plan_between

RANKS = 4
BUDGET = 24  # tokens of a micro-batch: four in a step, two on each of two ranks
SIZES = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_layers": 3, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 4, "max_positions": 64,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
    "odd": {"vocab_size": 301},
}
SP, RECOMPUTE, SPREAD = (
    rk.MegatronOptions(sequence_parallel=True),
    rk.MegatronOptions(sequence_parallel=True, recompute=True),
    rk.MegatronOptions(distributed_optimizer=True),
)
DENSE = {
    "one rank": ("llama", Layout(), None),
    "TP2": ("qwen3", Layout(tp=2), None),
    "TP2, biases, tied": ("qwen2", Layout(tp=2), None),
    "TP2, sequence parallel": ("qwen3", Layout(tp=2), SP),
    "TP2, recomputed": ("qwen3", Layout(tp=2), RECOMPUTE),
    "PP2": ("qwen3", Layout(pp=2), None),
    "PP2, tied": ("qwen2", Layout(pp=2), None),
    "PP2 of one and two layers": ("llama", Layout(pp=2, stages=(1, 2)), None),
    "DP2": ("qwen3", Layout(dp=2), None),
    "DP2, distributed optimizer": ("qwen2", Layout(dp=2), SPREAD),
    "TP2 PP2": ("qwen3", Layout(tp=2, pp=2), None),
    "TP2 PP2, sequence parallel, tied": ("qwen2", Layout(tp=2, pp=2), SP),
    "TP2 DP2": ("qwen3", Layout(tp=2, dp=2), None),
    "PP2 DP2": ("llama", Layout(pp=2, dp=2), None),
    "CP2": ("qwen3", Layout(cp=2), None),
    "CP4": ("llama", Layout(cp=4), None),
    "CP2, biases, tied, recomputed": ("qwen2", Layout(cp=2), rk.MegatronOptions(recompute=True)),
    "CP2, distributed optimizer": ("qwen3", Layout(cp=2), SPREAD),
    "TP2 CP2, sequence parallel": ("qwen3", Layout(tp=2, cp=2), SP),
    "CP2 PP2": ("qwen2", Layout(cp=2, pp=2), None),
    "CP2 DP2": ("llama", Layout(cp=2, dp=2), None),
}
EXPERTS = {
    "one rank": (Layout(), None),
    "EP2": (Layout(ep=2), None),
    "EP4": (Layout(ep=4), None),
    "EP2 PP2": (Layout(ep=2, pp=2), None),
    "TP2 EP2": (Layout(tp=2, ep=2, expert_tp=1), SP),
    "CP2 EP2": (Layout(cp=2, ep=2), None),
}


def dense_model(family: str) -> Pretrained:
    return make_model(**SIZES | FAMILIES[family])


def expert_model() -> Pretrained:
    """Qwen3-MoE's shape with random weights."""
    moe = MixtureOfExperts(num_experts=4, experts_per_token=2, intermediate_size=12)
    spec = ModelSpec(**SIZES, architecture="Qwen3MoeForCausalLM", qk_norm=True, moe=moe)
    generator, weights = torch.Generator().manual_seed(3), {}
    for p in parameters(spec, dtype="float32"):
        for layer in p.instances:
            for expert in range(p.shape[0]) if p.experts else [None]:
                shape = p.shape[1:] if p.experts else p.shape
                noise = torch.randn(shape, generator=generator)
                scale = 1.0 if p.vocab or len(shape) == 1 else shape[-1] ** -0.5
                weights[p.named(layer, expert)] = scale * noise + (len(shape) == 1)
    return Pretrained(spec, make_model().tokenizer, weights)


def make_batch() -> rk.Batch:
    """Nine rows of 1 to 9 response tokens, some masked, of four temperatures."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda num: torch.randint(3, 300, (num,), generator=generator)
    lengths = [5, 1, 7, 3, 9, 2, 4, 6, 8]
    masks = [(torch.arange(n) != 2).to(torch.int8) for n in lengths]
    return rk.Batch.from_columns(
        {
            "prompt_ids": [draw(2 + i % 4) for i in range(len(lengths))],
            "response_ids": [draw(n) for n in lengths],
            "response_mask": masks,
            "advantages": [torch.randn(n, generator=generator) for n in lengths],
            "temperature": [(1.0, 0.7, 0.0, 1.3)[i % 4] for i in range(len(lengths))],
        }
    ).as_step()


def loss_fn(logprobs, batch, entropy):
    loss = batch.token_mean(-logprobs * batch["advantages"] - 0.1 * entropy)
    return loss, {"toy/entropy": batch.token_mean(entropy)}


def train(backend, batch: rk.Batch) -> dict:
    """Logprobs and entropies of a rank's rows, then two steps: shares of metrics, and norms."""
    logprobs, entropies = backend.forward(batch, entropy=True)
    found = {"logprobs": logprobs.tensor, "entropies": entropies.tensor, "steps": []}
    before = backend.state_dict()
    found["uids"] = batch.uids.tolist()
    found["lengths"] = batch.lengths("response_ids").tolist()
    found["start"] = {name: w.clone() for name, w in before.items()}
    for _ in range(2):
        pieces = batch.microbatches(BUDGET)
        if hasattr(backend, "forward_backward_all"):
            shares = backend.forward_backward_all(pieces, loss_fn)
        else:
            shares = [backend.forward_backward(piece, loss_fn) for piece in pieces]
        sums = {k: sum(float(each[k]) for each in shares) for k in ("loss", "toy/entropy")}
        found["steps"].append(sums | backend.step())
    found["weights"] = backend.state_dict()
    return found


def context_of(layout: Layout, rank: int, store, name: str) -> rk.WorkerContext:
    size = layout.num_devices
    store = torch.distributed.PrefixStore(name, store)
    peers = SimpleNamespace(store=store, barrier=lambda: None)
    return rk.WorkerContext.at(rank, size, layout, collective=peers, timeout_s=60)


def in_layout(model, layout, options, rank, store, name, work):
    """``work(backend, context)`` on each rank of a layout, then its groups are gone."""
    if rank >= layout.num_devices:
        return None
    context = context_of(layout, rank, store, name)
    backend = rk.MegatronBackend(model, lr=1e-2, context=context, options=options)
    try:
        return work(backend, context)
    finally:
        backend.close()


def both(backend, context) -> dict:
    batch = make_batch().shard(context.dp_rank, context.dp_size)
    found = train(backend, batch) | {"speaks": context.speaks}
    if context.rank:  # compared here: weights are much to send
        found["start"] = found["weights"] = None
    return found


def fails(backend, context) -> dict:
    """A loss that raises on its second micro-batch, one that is NaN, then the usual two steps."""
    batch, calls = make_batch().shard(context.dp_rank, context.dp_size), []

    def raises(logprobs, batch):
        calls.append(len(batch))
        if len(calls) == 2 and context.dp_rank == 0:
            raise ArithmeticError("by design")
        return batch.token_mean(logprobs), {}

    try:
        backend.forward_backward_all(batch.microbatches(BUDGET), raises)
        raised = None
    except (ArithmeticError, rk.checks.PeerError) as error:
        raised = type(error).__name__
    nan = lambda logprobs, batch: (batch.token_mean(logprobs) * float("nan"), {})
    backend.forward_backward_all(batch.microbatches(BUDGET), nan)
    skipped = backend.step()["skipped_steps"]
    found = both(backend, context)
    return found | {"raised": raised, "skipped": skipped}


def few_rows(backend, context) -> list:
    """One row for two data-parallel ranks of experts: the second has only fillers."""
    batch = make_batch().select([4]).as_step().shard(context.dp_rank, context.dp_size)
    backend.forward_all(batch.microbatches(BUDGET))
    backend.forward_backward_all(batch.microbatches(BUDGET), loss_fn)
    return [len(batch), backend.step()["grad_norm"]]


def moments_travel(backend, context) -> dict:
    """Two steps, what a checkpoint holds, a third step; from the checkpoint the same third step."""
    batch = make_batch().shard(context.dp_rank, context.dp_size)
    for _ in range(2):
        backend.forward_backward_all(batch.microbatches(BUDGET), loss_fn)
        backend.step()
    copies = lambda tensors: {name: tensor.clone() for name, tensor in tensors.items()}
    saved = copies(backend.state_dict()), copies(backend.optimizer_state()), backend.num_steps
    memory = backend.memory()
    ends = []
    for _ in range(2):
        backend.forward_backward_all(batch.microbatches(BUDGET), loss_fn)
        backend.step()
        ends.append(copies(backend.state_dict()))
        backend.load_state_dict(saved[0])
        backend.load_optimizer_state(saved[1], num_steps=saved[2])
    same = all(torch.equal(ends[0][name], w) for name, w in ends[1].items())
    return {"same": same, "saved": None if context.rank else saved, "memory": memory}


def tied_copies(backend, context) -> torch.Tensor:
    """A stage's copy of the tied embedding after two steps."""
    batch = make_batch()
    for _ in range(2):
        backend.forward_backward_all(batch.microbatches(BUDGET), loss_fn)
        backend.step()
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    return next(w.detach().clone() for name, w in backend.shards.items() if name in names)


def swaps(backend, context) -> dict:
    """allgather_swap to whole copies, and offload: are storages gone, are they back as before?"""
    expected, moved, found = backend.state_dict(), {}, []
    held = Held(model=backend.spec, layout=backend.layout, form=backend.form, dtype="float32")
    whole = Held(model=backend.spec, layout=Layout(), form=separate, dtype="float32")
    devices = context.layout.num_devices
    plan = plan_between(held, whole, devices=devices, strategy=allgather_swap)
    shards = Shards(plan, context.rank, backend.shards)
    group = torch.distributed.distributed_c10d._get_default_group()

    def move():
        reshard_over(group, shards, version=1)
        moved.update({name: tensor.clone() for name, tensor in shards.generation.items()})

    found.append(out_and_back(backend.shards, move, shards.to_training))
    trained = both(backend, context)
    actor = rk.ActorWorker(dense_model("qwen2"), backend=lambda *_, **__: backend)
    found.append(out_and_back(backend.resident(), actor.offload, actor.onload))
    arrived = [torch.equal(moved[name], w) for name, w in expected.items()]
    return trained | {"swaps": found, "arrived": arrived}


def out_and_back(tensors, out, back) -> dict:
    """What becomes of tensors' storages while they are in host memory, and of their values."""
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    watched = {name: StorageWeakRef(t.untyped_storage()) for name, t in tensors.items()}
    out()
    kept = sorted(name for name, watch in watched.items() if not watch.expired())
    left = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    back()
    same = all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
    return {"kept": kept, "bytes": left, "same": same}


MORE = {
    "swap, TP2 PP2": ("qwen2", Layout(tp=2, pp=2), None, swaps),
    "errors, PP2": ("qwen3", Layout(pp=2), None, fails),
    "errors, TP2 DP2": ("qwen3", Layout(tp=2, dp=2), None, fails),
    "errors, CP2 DP2": ("qwen3", Layout(cp=2, dp=2), None, fails),
    "moments, TP2 PP2": ("qwen2", Layout(tp=2, pp=2), None, moments_travel),
    "tied, PP2": ("qwen2", Layout(pp=2), None, tied_copies),
}


def main(rank: int, store) -> dict:
    """All layouts, one after another, with logits of few rows at a time."""
    logprobs.LOGITS_AT_ONCE, found = 1000, {}
    for name, (family, layout, options) in DENSE.items():
        model = dense_model(family)
        found[name] = in_layout(model, layout, options, rank, store, name, both)
    for name, (layout, options) in EXPERTS.items():
        key = f"experts: {name}"
        found[key] = in_layout(expert_model(), layout, options, rank, store, key, both)
    for name, (family, layout, options, work) in MORE.items():
        model = dense_model(family)
        found[name] = in_layout(model, layout, options, rank, store, name, work)
    for name in ("one rank", "EP2"):
        key, layout = f"few rows: {name}", EXPERTS[name][0]
        found[key] = in_layout(expert_model(), layout, None, rank, store, key, few_rows)
    return found
