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
# # An advantage is a reward minus a baseline, and what it is divided by decides which prompts count
#
# What you will see: four estimators on the same rewards, what the division by the standard deviation does to prompts that
# are nearly always or nearly never solved, and how much noise a baseline takes out of the gradient. Time: half a minute.
# Hardware: any CPU, no cluster.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

import rlkit as rk
from rlkit.algo import dr_grpo, group_relative, reinforce_pp, rloo

rk.nb.setup(seed=0)

# %% [markdown]
# ## Rewards in, advantages out
#
# An advantage function gets rewards [B] and group ids [B], in any order, and returns one number a response. Here are
# four prompts with four responses each: never, once, twice and always solved.

# %%
rewards = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1.0])
group_ids = torch.arange(4).repeat_interleave(4)
estimators = {"GRPO": group_relative, "Dr. GRPO": dr_grpo, "RLOO": rloo}
estimators["REINFORCE++"] = reinforce_pp  # a mean for all prompts at once
columns = {name: fn(rewards, group_ids) for name, fn in estimators.items()}
columns["REINFORCE++"] = reinforce_pp(rewards)
table = pd.DataFrame({"prompt": group_ids, "reward": rewards, **columns}).drop_duplicates()
table.round(2)

# %% [markdown]
# Within a group the baseline is the group's mean, so the advantages of a prompt sum to 0, and a prompt whose responses
# are all equal has none. REINFORCE++ takes the mean of the batch: there the prompt that is always solved is rewarded, too.

# %%
for name in ("GRPO", "Dr. GRPO", "RLOO"):
    assert columns[name].reshape(4, 4).sum(1).abs().max() < 1e-5
    assert columns[name].reshape(4, 4)[[0, 3]].abs().max() == 0
sums = pd.DataFrame({name: x.reshape(4, 4).sum(1) for name, x in columns.items()})
sums.rename_axis("prompt").round(2)

# %% [markdown]
# ## What the division does
#
# Of eight responses k are right. GRPO divides by the standard deviation of the group, which is smallest where k is 1 or 7:
# there the odd one out counts most. Dr. GRPO and RLOO leave the size of the difference as it is.

# %%
rows = []
for k in range(1, 8):
    group = (torch.arange(8) < k).float()
    for name in ("GRPO", "Dr. GRPO", "RLOO"):
        advantages = estimators[name](group, torch.zeros(8, dtype=torch.int64))
        rows.append({"k": k, "estimator": name, "of a right response": advantages[0].item()})
sizes = pd.DataFrame(rows).pivot(index="k", columns="estimator", values="of a right response")
rk.viz.use_style()
axes = sizes.plot(marker="o", xlabel="right responses of 8", ylabel="advantage of a right one [1]")
assert sizes["GRPO"][1] > 2 > sizes["RLOO"][1] > sizes["Dr. GRPO"][1]
plt.show()

# %% [markdown]
# ## What does not change an advantage
#
# The same number added to all rewards of a prompt, and, with the division, any positive factor.

# %%
shifted = rewards + 10 * group_ids
assert torch.allclose(group_relative(shifted, group_ids), columns["GRPO"], atol=1e-4)
assert torch.allclose(group_relative(3 * rewards, group_ids), columns["GRPO"], atol=1e-4)
assert torch.allclose(dr_grpo(3 * rewards, group_ids), 3 * columns["Dr. GRPO"])
pd.DataFrame({"rewards": rewards, "shifted": shifted, "GRPO": columns["GRPO"]}).tail(4).round(2)

# %% [markdown]
# ## A verifier that fails
#
# Its reward is NaN. It leaves its group and gets 0; the others are judged without it. `group_metrics` counts it.

# %%
failed = rewards.clone()
failed[8] = float("nan")
found = group_relative(failed, group_ids)
assert found[8] == 0
assert torch.equal(found[:8], columns["GRPO"][:8])
{name: float(value) for name, value in rk.algo.group_metrics(failed, group_ids).items()}

# %% [markdown]
# ## What a baseline is for
#
# It takes noise out of the gradient without moving its mean. We measure the norm of the gradient of one policy on batches of
# its own samples, with the bare reward as the advantage, and with RLOO; the learning rate is 0. A right response gets
# 1 + c and a wrong one c. The best policy is the same for every c, but without a baseline c alone makes noise.

# %%
cluster = rk.launch(backend="local", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
task = rk.tasks.reverse_digits(length=6)
rollout = cluster.spawn(rk.RolloutWorker, model)
actor = cluster.spawn(rk.ActorWorker, model, lr=0.0)

rows = []
for prompts in task.batches(size=16, steps=rk.nb.pick(8, ci=2)):
    batch = rollout.generate(prompts, n=8, temperature=1.0)
    batch["rewards"] = rk.score(task.verify, batch)
    batch["old_logprobs"] = actor.compute_logprobs(batch)
    for c in (0.0, 1.0, 4.0):
        given = batch["rewards"] + c
        for name, advantages in {"bare": given, "RLOO": rloo(given, batch["group_ids"])}.items():
            batch["advantages"] = batch.expand(advantages)
            norm = actor.update(batch, loss_fn=rk.algo.clipped_policy_loss)["actor/grad_norm"]
            rows.append({"advantage": name, "c": c, "norm": norm})
norms = pd.DataFrame(rows).groupby(["c", "advantage"])["norm"].mean().unstack()
assert norms["RLOO"].max() - norms["RLOO"].min() < 1e-3
assert norms["bare"][4.0] > 2 * norms["RLOO"][4.0]
norms.round(3)

# %% [markdown]
# ## Exercise: leave one out
#
# Write `leave_one_out(rewards, group_ids)`: the reward minus the mean of the *other* rewards of its group, and 0 for a
# group of one. Rows may lie in any order. Don't call `rloo`.
#
# <details><summary>Hint</summary>`same = group_ids[:, None] == group_ids[None, :]` is [B, B]; take the diagonal out of it,
# then `same.float() @ rewards` is the sum of the others.</details>

# %% tags=["raises-exception"]
from hypothesis import given, settings
from hypothesis import strategies as st


def leave_one_out(rewards, group_ids):
    raise NotImplementedError("your turn")


rows_of_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=9)


def check_leave_one_out(fn):
    """Try a hundred batches; an error shows the smallest that goes wrong."""

    @settings(deadline=None)
    @given(rows=rows_of_groups)
    def run(rows):
        ids, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([float(r) for _, r in rows])
        torch.testing.assert_close(fn(rewards, ids), rloo(rewards, ids), atol=1e-5, rtol=1e-5)

    run()
    return "right"


check_leave_one_out(leave_one_out)


# %% [markdown]
# ## Exercise: an advantage without size
#
# Write `sign_advantage(rewards, group_ids)`: +1 above the mean of its group, −1 below it, 0 at it. What makes it hard
# is floating point: a group whose rewards are all 0.1 must get exactly 0.
#
# <details><summary>Hint</summary>`dr_grpo` already returns exact zeros for groups whose rewards are equal.</details>

# %% tags=["raises-exception"]
def sign_advantage(rewards, group_ids):
    raise NotImplementedError("your turn")


def check_sign_advantage(fn):
    """Try a hundred batches; an error shows the smallest that goes wrong."""

    @settings(deadline=None)
    @given(values=st.lists(st.sampled_from([0.1, 0.2, 0.7]), min_size=1, max_size=7))
    def run(values):
        rewards, ids = torch.tensor(values), torch.zeros(len(values), dtype=torch.int64)
        found = fn(rewards, ids)
        assert set(found.tolist()) <= {-1.0, 0.0, 1.0}
        if len(set(values)) == 1:
            assert found.abs().max() == 0
        else:
            assert found[rewards.argmax()] == 1
            assert found[rewards.argmin()] == -1
        assert torch.equal(fn(4 * rewards, ids), found)

    run()
    return "right"


check_sign_advantage(sign_advantage)

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
