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
# # Solutions of notebook 06: the recursion, and explained variance
#
# From the last token to the first; past the end the next value and the next advantage are 0.

# %%
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import gae


def my_gae(rewards, values, gamma, lam):
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros(())
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[t], advantages[t]
    return advantages


# %% [markdown]
# The check of the notebook.

# %%
numbers = st.integers(-3, 3).map(float)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), *[st.floats(0, 1)] * 2)
def check_my_gae(tokens, gamma, lam):
    rewards, values = (torch.tensor(x) for x in zip(*tokens, strict=True))
    ones = torch.ones(1, len(tokens))
    expected, _ = gae(rewards[None], values[None], ones, gamma=gamma, lam=lam)
    found = my_gae(rewards, values, gamma, lam)
    torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=1e-4)


check_my_gae()


# %% [markdown]
# ## Explained variance
#
# What is under the mask is chosen first, so that nothing else can leak in. An empty choice has no variance.

# %%
def explained_variance(returns, values, mask):
    returns, values = returns[mask.bool()], values[mask.bool()]
    if len(returns) == 0 or returns.max() == returns.min():
        return torch.zeros(())
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


# %% [markdown]
# The check of the notebook.

# %%
@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=8))
def check_explained_variance(tokens):
    returns, noise, mask = (torch.tensor(x)[None].float() for x in zip(*tokens, strict=True))
    kept = returns[mask.bool()]
    varies = len(kept) > 0 and float(kept.max() - kept.min()) > 0
    assert float(explained_variance(returns, returns, mask)) == float(varies)
    assert abs(float(explained_variance(returns, 0 * returns + 2, mask))) < 1e-5
    nonsense = torch.where(mask.bool(), 0.0, 1e6)
    one = explained_variance(returns, noise, mask)
    other = explained_variance(returns + nonsense, noise - nonsense, mask)
    assert float(one) == float(other), "what is under a mask of 0 counts"


check_explained_variance()
