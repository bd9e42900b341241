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
# # Solution of notebook 02: a mean over responses
#
# The number a row is its count of trainable tokens; `seq_mean` divides by the rows of the whole step, so the pieces of
# a step add up to its mean.

# %%
import torch

import rlkit as rk


def mean_response_length(batch):
    return batch.seq_mean(batch["response_mask"].sum(1).float())


# %% [markdown]
# The check of the notebook, on three responses of 1, 2 and 5 tokens.

# %%
batch = rk.Batch.from_columns(
    {"response_mask": [torch.ones(n, dtype=torch.int8) for n in (1, 2, 5)]}
).as_step()
pieces = [mean_response_length(batch.select([i])) for i in range(3)]
assert abs(float(sum(pieces)) - 8 / 3) < 1e-6
sum(pieces)
