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
# # This machine can run rlkit
#
# What you will see: versions, devices, a Ray cluster that starts and stops, and a model that answers a prompt.
# Time: half a minute. Hardware: any CPU.

# %%
import rlkit as rk

rk.nb.setup(seed=0)

# %% [markdown]
# ## Packages
#
# What is there, what is missing, and what to do about it. A line that begins with `-` is an extra, which only the
# notebooks that name it need.

# %%
rk.check_setup()

# %% [markdown]
# ## Devices
#
# Found without starting a driver. `rk.launch(devices="auto")` takes the first kind that is not zero; a CPU is always
# there.

# %%
{kind: rk.device.num_devices(kind) for kind in rk.device.PLATFORMS}

# %% [markdown]
# ## A cluster
#
# One line starts Ray on this machine. `spawn` puts a worker class into a process of its own; the group that comes back
# has the class's own methods.

# %%
cluster = rk.launch(devices="auto", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
rollout = cluster.spawn(rk.RolloutWorker, model, engine=rk.TorchEngine)
cluster

# %% [markdown]
# ## A response
#
# The tiny model was warmed up on four behaviours: ascending sort, descending sort, copy, reversal. Which one it shows
# is a matter of chance, until reinforcement learning makes it choose.

# %%
task = rk.tasks.reverse_digits(length=6)
batch = rollout.generate(task.held_out(4), n=2, temperature=1.0)
batch.frame()[["prompt", "response", "answer", "finish_reason"]]

# %% [markdown]
# ## Nothing stays behind
#
# `shutdown` ends every process that `launch` started.

# %%
assert len(batch["response"]) == 8
cluster.shutdown()
cluster
