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
# # GRPO takes a tiny model from 20 % to above 90 % in a hundred steps
#
# What you will see: a Ray cluster on this laptop, three kinds of workers, a GRPO loop of ten lines, the reward climbing.
# Time: about two minutes. Hardware: two CPU cores; the same lines run on GPUs and NPUs.

# %%
import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative, kl_k3

rk.nb.setup(seed=0)

# %% [markdown]
# ## The task and the model
#
# Six digits go in, the same digits reversed must come out; an answer is right or wrong. The model, a decoder of 0.23
# million parameters, has seen four things done with a row of digits: sorting it up, sorting it down, copying it,
# reversing it. So it is right about one time in five.

# %%
task = rk.tasks.reverse_digits(length=6)
model = rk.models.tiny(pretrained="reverse_digits")
task, model

# %% [markdown]
# ## The reward
#
# Any function of three strings. It runs beside the data, in a process of the cluster.

# %%
exact_match = lambda prompt, response, answer: float(response == answer)
exact_match("483920>", "029384", "029384"), exact_match("483920>", "483920", "029384")


# %% [markdown]
# ## The loss
#
# PPO's clipped ratio, plus a little KL to the frozen starting point. `logprobs` is `[B, T]`: one entry a response token.
# `token_mean` divides by the trainable tokens of the whole optimizer step, however it is cut into micro-batches.
# Change this cell between two steps of the loop below: the next step uses the new formula.

# %%
def grpo_loss(logprobs, batch):
    loss, metrics = clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)
    kl = batch.token_mean(kl_k3(logprobs, batch["ref_logprobs"]))
    return loss + 1e-3 * kl, metrics | {"policy/kl_ref": kl}


# %% [markdown]
# ## The cluster
#
# `launch` starts Ray here; each `spawn` makes a group of worker processes. The resharder carries the actor's weights to
# the rollout engine, checks that every tensor arrived, and only then publishes the new version.

# %%
cluster = rk.launch(devices="auto")
rollout = cluster.spawn(rk.RolloutWorker, model, engine=rk.TorchEngine)
actor = cluster.spawn(rk.ActorWorker, model, lr=2e-4)
reference = cluster.spawn(rk.ReferenceWorker, model, colocate_with=actor)
resharder = rk.Resharder(source=actor, target=rollout)
cluster

# %% [markdown]
# ## Before training
#
# Greedy answers to prompts that training never sees, and whether they are right.

# %%
held_out = task.held_out(128)
before = rk.evaluate(rollout, held_out, exact_match)
before

# %% [markdown]
# ## The loop
#
# The dashboard moves while the loop runs; without it the loop is the same. A batch here is a handle: the tensors stay in
# the workers' store, `batch["rewards"]` fetches one column.

# %% tags=["dashboard"]
log = rk.MetricLog()
steps = rk.nb.pick(100, ci=3)
dashboard = rk.viz.Dashboard(log, total_steps=steps)
dashboard

# %% [markdown]
# Generate, score, measure, compare within each prompt's group, update, hand the weights back.

# %%
log.start()
for step, prompts in enumerate(task.batches(size=32, steps=steps)):
    batch = rollout.generate(prompts, n=8, temperature=1.0)
    batch["rewards"] = rk.score(exact_match, batch)
    batch["old_logprobs"] = actor.compute_logprobs(batch)
    batch["ref_logprobs"] = reference.compute_logprobs(batch)
    batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))
    metrics = actor.update(batch, loss_fn=grpo_loss, minibatches=2)
    resharder.reshard()
    if step % 20 == 19:
        metrics |= rk.evaluate(rollout, held_out, exact_match)
    log.add(step, metrics, reward=batch["rewards"].mean())
dashboard.close()

# %% [markdown]
# ## What it cost
#
# Reward, throughput and seconds by phase, measured; every tenth step. `rk.metrics.GLOSSARY` says what each name means.

# %% tags=["table"]
frame = log.frame().set_index("step")
seconds = frame.filter(like="time/").rename(columns=lambda name: name[5:-2] + " s")
table = frame[["reward", "throughput/tokens_per_s"]].join(seconds)
table = table.rename(columns={"throughput/tokens_per_s": "tokens/s", "ref_logprobs s": "ref s"})
table.drop(columns=["evaluate s"], errors="ignore").iloc[:: rk.nb.pick(10, ci=1)].round(3)

# %% [markdown]
# ## The reward climbs

# %% tags=["reward-plot"]
rk.viz.plot_reward(log.frame(), target=0.9);

# %% [markdown]
# ## Where the seconds go
#
# One bar a block of steps; its height is the time of a step.

# %%
rk.viz.plot_phases(log.frame());

# %% [markdown]
# ## One group, token by token
#
# The last batch can be looked at: which of the eight responses to one prompt were right, and what advantage that gave.

# %%
groups = [group for group in batch.groups() if group["rewards"].std() > 0]
group = groups[0] if groups else next(batch.groups())
group.frame()[["prompt", "response", "answer", "rewards", "advantages", "policy_version"]]

# %% [markdown]
# ## After training
#
# The same held-out prompts again; then every process ends.

# %% tags=["held-out"]
after = rk.evaluate(rollout, held_out, exact_match)
assert log.frame()["actor/version"].iloc[-1] == steps == rollout.version
assert rk.nb.fast() or after["eval/accuracy"] > 0.9 > before["eval/accuracy"]
cluster.shutdown()
{"before": before, "after": after}
