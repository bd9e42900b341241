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
# # Generation that never waits fills the timeline, and trains on samples a few steps old
#
# What you will see: the same training synchronous, one step off and asynchronous, one timeline above the other; the rule that
# bounds how far generation runs ahead; a response of several policies, token by token; what a stale token is worth to a loss;
# a loop that is left and gone on with. Time: half a minute. Hardware: any CPU, no cluster: latencies are simulated.

# %%
import time

import matplotlib.pyplot as plt
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rk
from rlkit.algo import decoupled_policy_loss, group_relative
from rlkit.schedule import Backlog, StalenessRule, asynchronous, one_step_off, synchronous

rk.nb.setup(seed=0)

# %% [markdown]
# ## An engine and a trainer that take their time
#
# On an accelerator a decoding step takes as long for one row as for a hundred, so generation lasts as long as its longest
# response. Two small classes bring that to any CPU: a token takes at least 10 ms, an update 5 ms a response. Each worker
# sleeps for what is left, as if on a device of its own. So the order of events is real, and the latencies are *simulated*.

# %%
STEPS, SIZE, N = rk.nb.pick(8, ci=4), 4, 4


class SlowEngine(rk.TorchEngine):
    def step(self, **options):
        start = time.monotonic()
        found = super().step(**options)
        time.sleep(max(0.0, 0.01 - (time.monotonic() - start)))
        return found


class SlowActor(rk.ActorWorker):
    def _update(self, batch, *args, **options):
        time.sleep(0.005 * len(batch))
        return super()._update(batch, *args, **options)


# %% [markdown]
# ## The parts of a loop
#
# A schedule is a function over five parts: prompts, generate, prepare (score), train, and hand over the weights. At a
# temperature of 6 some responses end soon and some run on. The reward counts digits in their places, so that groups differ.

# %%
def in_place(prompt, response, answer):
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


class Parts:
    def __init__(self, cluster):
        model = rk.models.tiny(pretrained="reverse_digits")
        self.task = rk.tasks.reverse_digits(length=6)
        options = {"engine": SlowEngine, "max_new_tokens": 60, "max_rows": 32}
        self.rollout = cluster.spawn(rk.RolloutWorker, model, **options)
        self.actor = cluster.spawn(SlowActor, model, lr=1e-3)
        self.sync = rk.Resharder(source=self.actor, target=self.rollout).reshard
        self.prompts = self.task.batches(size=SIZE, steps=STEPS)

    def generate(self, prompts):
        return self.rollout.generate(prompts, n=N, temperature=6.0)

    def prepare(self, batch):
        batch["rewards"] = rk.score(in_place, batch)
        advantages = group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)

    def train(self, batch):
        batch["old_logprobs"] = self.actor.compute_logprobs(batch)
        return self.actor.update(batch, loss_fn=decoupled_policy_loss)


# %% [markdown]
# `synchronous` and `one_step_off` call `generate`. `asynchronous` takes a feed in its place, which generates by itself in
# slices, and a rule. In a slice of 50 ms an engine writes up to five tokens of every response; new weights come in between two.

# %%
def run(schedule, max_staleness=None):
    with rk.launch(backend="local", seed=0) as cluster, rk.trace.use(rk.trace.Trace()) as trace:
        parts = Parts(cluster)
        rest = (parts.prepare, parts.train, parts.sync)
        if max_staleness is None:
            records = list(schedule(parts.prompts, parts.generate, *rest))
        else:
            feed = rk.RolloutFeed(parts.rollout, n=N, temperature=6.0, seconds=0.05)
            rule = StalenessRule(groups_per_step=SIZE, max_staleness=max_staleness)
            records = list(schedule(parts.prompts, feed, *rest, rule=rule))
        frame = trace.frame()
        return records, frame[frame["stage"].isin(["generate", "logprobs", "update", "reshard"])]


runs = {
    "synchronous": run(synchronous),
    "one step off": run(one_step_off),
    "asynchronous": run(asynchronous, max_staleness=2),
}
assert all(len(records) == STEPS for records, _ in runs.values())

# %% [markdown]
# ## Three timelines, one above the other
#
# Synchronous: one of the two lanes is always empty. One step off: both work at once, and the shorter one waits for the longer.
# Asynchronous: the rollout generates until it is as far ahead as the rule lets it, and weights come in between two slices.

# %%
frames = {name: frame for name, (_, frame) in runs.items()}
rk.viz.plot_timeline(frames, source="simulated")
plt.show()


# %% [markdown]
# Beside each lane stands how long it idles. The price is in the last columns: how many train steps before its training a
# token was sampled, the first one of a response, and all of them on average.

# %%
def ages(record):
    batch = record["batch"]
    return (record["step"] - batch["token_version"])[batch["response_mask"].bool()]


rows = {}
for name, (records, frame) in runs.items():
    idle = rk.trace.idle_fractions(frame).set_index("worker")["idle_fraction"]
    every = [age for record in records for age in ages(record).tolist()]
    rows[name] = {"seconds": frame["end_s"].max() - frame["start_s"].min(), **idle.round(2)}
    rows[name] |= {"oldest token, steps": max(every), "mean, steps": sum(every) / len(every)}
assert rows["synchronous"]["oldest token, steps"] == 0
assert rows["one step off"]["oldest token, steps"] == 1
assert rows["asynchronous"]["mean, steps"] <= 2
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# ## How far ahead
#
# The rule is a pure object of counts. A group may start while floor((N − 1) / groups a step) ≤ version + `max_staleness`
# (AReaL, equation 3), N groups being submitted with it. So it bounds work in flight; it looks at no token.

# %%
rule = StalenessRule(groups_per_step=4, max_staleness=2)
events = {"begin": rule}
events["12 groups start"] = events["begin"].submit(12)
events["7 are finished"] = events["12 groups start"].accept(7)
events["a train step ends"] = events["7 are finished"].advance()
capacity = {event: after.capacity for event, after in events.items()}
assert list(capacity.values()) == [12, 0, 0, 4]
pd.Series(capacity, name="groups that may start")

# %% [markdown]
# ## One response, several policies
#
# By hand: begin, generate for a slice, hand over weights of version 1, go on. Each token has the version of the weights that
# sampled it, and the cache of what was written is computed again, so the next token is of the new weights alone. Darker is
# newer.

# %%
cluster = rk.launch(backend="local", seed=0)
parts = Parts(cluster)
with rk.RolloutFeed(parts.rollout, n=N, temperature=6.0, seconds=0.05) as feed:
    feed.add(next(parts.prompts))
    done = [feed.advance()]
    parts.rollout.load_weights(parts.actor.weights(), version=1)
    while feed.num_running:
        done.append(feed.advance())
batch = rk.Batch.concat([each for each in done if each is not None])
versions = batch["token_version"] * batch["response_mask"]
mixed = (versions == 1).any(1) & (batch["token_version"][:, 0] == 0)
assert mixed.any()
rk.viz.show_tokens(batch, int(mixed.int().argmax()), color="token_version")

# %% [markdown]
# ## What a stale token is worth
#
# The policy that trains has moved away from the one that sampled. `rollout_logprobs` are of the engine at that time,
# `old_logprobs` of the trainer when the batch arrived. Their ratio w is what decoupled PPO weighs a token by; its clip starts
# from `old_logprobs`, so it does not pull back to an old policy. Tokens of age 0 have w = 1.

# %%
drift = []
for record in runs["asynchronous"][0]:
    batch, mask = record["batch"], record["batch"]["response_mask"].bool()
    log_w = (batch["old_logprobs"] - batch["rollout_logprobs"])[mask]
    drift.append(pd.DataFrame({"age, steps": ages(record), "|log w|, nats": log_w.abs()}))
table = pd.concat(drift).groupby("age, steps")["|log w|, nats"].agg(["mean", "max", "size"])
assert table["mean"].get(0, 0.0) < 1e-4
assert table["mean"].iloc[-1] > 1e-4
table

# %% [markdown]
# ## Left early, gone on with
#
# A loop may be left at any time: `break`, an error, the stop button. Nothing half written stays in the engines. With a
# `Backlog` nothing is lost, either: the next loop trains what was ready and generates again what was not. A checkpoint keeps
# it the same way: `with backlog.held() as batches: checkpoint.save(step, batches=batches, ...)`.

# %%
parts = Parts(cluster)
feed = rk.RolloutFeed(parts.rollout, n=N, temperature=6.0, seconds=0.05, max_age=2)
backlog, rest, trained = Backlog(parts.prompts), (parts.prepare, parts.train, parts.sync), []
rule = StalenessRule(groups_per_step=SIZE, max_staleness=2)
for record in asynchronous(backlog, feed, *rest, rule=rule):
    trained += set(record["batch"].meta["group_ids"].tolist())
    break
assert feed.num_running == 0
backlog

# %% [markdown]
# The second loop begins with the version that the actor has. Every group has been trained once in the end. `max_age` above is
# a choice beside: half-written responses whose first token is more than two versions old begin again.

# %%
rule = rule.rebase(version=parts.actor.version)
for record in asynchronous(backlog, feed, *rest, rule=rule):
    trained += set(record["batch"].meta["group_ids"].tolist())
assert len(trained) == len(set(trained)) == STEPS * SIZE
backlog


# %% [markdown]
# ## Exercise: a schedule
#
# Write `ahead(prompts, rollout_step, prepare, train_step, sync, num=...)`, a generator in which the batch of train step s was
# generated by version max(0, s − num): `num` batches lie ready while one is trained. Weights are handed over after each train
# step. A record is `{"step": s, "batch": batch, **metrics}`. With num=0 it is `synchronous`.
#
# <details><summary>Hint</summary>Keep a `collections.deque` of batches. Before each step fill it up to num + 1; `next(asked, None)` says
# when the prompts have ended.</details>

# %% tags=["raises-exception"]
def ahead(prompts, rollout_step, prepare, train_step, sync, *, num):
    raise NotImplementedError("your turn")


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

# %% [markdown]
# With a real loop, after you have written it. Two batches lie ready, so every token is two steps old from the third step on.

# %% tags=["raises-exception"]
parts = Parts(cluster)
records = ahead(parts.prompts, parts.generate, parts.prepare, parts.train, parts.sync, num=2)
[int(ages(record).max()) for record in records]

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
