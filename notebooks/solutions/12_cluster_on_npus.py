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
# # Solution of notebook 12: which responses to keep
#
# `where` comes before the sum: NaN times 0 is NaN.

# %%
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit import algo


def kept(old_logprobs, rollout_logprobs, mask, high):
    log_ratios = torch.where(mask.bool(), old_logprobs - rollout_logprobs, 0.0)
    return (log_ratios.sum(1) / mask.sum(1)).exp() <= high


# %% [markdown]
# The check of the notebook.

# %%
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
