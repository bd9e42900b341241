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
# # Solutions of notebook 08: a sampler, and the lost row
#
# `units` has the whole groups in the order in which they became whole, and a stable sort keeps it among groups of an age.

# %%
import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.dock import samplers


def newest(rows, n, *, group_size):
    groups = samplers.units(rows, group_size)
    order = np.argsort(-rows.versions[groups[:, 0]], kind="stable")
    return groups[order][: n // group_size].reshape(-1)


# %% [markdown]
# The check of the notebook.

# %%
def check_sampler(fn):
    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1), st.integers(0, 9))
    def run(groups, n):  # two rows each if whole, one else
        ids = np.array([g for g, (_, whole) in enumerate(groups) for _ in range(1 + whole)])
        versions = np.array([groups[g][0] for g in ids])
        rows = samplers.Ready(np.arange(len(ids)), ids, versions, tokens=ids, lengths={})
        right = sorted((-v, g) for g, (v, whole) in enumerate(groups) if whole)[: n // 2]
        assert ids[fn(rows, n, group_size=2)].tolist() == [g for _, g in right for _ in range(2)]

    run()


check_sampler(newest)


# %% [markdown]
# ## The lost row
#
# What the stage says comes first: a row that it has or had needs no column any more.

# %%
def why_not(frame, uid, stage, columns):
    row = frame[frame["uid"] == uid]
    if row.empty:
        return "gone"
    state = row[f"stage:{stage}"].item()
    if state != "waiting":
        return state
    missing = [c for c in columns if c not in row or row[c].item() == "empty"]
    return f"no {missing[0]}" if missing else "ready"


# %% [markdown]
# The check of the notebook.

# %%
def check_why_not(fn):
    @settings(deadline=None)
    @given(st.lists(st.sampled_from(["no y", "ready", "leased by me", "consumed"]), min_size=1))
    def run(right):
        frame = pd.DataFrame({"uid": range(len(right)), "x": "node0"})
        frame["y"] = ["empty" if said == "no y" else "node0" for said in right]
        frame["stage:train"] = [{"no y": "waiting", "ready": "waiting"}.get(s, s) for s in right]
        assert [fn(frame, uid, "train", ["x", "y"]) for uid in frame["uid"]] == right
        assert fn(frame, 99, "train", ["x"]) == "gone"

    run()


check_why_not(why_not)
