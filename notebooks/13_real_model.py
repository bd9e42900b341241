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
# # A real checkpoint goes in as a folder, and comes out as one
#
# What you will see: a Hugging Face folder loaded, puzzles with a verifier, GRPO on them, held-out accuracy before and after,
# and the trained folder saved, read again and equal. **With the folder of SmolLM2-135M-Instruct this trains a real language
# model. Without it the same cells run on a stand-in of random weights, which learns nothing.** Time: some seconds with
# the stand-in; with the real model about a minute a step. Hardware: two CPU cores, 8 GB.

# %%
import tempfile
from pathlib import Path

import pandas as pd
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.display import Markdown
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import rlkit as rk
from rlkit import algo

rk.nb.setup(seed=0)
FOLDER = Path("../build/smollm2-135m")


# %% [markdown]
# ## The model
#
# `scripts/convert_gguf.py` says how to get that folder: a package of the Python index carries the model. Any folder of a
# Llama, Qwen2 or Qwen3 model will do. The stand-in has a tokenizer of its own and 0.04 million random weights.

# %%
def stand_in():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["State the final answer to the following problem: 1 + 2 ="], trainer)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    sizes |= {"num_kv_heads": 2, "head_dim": 16, "max_positions": 256}
    spec = rk.ModelSpec(vocab_size=inner.get_vocab_size(), **sizes)
    tokenizer = rk.models.Tokenizer(inner.to_str(), eos_id=1, pad_id=0)
    return rk.models.Pretrained(spec, tokenizer, rk.models.tiny(spec=spec).weights)


# %% [markdown]
# Which of the two is it?

# %%
REAL = FOLDER.exists() and not rk.nb.fast()
model = rk.models.load(FOLDER) if REAL else stand_in()
said = f"> **The model is the one in `{FOLDER}`.**"
if not REAL:
    said = (
        "> **Random weights of a small shape stand in for a real model.** Rewards below are those "
        f"of chance. For the real one put its folder at `{FOLDER}` and run again."
    )
Markdown(said)

# %% [markdown]
# ## The task
#
# One-digit sums and differences of reasoning-gym: 174 prompts to train on, 26 held out. The answer is right if the last
# number of the response is. The 135M model gets a third of them right when it samples, so there is something to learn from.

# %%
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
tokenizer = {"tokenizer": model.tokenizer}
task = rk.tasks.from_reasoning_gym("chain_sum", size=2000, **DIGITS, **tokenizer)
task.verify = algo.number_match
held_out = task.held_out(rk.nb.pick(26, ci=4))
pd.DataFrame([task.item(i) for i in range(4)], columns=["prompt", "answer"])

# %% [markdown]
# ## Before
#
# Greedy accuracy on prompts that training never sees, and some responses.

# %%
cluster, scratch = rk.launch(backend="local", seed=0), tempfile.TemporaryDirectory()
longest = {"max_new_tokens": rk.nb.pick(64, ci=8)}
rollout = cluster.spawn(rk.RolloutWorker, model, **longest)
before = rk.evaluate(rollout, held_out, task.verify)
batch = rollout.generate(held_out, n=2)
del rollout
batch.frame()[["prompt", "response", "answer"]].head()

# %% [markdown]
# ## Training
#
# 4 prompts x 8 responses a step. 5e-6 is a usual rate for a small model that is trained whole. Experiment 050 has 40 steps of
# three seeds; here it is a few. The checkpointer keeps the newest step: run the cell again after a stop and it goes on.

# %%
config = rk.recipes.GRPOConfig(
    steps=10 if REAL else 2, size=4, n=8, lr=5e-6, minibatches=1, eval_every=0, **longest,
    eval_prompts=4, save_every=1,
)  # fmt: skip
checkpoint = rk.Checkpointer(Path(scratch.name) / "run", keep_last=1)
run = rk.recipes.grpo(cluster, model, task, config, checkpoint=checkpoint)
names = ["reward", "response/length_mean_tokens", "policy/kl_ref", "mismatch/logprob_max"]
run.log.frame().set_index("step")[[*names, "time/step_s"]]

# %% [markdown]
# ## After
#
# Ten steps are few: the spread of 26 prompts is about 0.1, so don't read much into one number.

# %%
after = rk.evaluate(run.rollout, held_out, task.verify)
pd.DataFrame({"before": before, "after": after})

# %% [markdown]
# ## Saved, read again, equal
#
# The folder has the names that transformers and vLLM read. Loaded again, it writes the same greedy text.

# %%
saved = run.actor.save_pretrained(Path(scratch.name) / "trained")
again = cluster.spawn(rk.RolloutWorker, rk.models.load(saved), **longest)
ours, theirs = (r.generate(held_out, temperature=0.0).load() for r in (run.rollout, again))
assert torch.equal(ours["response_ids"], theirs["response_ids"])
sorted(path.name for path in saved.iterdir())


# %% [markdown]
# ## Exercise: the last number
#
# A reward reads what a model happens to write. Write `last_number(text)`: the last whole number in a text as an int, with its
# sign, or None. A minus after a digit or a space after it is no sign: the last number of "9 - 4" is 4, that of "x=-4" is -4.
#
# <details><summary>Hint</summary>A regular expression with a look-behind: an optional minus that does not follow a
# digit, then digits.</details>

# %% tags=["raises-exception"]
def last_number(text):
    raise NotImplementedError("your turn")


def check_last_number(fn):
    words = st.text(st.sampled_from("ab .,=\n"), max_size=6)

    @settings(deadline=None)
    @given(words, st.integers(-99, 99), st.sampled_from(["", ".", " is it", "\n"]))
    def run(text, number, end):
        assert fn(text + " " + str(number) + end) == number
        assert fn(text) is None
        assert fn(f"{abs(number)}-4") == fn(f"{abs(number)} - 4") == 4

    run()
    return "right"


check_last_number(last_number)

# %% [markdown]
# ## Nothing stays behind

# %%
cluster.shutdown()
scratch.cleanup()
