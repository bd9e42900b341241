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
# # Solutions of notebook 11: the split
#
# The two are equal at r = N generate_s / (generate_s + train_s); the best whole number lies beside it.

# %%
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rk
from rlkit import sim
from rlkit.sim import specs
from rlkit.sim.study import Parameters


def balance(generate_s, train_s, devices):
    slower = lambda r: max(generate_s * devices / r, train_s * devices / (devices - r))
    equal = math.floor(devices * generate_s / (generate_s + train_s))
    near = [r for r in range(equal - 1, equal + 3) if 0 < r < devices]
    return min(near, key=lambda r: (slower(r), r))


# %% [markdown]
# The check of the notebook.

# %%
def check_balance(fn):
    @settings(deadline=None)
    @given(st.integers(1, 1000), st.integers(1, 1000), st.integers(2, 64))
    def run(generate_s, train_s, n):
        slower = lambda r: max(generate_s * n / r, train_s * n / (n - r))
        assert fn(generate_s, train_s, n) == min(range(1, n), key=lambda r: (slower(r), r))

    run()


check_balance(balance)


# %% [markdown]
# ## In few simulations
#
# Two neighbours in the middle halve what is left.

# %%
def best_split(cost, counts):
    low, high = 0, len(counts) - 1
    while low < high:
        middle = (low + high) // 2
        if cost(counts[middle]) <= cost(counts[middle + 1]):
            high = middle
        else:
            low = middle + 1
    return counts[low]


# %% [markdown]
# The check of the notebook.

# %%
def check_best_split(fn):
    @settings(deadline=None)
    @given(st.integers(1, 64), st.data())
    def run(size, data):
        best, calls = data.draw(st.integers(0, size - 1)), []
        slopes = data.draw(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)))
        seconds = lambda i: calls.append(i) or slopes[i > best] * abs(i - best)
        assert fn(seconds, range(size)) == best
        assert len(calls) <= 2 * np.log2(size) + 2

    run()


check_best_split(best_split)

# %% [markdown]
# AReaL's 1.5B run, simulated: a half to five eighths of 128 devices should generate, which gives a quarter more tokens a second
# than three quarters. What that rests on are the trainer's fitted costs and the tail of lengths: a quicker trainer needs fewer
# devices, a longer tail more engines, and the split moves back. Rates scatter by a few per cent, so a neighbour may win.

# %%
fit = tomllib.loads(Path("../../experiments/fit.toml").read_text())
lengths = sim.Lengths(mean_tokens=9076, sigma=1.01, limit_tokens=27_648)
run = sim.Run(
    model=rk.ModelSpec.qwen25_1_5b(),
    node=specs.NODE_H800,
    num_devices=128,
    rollout_devices=96,
    workload=sim.Workload(prompts=512, samples=16, prompt_tokens=200, lengths=lengths),
    train=rk.Layout(pp=2),
    minibatches=4,
    reshard=sim.through_storage,
    costs=Parameters(**fit["parameters"]).costs(),
)
schedule = sim.asynchronous(max_staleness=4)
rate = lambda count: sim.simulate(replace(run, rollout_devices=count), schedule).tokens_per_s
best = best_split(lambda count: -rate(count), range(16, 128, rk.nb.pick(4, ci=16)))
assert 48 <= best < 96
{"devices that generate": best, "tokens/s": rate(best), "with three quarters": rate(96)}
