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
# # A critic says what to expect at every token, and PPO then needs one response a prompt
#
# What you will see: values of the states before each token, generalised advantage estimates by hand, a critic that learns
# to tell right responses from wrong ones before they end, and the whole of PPO in a cell. Time: half a minute. Hardware: any
# CPU, no cluster.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, gae, whiten

rk.nb.setup(seed=0)

# %% [markdown]
# ## The parts
#
# `CriticWorker` is the policy's body with a value head in place of the output embedding. The head starts at 0, so the first
# values say nothing: no wrong opinion is better than a random one.

# %%
cluster = rk.launch(backend="local", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
task = rk.tasks.reverse_digits(length=6)
rollout = cluster.spawn(rk.RolloutWorker, model)
actor = cluster.spawn(rk.ActorWorker, model, lr=2e-4)
critic = cluster.spawn(rk.CriticWorker, model, lr=1e-3)
resharder = rk.Resharder(source=actor, target=rollout)
batch = rollout.generate(next(task.batches(size=4, steps=1)), n=1, temperature=1.0)
batch["rewards"] = rk.score(task.verify, batch)
batch["values"] = critic.compute_values(batch)
assert batch["values"].shape == batch["response_ids"].shape
assert batch["values"].abs().max() == 0
batch.frame()[["prompt", "response", "rewards", "response_tokens"]]

# %% [markdown]
# ## GAE by hand
#
# Three tokens, a reward of 1 at the end, a critic that expects 0.5, 0.5 and 0.8. λ = 0 believes the critic: only where its
# opinion changes is there an advantage. λ = 1 believes the reward: every token gets 1 minus what was expected there.

# %%
values, mask = torch.tensor([[0.5, 0.5, 0.8]]), torch.ones(1, 3)
rows = {lam: gae(torch.ones(1), values, mask, lam=lam)[0][0] for lam in (0.0, 0.5, 1.0)}
torch.testing.assert_close(rows[0.0], torch.tensor([0.0, 0.3, 0.2]))
torch.testing.assert_close(rows[1.0], 1 - values[0])
table = pd.DataFrame({f"λ = {lam}": x.numpy() for lam, x in rows.items()})
table.rename_axis("token").round(3)


# %% [markdown]
# ## The critic alone
#
# First the policy stays as it is and the critic learns what to expect of it. λ = 1, so the returns are the rewards and
# lean on no critic. The loss falls from half the mean square of the rewards.

# %%
def sample(prompts, n):
    """A scored batch with the values of now."""
    batch = rollout.generate(prompts, n=n, temperature=1.0)
    batch["rewards"] = rk.score(task.verify, batch)
    batch["values"] = critic.compute_values(batch)
    return batch


steps, losses = rk.nb.pick(15, ci=3), []
for prompts in task.batches(size=64, steps=steps):
    batch = sample(prompts, n=4)
    mask = batch["response_mask"]
    _, batch["returns"] = gae(batch["rewards"], batch["values"], mask, lam=1.0)
    losses.append(critic.update(batch, minibatches=2)["critic/loss"])
assert losses[-1] < losses[0]
pd.DataFrame({"critic/loss": losses}).rename_axis("step").iloc[:: max(1, steps // 5)].round(4)

# %% [markdown]
# ## Right and wrong part before the end
#
# On new prompts: the mean value at each token of responses that turn out right, and of those that turn out wrong. At
# token 0 the critic can't know. After the first wrong digit it can.

# %%
batch = sample(next(task.batches(size=64, steps=1, start=1000)), n=4)
right = batch["rewards"].bool()
mean = {
    name: batch["values"][rows].mean(0) for name, rows in {"right": right, "wrong": ~right}.items()
}
frame = pd.DataFrame({name: x.numpy() for name, x in mean.items()})
rk.viz.use_style()
axes = frame.plot(marker="o", xlabel="response token", ylabel="value [1]")
if not rk.nb.fast():
    gap = frame["right"] - frame["wrong"]
    assert gap[6] > 0.2 > abs(gap[0])
plt.show()

# %% [markdown]
# ## PPO
#
# One response a prompt: no group, the critic is the baseline. GAE, whitening over all tokens, one update of the critic and
# one of the actor.

# %%
log = rk.MetricLog()
for step, prompts in enumerate(task.batches(size=128, steps=rk.nb.pick(20, ci=2), start=20)):
    batch = sample(prompts, n=1)
    batch["old_logprobs"] = actor.compute_logprobs(batch)
    mask = batch["response_mask"]
    advantages, batch["returns"] = gae(batch["rewards"], batch["values"], mask, lam=0.95)
    batch["advantages"] = whiten(advantages, mask)
    metrics = critic.update(batch, minibatches=2)
    metrics |= actor.update(batch, loss_fn=clipped_policy_loss, minibatches=2)
    resharder.reshard()
    log.add(step, metrics, reward=batch["rewards"].mean())
log.frame()[["step", "reward", "critic/value_mean", "critic/return_mean", "critic/loss"]].tail(4)

# %% [markdown]
# The values follow the reward: what the critic expects has to rise as the policy gets better. The gap between the two
# curves is how far the critic lags. `rk.recipes.ppo` is this loop with GAE computed beside the rows.

# %%
frame = log.frame().set_index("step")[["reward", "critic/value_mean"]]
axes = frame.plot(xlabel="step", ylabel="mean over the batch [1]")
if not rk.nb.fast():
    assert frame["reward"].tail(3).mean() > frame["reward"].head(3).mean() + 0.2
plt.show()

# %% [markdown]
# ## A token's value, in colour
#
# One response, each token on the colour of its value.

# %%
rk.viz.show_tokens(batch, 0, color="values")

# %% [markdown]
# ## Exercise: the recursion
#
# Write `my_gae(rewards, values, gamma, lam)` for one response without gaps: rewards a token [T], values [T] -> advantages
# [T]. δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}; past the end both are 0.
#
# <details><summary>Hint</summary>Walk from the last token to the first and keep the next value and the next advantage.
# </details>

# %% tags=["raises-exception"]
from hypothesis import given, settings
from hypothesis import strategies as st


def my_gae(rewards, values, gamma, lam):
    raise NotImplementedError("your turn")


numbers = st.integers(-3, 3).map(float)


def check_my_gae(fn):
    """Try a hundred responses; an error shows the smallest that goes wrong."""

    @settings(deadline=None)
    @given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), *[st.floats(0, 1)] * 2)
    def run(tokens, gamma, lam):
        rewards, values = (torch.tensor(x) for x in zip(*tokens, strict=True))
        ones = torch.ones(1, len(tokens))
        expected, _ = gae(rewards[None], values[None], ones, gamma=gamma, lam=lam)
        found = fn(rewards, values, gamma, lam)
        torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=1e-4)

    run()
    return "right"


check_my_gae(my_gae)


# %% [markdown]
# ## Exercise: explained variance
#
# Write `explained_variance(returns, values, mask)`: 1 − var(returns − values) / var(returns) over the tokens of the mask, the
# usual measure of a critic. A perfect critic has 1, one that says the same everywhere 0. Where the returns don't vary: 0.
#
# <details><summary>Hint</summary>`x[mask.bool()]` is flat; `var(correction=0)` is also right for one token.</details>

# %% tags=["raises-exception"]
def explained_variance(returns, values, mask):
    raise NotImplementedError("your turn")


def check_explained_variance(fn):
    """Try a hundred batches; an error shows the smallest that goes wrong."""

    @settings(deadline=None)
    @given(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=8))
    def run(tokens):
        returns, noise, mask = (torch.tensor(x)[None].float() for x in zip(*tokens, strict=True))
        kept = returns[mask.bool()]
        varies = len(kept) > 0 and float(kept.max() - kept.min()) > 0
        assert float(fn(returns, returns, mask)) == float(varies)
        assert abs(float(fn(returns, 0 * returns + 2, mask))) < 1e-5
        nonsense = torch.where(mask.bool(), 0.0, 1e6)
        one, other = fn(returns, noise, mask), fn(returns + nonsense, noise - nonsense, mask)
        assert float(one) == float(other), "what is under a mask of 0 counts"

    run()
    return "right"


check_explained_variance(explained_variance)

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
