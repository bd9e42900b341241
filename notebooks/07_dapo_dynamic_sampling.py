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
# # A group without signal is drawn again, so that every step is full
#
# What you will see: how many prompts of a batch teach nothing, rounds of sampling that fill a step, groups left over for the
# next one, why the filter must read the accuracy, and a run of DAPO. Time: half a minute. Hardware: any CPU, no cluster.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

import rlkit as rk
from rlkit.algo import group_relative, has_signal, overlong_penalty

rk.nb.setup(seed=0)

# %% [markdown]
# ## Prompts that teach nothing
#
# Eight responses each to sixteen prompts. Where all are right or all are wrong every advantage is 0: the prompt was paid for
# and does not count.

# %%
cluster = rk.launch(backend="local", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
task = rk.tasks.reverse_digits(length=6)
rollout = cluster.spawn(rk.RolloutWorker, model)
prompts = task.stream(size=16)


def sample(num_missing):
    """A round of sixteen prompts, whatever is missing."""
    batch = rollout.generate(next(prompts), n=8, temperature=1.0)
    batch["accuracy"] = rk.score(task.verify, batch)
    return batch


batch = sample(16)
signal = has_signal(batch["accuracy"], batch["group_ids"]).reshape(16, 8)[:, 0]
right = batch["accuracy"].reshape(16, 8).sum(1)
assert torch.equal(signal, (right > 0) & (right < 8))
pd.DataFrame({"right of 8": right.int().tolist(), "signal": signal.tolist()}).T


# %% [markdown]
# ## Rounds until the step is full
#
# `fill_groups` draws rounds, keeps the groups that pass the filter, never cuts one, and hands over what is too much.

# %%
def keep(group):
    return bool(has_signal(group["accuracy"], group["group_ids"]).any())


filled = rk.tasks.fill_groups(sample, keep, num_groups=16, column="accuracy")
assert len(filled.batch) == 16 * 8
assert all(keep(group) for group in filled.batch.groups())
pd.Series(filled.metrics)

# %% [markdown]
# ## What is left over is the next step's
#
# Three steps in a row. Each is full, no group with signal is lost and none is used twice.

# %%
rows, trained, surplus = [], [], None
for step in range(3):
    filled = rk.tasks.fill_groups(sample, keep, num_groups=16, column="accuracy", surplus=surplus)
    surplus = filled.surplus
    trained += filled.batch.uids.tolist()
    left = 0 if surplus is None else len(surplus) // 8
    rows.append({"step": step, **filled.metrics, "left over": left})
assert len(trained) == len(set(trained)) == 3 * 16 * 8
pd.DataFrame(rows).set_index("step").round(2)

# %% [markdown]
# ## When nothing has signal
#
# A task that is solved, or hopeless, would draw for ever. After `max_rounds` there is an error, which says how many
# groups there are, how many are needed, and the mean accuracy: near 0 the prompts are too hard, near 1 too easy.

# %%
try:
    rk.tasks.fill_groups(
        sample, lambda group: False, num_groups=16, column="accuracy", max_rounds=2
    )
except RuntimeError as error:
    print(error)

# %% [markdown]
# ## Why the filter reads the accuracy
#
# Four responses, all wrong, of different lengths. A penalty for length gives the group spread, so a filter on the shaped
# reward keeps it, and the division by the standard deviation makes full-size advantages of it: the model is taught to be wrong
# in fewer tokens.

# %%
accuracy, ids = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
shaped = accuracy + torch.tensor([-0.1, -0.2, -0.3, -0.4])
assert not has_signal(accuracy, ids).any()
assert has_signal(shaped, ids).all()
advantages = group_relative(shaped, ids)
assert abs(advantages[0] - 1.162) < 1e-3
pd.DataFrame({"accuracy": accuracy, "shaped": shaped, "advantage": advantages}).round(3)

# %% [markdown]
# ## The ramp
#
# The penalty for overlong responses is added after the filter: 0 up to `soft` tokens, −1 from `hard` on.

# %%
lengths = torch.arange(0, 41)
mask = (torch.arange(40)[None] < lengths[:, None]).long()
ramp = overlong_penalty(mask, soft=24, hard=32)
assert ramp[24] == 0
assert ramp[28] == -0.5
assert ramp[40] == -1
rk.viz.use_style()
axes = pd.Series(ramp.numpy()).plot(xlabel="response [tokens]", ylabel="penalty [1]")
plt.show()

# %% [markdown]
# ## The higher upper clip
#
# With a clip at 1.2 a token of probability 0.01 can reach 0.012 in a step, one of 0.9 more than 1. Rare tokens, where
# exploration is, are held back first; 1.28 gives them more room.

# %%
before = torch.tensor([0.01, 0.1, 0.5, 0.9])
room = {f"up to, clip {clip}": (before * (1 + clip)).clamp(max=1).numpy() for clip in (0.2, 0.28)}
table = pd.DataFrame({"before": before.numpy(), **room})
assert (table["up to, clip 0.28"] >= table["up to, clip 0.2"]).all()
table.round(4)

# %% [markdown]
# ## DAPO
#
# `rk.recipes.dapo` is all of it. The `reward` is of the groups kept, so it stays near the middle by construction. What tells
# how good the policy is: `sampling/accuracy`, of everything that was drawn.

# %%
config = rk.recipes.DAPOConfig(steps=rk.nb.pick(18, ci=2), size=16, eval_every=0)
run = rk.recipes.dapo(cluster, model, task, config)
frame = run.log.frame()
names = ["sampling/accuracy", "reward", "sampling/kept_fraction", "sampling/num_rounds"]
frame[["step", *names]].tail(4).round(3)

# %% [markdown]
# As the policy gets better fewer groups have signal, and a step takes more rounds: DAPO has fewer, fuller steps, not
# fewer samples.

# %%
axes = frame.set_index("step")[names[:3]].plot(xlabel="step", ylabel="[1]")
drawn = frame["sampling/num_responses"].sum()
assert drawn == frame["sampling/num_rounds"].sum() * 16 * 8
plt.show()

# %% [markdown]
# ## Exercise: the filter
#
# Write `spread(accuracy, group_ids)`: a mask [B] that is true for the rows of groups whose accuracies differ. Rows may lie in
# any order, and a NaN (a verifier that failed) takes no part. Don't call `has_signal`.
#
# <details><summary>Hint</summary>Loop over `group_ids.unique()`; compare the largest and the smallest finite value of each
# group, and mind a group that has none.</details>

# %% tags=["raises-exception"]
from hypothesis import given, settings
from hypothesis import strategies as st


def spread(accuracy, group_ids):
    raise NotImplementedError("your turn")


values = st.sampled_from([0.0, 0.1, 1.0, float("nan")])


def check_spread(fn):
    """Try a hundred batches; an error shows the smallest that goes wrong."""

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), values), min_size=1, max_size=8))
    def run(rows):
        ids, accuracy = (torch.tensor(x) for x in zip(*rows, strict=True))
        assert fn(accuracy, ids).tolist() == has_signal(accuracy, ids).tolist()

    run()
    return "right"


check_spread(spread)


# %% [markdown]
# ## Exercise: whole steps
#
# Write `cut(kept, num_groups)`: from a list of group ids, one a row, in the order they were drawn, to (the rows of this step,
# the rows left over), both lists of row numbers. A step has all the rows of its first `num_groups` groups, and rows keep their
# order.
#
# <details><summary>Hint</summary>`dict.fromkeys(kept)` has each group once, in order of first appearance.</details>

# %% tags=["raises-exception"]
def cut(kept, num_groups):
    raise NotImplementedError("your turn")


def check_cut(fn):
    """Try a hundred lists; an error shows the smallest that goes wrong."""

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 4), max_size=9), st.integers(0, 6))
    def run(kept, num_groups):
        step, left = fn(kept, num_groups)
        assert sorted(step + left) == list(range(len(kept))), "each row once"
        assert step == sorted(step), "rows keep their order"
        chosen, others = {kept[i] for i in step}, {kept[i] for i in left}
        assert not chosen & others, "a group is cut"
        assert len(chosen) == min(num_groups, len(set(kept)))
        assert chosen == set(list(dict.fromkeys(kept))[:num_groups]), "first come, first trained"

    run()
    return "right"


check_cut(cut)

# %% [markdown]
# ## Nothing stays behind

# %%
del run
cluster.shutdown()
