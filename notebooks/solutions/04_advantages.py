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
# # Solutions of notebook 04: leave one out, and an advantage without size
#
# The sum of the others is a product with a matrix that has no diagonal; a group of one has no others.

# %%
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import dr_grpo, rloo


def leave_one_out(rewards, group_ids):
    same = (group_ids[:, None] == group_ids[None, :]).fill_diagonal_(False).to(rewards.dtype)
    others = same.sum(1)  # [B]
    return torch.where(others > 0, rewards - same @ rewards / others.clamp(min=1), 0.0)


# %% [markdown]
# The check of the notebook.

# %%
rows_of_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=9)


@settings(deadline=None)
@given(rows=rows_of_groups)
def check_leave_one_out(rows):
    ids, rewards = torch.tensor([g for g, _ in rows]), torch.tensor([float(r) for _, r in rows])
    torch.testing.assert_close(
        leave_one_out(rewards, ids), rloo(rewards, ids), atol=1e-5, rtol=1e-5
    )


check_leave_one_out()


# %% [markdown]
# ## An advantage without size
#
# The mean of three times 0.1 is not exactly 0.1 in floating point; `dr_grpo` looks at the span of the group first.

# %%
def sign_advantage(rewards, group_ids):
    return dr_grpo(rewards, group_ids).sign()


# %% [markdown]
# The check of the notebook.

# %%
@settings(deadline=None)
@given(values=st.lists(st.sampled_from([0.1, 0.2, 0.7]), min_size=1, max_size=7))
def check_sign_advantage(values):
    rewards, ids = torch.tensor(values), torch.zeros(len(values), dtype=torch.int64)
    found = sign_advantage(rewards, ids)
    assert set(found.tolist()) <= {-1.0, 0.0, 1.0}
    if len(set(values)) == 1:
        assert found.abs().max() == 0
    else:
        assert found[rewards.argmax()] == 1
        assert found[rewards.argmin()] == -1
    assert torch.equal(sign_advantage(4 * rewards, ids), found)


check_sign_advantage()
