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
# # Solutions of notebook 07: the filter, and whole steps
#
# NaN is taken out of a group before its values are compared; where nothing is left, nothing differs.

# %%
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import has_signal


def spread(accuracy, group_ids):
    mask = torch.zeros(len(accuracy), dtype=torch.bool)
    for group in group_ids.unique():
        rows = group_ids == group
        found = accuracy[rows & accuracy.isfinite()]
        mask[rows] = len(found) > 0 and bool(found.max() - found.min() > 1e-6)
    return mask


# %% [markdown]
# The check of the notebook.

# %%
values = st.sampled_from([0.0, 0.1, 1.0, float("nan")])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), values), min_size=1, max_size=8))
def check_spread(rows):
    ids, accuracy = (torch.tensor(x) for x in zip(*rows, strict=True))
    assert spread(accuracy, ids).tolist() == has_signal(accuracy, ids).tolist()


check_spread()


# %% [markdown]
# ## Whole steps
#
# First the groups are chosen, then their rows.

# %%
def cut(kept, num_groups):
    chosen = set(list(dict.fromkeys(kept))[:num_groups])
    step = [i for i, group in enumerate(kept) if group in chosen]
    left = [i for i, group in enumerate(kept) if group not in chosen]
    return step, left


# %% [markdown]
# The check of the notebook.

# %%
@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=9), st.integers(0, 6))
def check_cut(kept, num_groups):
    step, left = cut(kept, num_groups)
    assert sorted(step + left) == list(range(len(kept))), "each row once"
    assert step == sorted(step), "rows keep their order"
    chosen, others = {kept[i] for i in step}, {kept[i] for i in left}
    assert not chosen & others, "a group is cut"
    assert len(chosen) == min(num_groups, len(set(kept)))
    assert chosen == set(list(dict.fromkeys(kept))[:num_groups]), "first come, first trained"


check_cut()
