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
# # A policy loss is a choice of which tokens keep their gradient, and how much each counts
#
# What you will see: five losses on the same tokens, the gradient of each as a function of the probability ratio, three
# ways to average over tokens, and three of the losses in training. Time: half a minute. Hardware: any CPU, no cluster.

# %%
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rk
from rlkit.algo import cispo_loss, clipped_policy_loss, gmpo_loss, gspo_loss, sapo_loss

rk.nb.setup(seed=0)

# %% [markdown]
# ## The loss is 0 and the gradient is not
#
# ρ is the probability of a token now over that when it was sampled. In the first minibatch nothing has moved: ρ is 1, and
# a loss of −ρA is minus the mean of the advantages, which the baseline made 0. Its height says nothing.

# %%
cluster = rk.launch(backend="local", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
task = rk.tasks.reverse_digits(length=6)
rollout = cluster.spawn(rk.RolloutWorker, model)
actor = cluster.spawn(rk.ActorWorker, model, lr=2e-4)
batch = rollout.generate(next(task.batches(size=8, steps=1)), n=8, temperature=1.0)
batch["rewards"] = rk.score(task.verify, batch)
batch["old_logprobs"] = actor.compute_logprobs(batch)
advantages = rk.algo.group_relative(batch["rewards"], batch["group_ids"])
batch["advantages"] = batch.expand(advantages)
metrics = actor.update(batch, loss_fn=clipped_policy_loss)
assert abs(metrics["policy/loss"]) < 0.01 < metrics["actor/grad_norm"]
{name: metrics[name] for name in ("policy/loss", "policy/ratio_mean", "actor/grad_norm")}

# %% [markdown]
# ## Five losses on the tokens of one batch
#
# After a few updates on the same batch the ratios differ from 1. `compare_losses` has a row an objective and token;
# `clipped` is a token with an advantage and no gradient.

# %%
for _ in range(4):
    actor.update(batch, loss_fn=clipped_policy_loss)
batch["logprobs"] = actor.compute_logprobs(batch)
losses = {"PPO": clipped_policy_loss, "GSPO": gspo_loss, "CISPO": cispo_loss}
losses |= {"GMPO": gmpo_loss, "SAPO": sapo_loss}
frame = rk.algo.compare_losses(batch, losses)
rk.viz.loss_summary(frame)

# %% [markdown]
# CISPO and SAPO leave no token without a gradient. GSPO has one ratio a response and a clip of 4e-4, so it leaves out whole
# responses: here, after five updates on one batch, all that have an advantage.

# %%
assert not frame[frame["objective"].isin(["CISPO", "SAPO"])]["clipped"].any()
responses = frame[frame["objective"] == "GSPO"].groupby("uid")["clipped"].mean()
assert set(responses) <= {0.0, 1.0}
axes = rk.viz.plot_losses(frame)
plt.show()


# %% [markdown]
# ## The gradient as a function of the ratio
#
# One token with A = 1 whose ratio we move by hand. What is drawn is how hard the loss pushes its logprob up: PPO stops at
# 1.2, CISPO caps the weight and goes on pushing, SAPO pushes harder for a while and then fades.

# %%
def push(loss_fn, ratios, advantage):
    """Minus d loss / d logprob of a token at each ratio."""
    ones = torch.ones(len(ratios), 1)
    frozen = rk.Batch.from_columns(
        {"response_mask": ones, "old_logprobs": 0 * ones, "advantages": advantage * ones}
    )
    logprobs = ratios.log()[:, None].requires_grad_()
    loss_fn(logprobs, frozen)[0].backward()
    return -logprobs.grad[:, 0] * len(ratios)


ratios = torch.linspace(0.25, 6, 116)
shown = {"PPO": clipped_policy_loss, "CISPO": cispo_loss, "SAPO": sapo_loss}
curves = {name: push(fn, ratios, 1.0).numpy() for name, fn in shown.items()}
rk.viz.use_style()
axes = pd.DataFrame(curves, index=ratios.numpy()).plot(xlabel="ratio ρ [1]", ylabel="push [1]")
assert curves["PPO"][-1] == 0
assert abs(curves["CISPO"][-1] - 1.2) < 1e-6
assert curves["SAPO"][-1] < 1 < curves["SAPO"].max()
plt.show()

# %% [markdown]
# With A = −1 the sides change: PPO lets go below 0.8, and above it has no bound, so a token that has become likely is
# pushed down hard. `dual_clip` bounds that.

# %%
high = torch.tensor([0.7, 1.0, 5.0])
down = {
    "PPO": push(clipped_policy_loss, high, -1.0),
    "PPO, dual_clip=3": push(partial(clipped_policy_loss, dual_clip=3.0), high, -1.0),
    "SAPO": push(sapo_loss, high, -1.0),
}
assert down["PPO"].tolist() == [0, -1, -5]
assert down["PPO, dual_clip=3"][2] == 0
pd.DataFrame({name: x.numpy() for name, x in down.items()}, index=high.numpy()).round(3)

# %% [markdown]
# ## The average decides what a token is worth
#
# Two responses, of one and of four tokens, advantage 1 each. The token mean treats all five tokens alike, so the long
# response has four fifths of the say. The mean of means gives each response half, so its tokens count less. The sum over one
# length for all does neither.

# %%
mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
frozen = rk.Batch.from_columns({"response_mask": mask})
fixed = partial(rk.algo.seq_mean_token_sum, length=4)
aggregates = {"token_mean": rk.algo.token_mean, "seq_mean_token_mean": rk.algo.seq_mean_token_mean}
rows = []
for name, aggregate in {**aggregates, "seq_mean_token_sum, length 4": fixed}.items():
    x = torch.zeros(2, 4, requires_grad=True)
    aggregate(x, frozen).backward()
    row = {"aggregate": name, "short: a token": x.grad[0, 0].item()}
    rows.append(row | {"long: a token": x.grad[1, 0].item(), "long: all": x.grad[1].sum().item()})
weights = pd.DataFrame(rows).set_index("aggregate")
assert weights["long: a token"].round(3).tolist() == [0.2, 0.125, 0.125]
weights


# %% [markdown]
# ## In training
#
# Three losses, one loop, the same prompts. Replacing the loss is replacing a function.

# %%
def train(loss_fn, steps):
    rollout = cluster.spawn(rk.RolloutWorker, model)
    actor = cluster.spawn(rk.ActorWorker, model, lr=2e-4)
    resharder, log = rk.Resharder(source=actor, target=rollout), rk.MetricLog()
    for step, prompts in enumerate(task.batches(size=16, steps=steps)):
        batch = rollout.generate(prompts, n=8, temperature=1.0)
        batch["rewards"] = rk.score(task.verify, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        advantages = rk.algo.group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)
        metrics = actor.update(batch, loss_fn=loss_fn, minibatches=2)
        resharder.reshard()
        log.add(step, metrics, reward=batch["rewards"].mean())
    return log.frame()


runs = {name: train(fn, rk.nb.pick(15, ci=2)) for name, fn in shown.items()}
axes = rk.viz.plot_reward(runs, smooth=5)
pd.DataFrame({name: run["reward"] for name, run in runs.items()}).tail(3)


# %% [markdown]
# One seed and a short run rank nothing; [experiment 020](../experiments/020_algorithms/README.md) has three seeds and nine
# algorithms.
#
# ## How the exercises are checked
#
# On steps of random numbers, cut in two: value and gradient must be those of the library's loss.

# %%
def random_step(seed):
    """A step of four responses, some tokens of them not trainable, with nonsense there."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=g) > 0.3
    old = torch.where(mask, -torch.rand(4, 5, generator=g), -200.0)
    columns = {"response_mask": mask.long(), "old_logprobs": old}
    columns["advantages"] = torch.randn(4, 5, generator=g)
    return -2 * torch.rand(4, 5, generator=g), rk.Batch.from_columns(columns).as_step()


def check_loss(fn, right):
    """Compare value and gradient with the library's, on whole steps cut in two."""

    @settings(deadline=None)
    @given(seed=st.integers(0, 10_000))
    def run(seed):
        logprobs, step = random_step(seed)
        one, other = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
        total = sum(fn(one[rows], step.select(rows))[0] for rows in ([0, 1, 2], [3]))
        expected = right(other, step)[0]
        torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)
        (total + expected).backward()
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)

    run()
    return "right"


check_loss(clipped_policy_loss, clipped_policy_loss)


# %% [markdown]
# ## Exercise: PPO's clip
#
# Write `my_clipped_loss(logprobs, batch)` with both clips at 0.2, without `clipped_policy_loss`: the scalar loss and an
# empty dict. It must be right when the batch is a piece of a step, and when padding holds nonsense.
#
# <details><summary>Hint</summary>`torch.maximum` of two losses [B, T], and `batch.token_mean` for the average. Under the
# mask the ratio may be infinite: choose with `torch.where` before `exp`.</details>

# %% tags=["raises-exception"]
def my_clipped_loss(logprobs, batch):
    raise NotImplementedError("your turn")


check_loss(my_clipped_loss, clipped_policy_loss)


# %% [markdown]
# ## Exercise: a weight that is capped and never lets go
#
# Write `my_cispo_loss(logprobs, batch)`: −w A log π averaged over tokens, w the ratio capped at 1.2, without a gradient of
# its own.
#
# <details><summary>Hint</summary>`w.detach()`.</details>

# %% tags=["raises-exception"]
def my_cispo_loss(logprobs, batch):
    raise NotImplementedError("your turn")


check_loss(my_cispo_loss, cispo_loss)

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
