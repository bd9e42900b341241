# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The lines of a laptop train on a cluster of NPUs, and what engine and trainer disagree on is measured
#
# What you will see: what this machine has, which worker has which device, a step that is the same on every kind of device,
# how far the engine's probabilities are from the trainer's, and a weight that makes up for it. Time: a minute. Hardware: NPUs
# if there are any; else two CPU cores.

# %%
from functools import partial

import pandas as pd
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.display import Markdown

import rlkit as rk
from rlkit import algo

rk.nb.setup(seed=0)

# %% [markdown]
# ## What is here
#
# [docs/install_ascend.md](../docs/install_ascend.md) has the versions that fit together on NPUs.

# %%
rk.check_setup()

# %% [markdown]
# Everything below asks for `devices="auto"`: NPUs before GPUs before CPUs.

# %%
kind = rk.device.platform("auto").kind
note = f"**{rk.device.num_devices(kind)} devices of kind `{kind}`: the cells below run on them.**"
if kind != "npu":
    note = (
        f"> **There is no NPU on this machine. The cells below run on `{kind}`**: their numbers "
        "are those of this machine, and say nothing of an NPU's speed or memory. No line of them "
        "is another one on NPUs, but for the engine, which is vLLM there."
    )
Markdown(note)

# %% [markdown]
# ## Workers and their devices
#
# A group has a device a worker. On NPUs and GPUs a worker sees only its own, by `ASCEND_RT_VISIBLE_DEVICES` or
# `CUDA_VISIBLE_DEVICES`, which Ray sets; the reference shares the actor's.

# %%
cluster = rk.launch(devices="auto", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
engine = rk.VLLMEngine if kind == "npu" else rk.TorchEngine
actor = cluster.spawn(rk.ActorWorker, model, n=2, lr=2e-4)
rollout = cluster.spawn(rk.RolloutWorker, model, n=1, engine=engine)
resharder = rk.Resharder(source=actor, target=rollout)
workers = cluster.frame()
assert len(workers) == 3
workers

# %% [markdown]
# **More nodes.** On the first one `ray start --head`, on each other one `ray start --address=FIRST:6379`, and here
# `rk.launch(address="FIRST:6379", devices="npu", num_devices=16)`. Ray counts NPUs by itself if CANN's `acl` can be imported;
# else tell it: `--resources='{"NPU": 8}'`. All nodes need the same packages.

# %% [markdown]
# ## A step, and how far engine and trainer are apart
#
# Engine and trainer compute the probability of the same token with other kernels, perhaps in other number formats. Then the
# policy that sampled is not quite the one that is trained. `mismatch_metrics` says how far, in every step; the loss below
# weighs each token by trainer over engine, at most 2 (truncated importance sampling).

# %%
weight = partial(algo.truncated_importance_weight, cap=2.0)


def loss(logprobs, batch):
    value, metrics = algo.decoupled_policy_loss(logprobs, batch, weight=weight)
    return value, metrics | algo.mismatch_metrics(batch)


def train(rollout, resharder, *, steps):
    task, log = rk.tasks.reverse_digits(length=6), rk.MetricLog()
    resharder.reshard()
    for step, prompts in enumerate(task.batches(size=8, steps=steps)):
        batch = rollout.generate(prompts, n=4)
        batch["rewards"] = rk.score(task.verify, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        advantages = algo.group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)
        metrics = actor.update(batch, loss_fn=loss)
        resharder.reshard()
        log.add(step, metrics, reward=batch["rewards"].mean())
    return log


# %% [markdown]
# Every recipe does the same with one field of its config: `GRPOConfig(correction=weight)`.

# %%
NAMES = ["reward", "mismatch/logprob_mean", "mismatch/logprob_max", "mismatch/kl"]
NAMES += ["policy/behaviour_weight_max"]
near = train(rollout, resharder, steps=rk.nb.pick(6, ci=2)).frame()
near.set_index("step")[NAMES]

# %% [markdown]
# ## An engine in bfloat16
#
# Half the bytes, and probabilities that are off by some percent. vLLM-Ascend generates in bfloat16, so this is what to
# expect of NPUs; here it is the same engine with rounded weights.

# %%
del rollout, resharder
half = partial(engine, dtype=torch.bfloat16)
rollout = cluster.spawn(rk.RolloutWorker, model, n=1, engine=half)
resharder = rk.Resharder(source=actor, target=rollout)
far = train(rollout, resharder, steps=rk.nb.pick(6, ci=2)).frame()
assert far["mismatch/kl"].mean() > 10 * near["mismatch/kl"].mean()
far.set_index("step")[NAMES]

# %% [markdown]
# Tokens by ratio, on a logarithmic axis. Nearly all lie in the middle; the weight is for those outside.

# %%
rk.viz.plot_mismatch({"engine in float32": near, "engine in bfloat16": far});

# %% [markdown]
# ## Two weights
#
# One clamps a weight that is too large (often called TIS), one leaves the token out. Ratios of trainer to engine:

# %%
ratios = torch.tensor([[0.2, 0.9, 1.0, 1.5, 3.0, 40.0]])
columns = ratios.log(), torch.zeros_like(ratios), torch.ones_like(ratios)
made = {
    "ratio": ratios[0],
    "truncated, cap 2": algo.truncated_importance_weight(*columns, cap=2.0)[0],
    "masked, 0.5 to 2": algo.masked_importance_weight(*columns, low=0.5, high=2.0)[0],
}
table = pd.DataFrame({name: values.tolist() for name, values in made.items()}).round(3)
assert table["masked, 0.5 to 2"].tolist() == [0, 0.9, 1, 1.5, 0, 0]
table


# %% [markdown]
# ## Exercise: leave whole responses out
#
# One token of a response that went wrong often drags the others along. Write `kept(old_logprobs, rollout_logprobs, mask, high)`
# of [B, T] tensors: a boolean for each response, true where the geometric mean of the ratios of its tokens (those with mask 1)
# is at most `high`. Every response has a token.
#
# <details><summary>Hint</summary>The geometric mean is exp of the mean of the logarithms. What lies under the mask may be
# anything, NaN included.</details>

# %% tags=["raises-exception"]
def kept(old_logprobs, rollout_logprobs, mask, high):
    raise NotImplementedError("your turn")


def check_kept(fn):
    @settings(deadline=None)
    @given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31))
    def run(rows, tokens, seed):
        made = torch.Generator().manual_seed(seed)
        old, rollout = (torch.randn(rows, tokens, generator=made) for _ in range(2))
        mask = torch.rand(rows, tokens, generator=made) < 0.6
        mask[:, 0] = True
        old[~mask] = torch.nan
        level = algo.per_sequence_mean
        right = algo.masked_importance_weight(old, rollout, mask, high=1.5, level=level)
        assert fn(old, rollout, mask, 1.5).tolist() == (right[:, 0] > 0).tolist()

    run()
    return "right"


check_kept(kept)

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
