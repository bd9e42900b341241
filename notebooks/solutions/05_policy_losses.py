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
# # Solutions of notebook 05: PPO's clip, and a weight that is capped
#
# Both choose what is under the mask before `exp`: an infinity times 0 would be NaN. `token_mean` divides by the tokens of the
# whole step, so the pieces of a step add up.

# %%
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rk
from rlkit.algo import cispo_loss, clipped_policy_loss


def ratio_of(logprobs, batch):
    mask = batch["response_mask"].bool()
    return torch.where(mask, logprobs - batch["old_logprobs"], 0.0).exp()


def my_clipped_loss(logprobs, batch):
    ratio, advantages = ratio_of(logprobs, batch), batch["advantages"]
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    return batch.token_mean(losses), {}


def my_cispo_loss(logprobs, batch):
    weight = ratio_of(logprobs, batch).clamp(max=1.2).detach()
    return batch.token_mean(-weight * batch["advantages"] * logprobs), {}


# %% [markdown]
# The check of the notebook.

# %%
def random_step(seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=g) > 0.3
    old = torch.where(mask, -torch.rand(4, 5, generator=g), -200.0)
    columns = {"response_mask": mask.long(), "old_logprobs": old}
    columns["advantages"] = torch.randn(4, 5, generator=g)
    return -2 * torch.rand(4, 5, generator=g), rk.Batch.from_columns(columns).as_step()


def check_loss(fn, right):
    @settings(deadline=None)
    @given(seed=st.integers(0, 10_000))
    def run(seed):
        logprobs, step = random_step(seed)
        one, other = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
        total = sum(fn(one[rows], step.select(rows))[0] for rows in ([0, 1, 2], [3]))
        expected = right(other, step)[0]
        torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)
        (total + expected).backward()
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)

    run()


check_loss(my_clipped_loss, clipped_policy_loss)
check_loss(my_cispo_loss, cispo_loss)
