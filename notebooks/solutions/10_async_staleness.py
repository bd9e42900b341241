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
# # Solution of notebook 10: a schedule that generates a fixed number of batches ahead
#
# The deque is filled before each step, when the engine has the weights of the step before. With `num=0` it holds one batch, so
# a batch is generated and trained at once.

# %%
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st


def ahead(prompts, rollout_step, prepare, train_step, sync, *, num):
    asked, ready, step = iter(prompts), deque(), 0
    while True:
        while len(ready) <= num and (prompt := next(asked, None)) is not None:
            ready.append(rollout_step(prompt))
        if not ready:
            return
        batch = ready.popleft()
        prepare(batch)
        metrics = train_step(batch)
        sync()
        yield {"step": step, "batch": batch, **metrics}
        step += 1


# %% [markdown]
# The check of the notebook.

# %%
def check_schedule(fn):
    @settings(deadline=None)
    @given(st.integers(0, 8), st.integers(0, 4))
    def run(steps, num):
        said, served, trained = [], [0], [0]

        def train(batch):
            assert said[-1] == ("prepare", batch)
            trained[0] += 1
            return {"loss": 0.5}

        parts = (
            lambda prompt: (prompt, served[0]),
            lambda batch: said.append(("prepare", batch)),
            train,
            lambda: served.__setitem__(0, trained[0]),
        )
        found = list(fn(iter(range(steps)), *parts, num=num))
        right = [(s, max(0, s - num)) for s in range(steps)]
        assert found == [{"step": s, "batch": right[s], "loss": 0.5} for s in range(steps)]

    run()
    return "right"


check_schedule(ahead)
