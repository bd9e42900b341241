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
# # A reward is a function, and a verifier that hangs is not a zero
#
# What you will see: rewards that compare text, mathematics and programs, what happens when one of them hangs, several
# rewards as a sum, and each token of a response on the colour of its advantage. Time: half a minute. Hardware: any CPU,
# no cluster.

# %%
import functools
import json
import threading
import time

import pandas as pd

import rlkit as rk
from rlkit import algo, rewards

rk.nb.setup(seed=0)

# %% [markdown]
# ## Text
#
# A reward takes a prompt, a response and an answer, and returns a number. Each of these compares text in its own way:
# all of it, its last number, its last `\boxed{...}`, its shape.

# %%
responses = [
    "1/2",
    "so it is 0.5",
    r"\boxed{\frac{1}{2}}",
    "50%",
    "<think>?</think><answer>3</answer>",
]
functions = [algo.exact_match, algo.number_match, algo.boxed_match, algo.format_reward]
table = pd.DataFrame(
    {fn.__name__: [fn("", response, "1/2") for response in responses] for fn in functions},
    index=pd.Index(responses, name="response"),
)
assert table["number_match"].tolist() == [1, 1, 1, 1, 0]
table

# %% [markdown]
# ## Options by `partial`
#
# A tolerance, another format: fix the argument, and it is a reward again.

# %%
near = functools.partial(algo.number_match, tolerance=1e-2)
one_word = functools.partial(algo.format_reward, pattern=r"\w+")
assert (algo.number_match("", "0.333", "1/3"), near("", "0.333", "1/3")) == (0, 1)
one_word("", "seven", ""), one_word("", "seven or eight", "")

# %% [markdown]
# ## Mathematics
#
# `math_verify` asks a computer algebra system whether two expressions mean the same. The package math-verify limits its
# time by a signal, which works on the main thread of a process only; here it runs in a process of its own, so it gives
# the same from every thread.

# %%
answers = {r"\boxed{x^2+2x+1}": "$(x+1)^2$", r"$\sqrt{8}$": r"$2\sqrt{2}$", "x": "$y$"}
found = [rewards.math_verify("", response, answer) for response, answer in answers.items()]
elsewhere = []
thread = threading.Thread(
    target=lambda: elsewhere.extend(rewards.math_verify("", r, a) for r, a in answers.items())
)
thread.start()
thread.join()
assert found == elsewhere == [1, 1, 0]
found

# %% [markdown]
# ## A hang
#
# Some expressions never come to an end. After two seconds the process is killed, and the reward is NaN, with the reason.
# A zero would say that the response is wrong, which nobody knows.

# %%
start_s = time.monotonic()
verdict = rewards.math_verify("", "$9^{9^{9^{9}}}$", "1")
seconds = time.monotonic() - start_s
assert verdict.outcome == "timeout"
assert 2 <= seconds < 20
verdict

# %% [markdown]
# ## NaN leaves its group
#
# Four responses to one prompt. The group's mean is that of the three rewards that are numbers; the fourth response gets
# the advantage 0.

# %%
batch = rk.Batch.from_columns(
    {
        "prompt": ["2+2="] * 4,
        "response": ["4", "5", "$2^2$", "$9^{9^{9^{9}}}$"],
        "answer": ["4"] * 4,
        "group_ids": [0] * 4,
    }
)
batch["rewards"] = rk.score(rewards.math_verify, batch)
batch["advantages"] = algo.group_relative(batch["rewards"], batch["group_ids"])
assert batch["advantages"][3] == 0
batch.frame()[["response", "rewards", "advantages"]]


# %% [markdown]
# ## Any function can be made killable
#
# The function, and what it captured, travels to the other process.

# %%
def slow(prompt, response, answer):
    time.sleep(float(response))
    return 1.0


killable = rewards.Killable(slow, timeout_s=1.0)
[killable("", "0", ""), killable("", "600", "")]

# %% [markdown]
# ## Several rewards
#
# `combine` adds rewards up with weights. `rk.score` returns the sum and keeps the parts: each becomes a column, and
# `reward_metrics` has their means for the log. Weight 0 watches without rewarding.

# %%
parts = {
    "right": (rewards.math_verify, 1.0),
    "short": (lambda prompt, response, answer: -len(response) / 100, 0.5),
    "exact": (algo.exact_match, 0.0),
}
batch["rewards"] = rk.score(rewards.combine(parts), batch)
pd.Series(rewards.reward_metrics(batch), name="value").to_frame()

# %% [markdown]
# ## Filter on the outcome, not on the sum
#
# In a group that is all wrong the length alone makes a spread, and dividing by a small standard deviation blows it up to
# full size. So the filter of dynamic sampling looks at the column that says right or wrong.

# %%
wrong = rk.Batch.from_columns(
    {
        "prompt": ["2+2="] * 4,
        "response": ["1", "12", "123", "1234"],
        "answer": ["4"] * 4,
        "group_ids": [0] * 4,
    }
)
wrong["rewards"] = rk.score(rewards.combine(parts), wrong)
by_sum = algo.has_signal(wrong["rewards"], wrong["group_ids"])
by_outcome = algo.has_signal(wrong["reward/right"], wrong["group_ids"])
assert by_sum.all()
assert not by_outcome.any()
algo.group_relative(wrong["rewards"], wrong["group_ids"])

# %% [markdown]
# ## Programs
#
# The answer is a list of tests: what the program reads and what it must write. The program runs in a process with limits
# on time, memory, files and processes. Its faults are its own, so a loop without end is a failed test, not NaN.

# %%
tests = json.dumps([{"stdin": f"{n}\n", "stdout": f"{n * n}\n"} for n in (0, 2, 3)])
programs = {
    "right": "n = int(input())\nprint(n * n)",
    "half right": "n = int(input())\nprint(n + n)",
    "raises": "print(1 / 0)",
    "loops": "while True: pass",
    "eats memory": "x = 'x' * 10**10",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "forks": "import os\nwhile True: os.fork()",
}
limits = rewards.Limits(timeout_s=1.0)
verdicts = {
    name: rewards.code_reward("", f"```python\n{code}\n```", tests, limits=limits)
    for name, code in programs.items()
}
assert verdicts["right"] == 1
pd.DataFrame({"reward": verdicts, "outcome": {k: v.outcome for k, v in verdicts.items()}})

# %% [markdown]
# ## What a program can not reach here
#
# Where Linux grants namespaces to this user, a program sees no other process and no network, and can't write outside its
# folder. Elsewhere the limits hold, and that is all. It is an end to accidents, not a security boundary; the docstring
# of `run_tests` lists what it does not protect from.

# %%
pd.Series(rewards.isolation(), name="kept from").to_frame()

# %% [markdown]
# ## Credit by the token
#
# A model answers; right responses get a positive advantage, wrong ones a negative one, the same on each of their tokens.
# Move the mouse over a token for its numbers.

# %%
cluster = rk.launch(backend="local", seed=0)
model = rk.models.tiny(pretrained="reverse_digits")
rollout = cluster.spawn(rk.RolloutWorker, model)
task = rk.tasks.reverse_digits(length=6)
batch = rollout.generate(next(task.batches(size=4, steps=1)), n=8, temperature=1.0)
batch["rewards"] = rk.score(task.verify, batch)
batch["advantages"] = batch.expand(algo.group_relative(batch["rewards"], batch["group_ids"]))
best = int(batch["rewards"].argmax())
assert batch["advantages"][best].max() > 0
rk.viz.show_tokens(batch, best, color="advantages")

# %% [markdown]
# ## Where the model was unsure
#
# The same response by the logprobs of the engine: strong colours are tokens that it hardly expected.

# %%
rk.viz.show_tokens(batch, best, color="rollout_logprobs")

# %% [markdown]
# ## In a training loop
#
# The recipe takes a combined reward; evaluation stays with the task's own verifier. The log has a column a part.

# %%
digits = functools.partial(algo.format_reward, pattern=r"\d{6}")
shaped = rewards.combine({"right": (task.verify, 1.0), "format": (digits, 0.2)})
config = rk.recipes.GRPOConfig(steps=rk.nb.pick(8, ci=2), size=16, eval_every=0)
run = rk.recipes.grpo(cluster, model, task, config, reward_fn=shaped)
frame = run.log.frame()[["step", "reward", "reward/right_mean", "reward/format_mean"]]
total = frame["reward/right_mean"] + 0.2 * frame["reward/format_mean"]
assert (frame["reward"] - total).abs().max() < 1e-6
frame.tail()

# %% [markdown]
# ## Exercise: the last line
#
# Write `last_line(prompt, response, answer)`: 1.0 if the last line of the response that is not blank is the answer,
# spaces around it aside, and else 0.0. Any text must give a reward, the empty one, too.
#
# <details><summary>Hint</summary>`[line.strip() for line in response.splitlines()]`, without the empty ones, may be an
# empty list.</details>

# %% tags=["raises-exception"]
from hypothesis import given
from hypothesis import strategies as st


def last_line(prompt, response, answer):
    raise NotImplementedError("your turn")


def check_last_line(fn):
    """Try a hundred responses; an error shows the smallest that goes wrong."""

    @given(above=st.text(), answer=st.from_regex(r"[a-z0-9]{1,4}", fullmatch=True))
    def run(above, answer):
        assert fn("", above, "no such line") == 0.0
        assert fn("", f"{above}\n  {answer} \n\n", answer) == 1.0
        assert fn("", f"{above}\n{answer}\nor not", answer) == 0.0

    run()
    return "right"


check_last_line(last_line)


# %% [markdown]
# ## Exercise: partial credit
#
# Write `prefix_share(prompt, response, answer)`: the number of characters right before the first that is wrong, over the
# length of the longer of response and answer. Only the answer itself gets 1.0, and a response that rambles on gets less
# than one that stops.
#
# <details><summary>Hint</summary>`zip` pairs the characters; `itertools.takewhile` stops at the first pair that
# differs. Mind two empty texts.</details>

# %% tags=["raises-exception"]
def prefix_share(prompt, response, answer):
    raise NotImplementedError("your turn")


def check_prefix_share(fn):
    """Try a hundred pairs; an error shows the smallest that goes wrong."""

    @given(response=st.text("ab", max_size=6), answer=st.text("ab", max_size=6))
    def run(response, answer):
        reward = fn("", response, answer)
        assert 0.0 <= reward <= 1.0
        assert (reward == 1.0) == (response == answer)
        assert fn("", answer + "x" + response, answer) <= fn("", answer + "x", answer) < 1.0
        if answer:
            assert fn("", answer[:-1], answer) == (len(answer) - 1) / len(answer)

    run()
    return "right"


check_prefix_share(prefix_share)

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
rewards.close()
