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
# # Every column speaks of response tokens, and a mean is right however the batch is cut
#
# What you will see: a batch of names, the one alignment rule, the one denominator rule, the one seed rule. Time: a few
# seconds. Hardware: any CPU, no cluster.

# %%
import torch

import rlkit as rk

rk.nb.setup(seed=0)

# %% [markdown]
# ## A batch is names over a store
#
# Rows have uids and a group (the responses to one prompt). Text, numbers and token rows are columns.

# %%
cluster = rk.launch(backend="local", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
rollout = cluster.spawn(rk.RolloutWorker, model)
task = rk.tasks.reverse_digits(length=4)
batch = rollout.generate(next(task.batches(size=2, steps=1)), n=3, temperature=1.0)
batch

# %% [markdown]
# ## Alignment
#
# `response_ids`, `response_mask`, `rollout_logprobs` and every other `[B, T]` column have the same shape, and entry `t`
# speaks of `response_ids[:, t]`. The shift by one between logits and tokens is written once, in `rlkit.algo.logprobs`.

# %%
names = ["response_ids", "response_mask", "rollout_logprobs", "token_version"]
{name: (tuple(batch[name].shape), batch[name].dtype) for name in names}

# %% [markdown]
# ## Rows have their own lengths
#
# The store holds unpadded rows; `batch["x"]` pads on access with zeros. Lengths are known without fetching anything.
# A group id is the task and the prompt's number in one integer, a uid the group and the sample's number, so both are long;
# `group_ids % 2**32` counts the prompts.

# %%
assert batch["response_ids"].shape[1] == batch.lengths("response_ids").max()
batch.frame()[["uid", "group_ids", "prompt", "response", "finish_reason", "response_tokens"]]

# %% [markdown]
# ## The engine's logprobs are the trainer's
#
# The actor packs the rows end to end and computes the same numbers in another way: the difference is rounding.

# %%
actor = cluster.spawn(rk.ActorWorker, model, lr=0.0)
batch["old_logprobs"] = actor.compute_logprobs(batch)
difference = (batch["old_logprobs"] - batch["rollout_logprobs"]).abs().max()
assert difference < 1e-4
difference

# %% [markdown]
# ## A number a response, spread over its tokens
#
# `expand` is lazy: one number a row travels, and is 0 where the mask is 0.

# %%
batch["rewards"] = rk.score(task.verify, batch)
batch["advantages"] = batch.expand(rk.algo.group_relative(batch["rewards"], batch["group_ids"]))
batch["advantages"]

# %% [markdown]
# ## The denominator
#
# Two micro-batches: one token of loss 4, three tokens of loss 1. The mean over tokens is 1.75. The mean of the two means
# is 2.5: that is what averaging micro-batches gives, and it over-weights short rows.

# %%
frozen = rk.Batch.from_columns(
    {
        "response_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
        "loss": torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
        "group_ids": torch.tensor([0, 0]),
    }
)
step = frozen.as_step()
parts = [piece.token_mean(piece["loss"]) for piece in (step.select([0]), step.select([1]))]
assert sum(parts) == frozen.token_mean(frozen["loss"]) == 1.75
parts, sum(parts)

# %% [markdown]
# ## Whole groups
#
# `minibatches` never cuts a group. Each piece carries the token count of its own optimizer step.

# %%
[(piece["group_ids"].tolist(), piece.step_tokens) for piece in batch.minibatches(2, seed=0)]

# %% [markdown]
# ## The seed
#
# What is sampled depends on the run's seed, a row's uid and the token's position, and on nothing else: here the same
# prompts in the opposite order.

# %%
prompts = next(task.batches(size=2, steps=1))
again = rollout.generate(prompts.select([1, 0]), n=3, temperature=1.0)
first = dict(zip(batch.uids.tolist(), batch["response"], strict=True))
assert first == dict(zip(again.uids.tolist(), again["response"], strict=True))
first

# %% [markdown]
# ## A skipped stage is named
#
# The error says which column is missing and which stage writes it.

# %%
try:
    batch["ref_logprobs"]
except KeyError as error:
    print(error)


# %% [markdown]
# ## Exercise: a mean over responses
#
# Write `mean_response_length(batch)`, the mean number of trainable tokens of a response, so that it stays right when
# the batch is one of several micro-batches of a step. Replace the last line.
#
# <details><summary>Hint</summary>`batch["response_mask"].sum(1)` is a number a row; `batch.seq_mean` has the right
# denominator.</details>

# %% tags=["raises-exception"]
def mean_response_length(batch):
    raise NotImplementedError("your turn")


def check(fn):
    """Compare with the plain mean, on one batch and on its rows one by one."""
    whole = batch.as_step()
    expected = float(batch.num_trainable.mean())
    pieces = [fn(whole.select([i])) for i in range(len(whole))]
    assert abs(float(sum(pieces)) - expected) < 1e-5, f"got {float(sum(pieces))}, need {expected}"
    return "right"


check(mean_response_length)

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
