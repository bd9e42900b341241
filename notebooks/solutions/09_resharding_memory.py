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
# # Solutions of notebook 09: rows that two ranks share, and a fingerprint
#
# Ranges overlap from the larger start to the smaller end. Factors 2 i + 1 are odd, and no two are equal.

# %%
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def overlap(rows, train_tp, infer_tp, source, target):
    start = max(source * rows // train_tp, target * rows // infer_tp)
    stop = min((source + 1) * rows // train_tp, (target + 1) * rows // infer_tp)
    return (start, stop) if start < stop else None


def mark(words):
    return int((words * (2 * torch.arange(len(words)) + 1)).sum())


# %% [markdown]
# The checks of the notebook.

# %%
def check_overlap(fn):
    sizes = st.sampled_from([1, 2, 4, 8])

    @settings(deadline=None)
    @given(st.integers(1, 5), sizes, sizes, st.data())
    def run(each, train_tp, infer_tp, data):
        rows = 8 * each
        source = data.draw(st.integers(0, train_tp - 1))
        target = data.draw(st.integers(0, infer_tp - 1))
        has = np.array_split(np.arange(rows), train_tp)[source]
        both = np.intersect1d(has, np.array_split(np.arange(rows), infer_tp)[target])
        right = (int(both[0]), int(both[-1]) + 1) if len(both) else None
        assert fn(rows, train_tp, infer_tp, source, target) == right

    run()
    return "right"


check_overlap(overlap)


# %% [markdown]
# And of the fingerprint.

# %%
def check_mark(fn):
    words = st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=20)

    @settings(deadline=None)
    @given(words, st.data())
    def run(words, data):
        i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
        one, swapped, changed = (torch.tensor(words) for _ in range(3))
        swapped[[i, j]], changed[i] = one[[j, i]], one[i] + 1
        assert fn(one) != fn(changed)
        assert (fn(one) == fn(swapped)) == (words[i] == words[j])

    run()
    return "right"


check_mark(mark)
