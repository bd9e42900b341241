"""Wrong calls, one a row: each errs at once, says what it got and what it needs, and loses nothing.

    make test ARGS="tests/test_bad_input.py --durations=5"

prints the slowest.
"""

import json
import time

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit import config, experiment
from rlkit.algo import clipped_policy_loss, group_relative
from rlkit.batch.rows import Rows
from rlkit.cluster.calls import check_arguments
from rlkit.engines import Request


def batch(rows=4, **more):
    columns = {
        "prompt": ["1>"] * rows,
        "response": ["a"] * rows,
        "answer": ["b"] * rows,
        "prompt_ids": [torch.tensor([1, 4])] * rows,
        "response_ids": [torch.tensor([5, 2])] * rows,
        "response_mask": torch.ones(rows, 2, dtype=torch.int8),
        "group_ids": [i // 2 for i in range(rows)],
    }
    return rk.Batch.from_columns(columns | more)


def likelihood(logprobs, b):
    return b.token_mean(-logprobs), {}


def bind(name, value):
    batch()[name] = value


def twos():
    """A batch whose mask came from a function, unchecked until it is read."""
    b = batch()
    b["response_mask"] = b.apply(lambda ids: torch.full_like(ids, 2), "response_ids")
    return b


def update(b=None, loss_fn=likelihood, **options):
    rk.ActorWorker(rk.models.tiny()).update(batch() if b is None else b, loss_fn=loss_fn, **options)


def generate_from(prompts, **options):
    rk.RolloutWorker(rk.models.tiny()).generate(prompts, **options)


def generate(**options):
    generate_from(next(rk.tasks.reverse_digits().batches(size=2, steps=1)), **options)


def evaluate(prompts=None, verify=rk.algo.exact_match, **options):
    prompts = batch(group_ids=range(4)) if prompts is None else prompts
    rk.evaluate(rk.RolloutWorker(rk.models.tiny()), prompts, verify, **options)


def pairs(num, **options):
    made = [("1>", "1")] * num
    return rk.tasks.from_list(made, held_out=made, verify=rk.algo.exact_match, **options)


def frame():
    log = rk.MetricLog()
    log.add(0, reward=1.0)
    return log.frame()


def local():
    return rk.launch(backend="local")


def spec(**changes):
    plain = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1}
    return rk.ModelSpec(**(plain | {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4} | changes))


def folder(tmp_path, **changes):
    """A saved tiny model with its config.json changed."""
    made = rk.models.tiny().save(tmp_path / "model")
    path = made / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return made


def truncated(tmp_path):
    made = rk.models.tiny().save(tmp_path / "model")
    path = made / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    return rk.models.load(made)


def unreadable_config(tmp_path):
    made = rk.models.tiny().save(tmp_path / "model")
    (made / "config.json").write_text("{")
    return rk.models.load(made)


nan = float("nan")
one = torch.ones(4)
WHOLE = "a whole number|<class 'int'>"  # tests check batch.py's annotations first
TABLE = [
    # batches
    ("no columns", lambda t: rk.Batch.from_columns({}), ValueError, "got none, need at least one"),
    ("columns of two lengths", lambda t: rk.Batch.from_columns({"a": one, "b": one[:3]}),
     ValueError, "need equally many"),
    ("a uid twice", lambda t: batch(uid=[1, 1, 2, 3]), ValueError, "same uid twice"),
    ("uids that are no integers", lambda t: batch(uid=[0.5, 1.5, 2.5, 3.5]), TypeError,
     "need integers"),
    ("a column of another length", lambda t: bind("rewards", one[:3]), ValueError,
     "got 3 values, need 4"),
    ("a [B, T] column of another width", lambda t: bind("advantages", torch.ones(4, 3)),
     ValueError, r"got shape \(4, 3\), need \[4, 2\]"),
    ("a 0-d column", lambda t: bind("rewards", torch.tensor(1.0)), (ValueError, TypeError), "need"),
    ("a column of other rows", lambda t: bind("x", batch(uid=[7, 8, 9, 10]).apply(
        lambda r: [1] * 4, "response")), ValueError, "got a column without 4 of this batch's"),
    ("positions that are no integers", lambda t: batch().select([0.7, 1.2]), TypeError,
     r"got positions of float64, need integers, or a mask \[4\] of bool"),
    ("a mask of floats", lambda t: batch().select(one), TypeError, r"mask\.bool\(\)"),
    ("a mask of 0 and 1", lambda t: batch().select(torch.tensor([1, 0, 1, 1])), ValueError,
     r"got row 1 twice, .* mask\.bool\(\)"),
    ("a position before the first", lambda t: batch().select([0, -5]), IndexError,
     "got position -5, need .* at least -4"),
    ("advantages of text to spread", lambda t: batch().expand(["a"] * 4), TypeError,
     r"expand: got list .*need numbers \[4\]"),
    ("advantages of text to train on", lambda t: update(batch(advantages=["a"] * 4)), TypeError,
     "advantages: got rows of str, need numbers"),
    ("a loss without a gradient", lambda t: update(
        loss_fn=lambda logprobs, b: likelihood(logprobs.detach(), b)), ValueError,
     r"loss without a gradient, .*detach\(\)"),
    ("a loss that knows no gradient", lambda t: update(
        loss_fn=lambda logprobs, b: (torch.zeros(()), {})), ValueError, "without a gradient"),
    ("a loss without its metrics", lambda t: update(
        loss_fn=lambda logprobs, b: (likelihood(logprobs, b)[0], None)), TypeError,
     r"got \(Tensor, NoneType\) back, need"),
    ("a learning rate of NaN", lambda t: rk.ActorWorker(rk.models.tiny(), lr=nan), ValueError,
     "lr: got nan, need a finite number"),
    ("a column that isn't there", lambda t: batch()["old_logprobs"], KeyError,
     r"actor\.compute_logprobs\(batch\): run that first"),
    ("a column to delete that isn't there", lambda t: batch().__delitem__("x"), KeyError,
     "has no column 'x'"),
    ("a name nearly right", lambda t: batch()["responses"], KeyError, "Did you mean 'response'"),
    ("a row by number", lambda t: batch()[0], TypeError, r"batch\.select"),
    ("rows by slice", lambda t: batch()[:4], TypeError, r"batch\.frame\(\)"),
    ("a mask of weights", lambda t: bind("response_mask", torch.full((4, 2), 0.5)), ValueError,
     "got 0.5, need 0 or 1"),
    ("a mask of lists", lambda t: bind("response_mask", [[1, 1]] * 4), TypeError,
     "got rows of list, need a tensor"),
    ("ragged rows of other lengths", lambda t: bind("advantages", [one[:2], one[:3], one, one[:2]]),
     ValueError, r"advantages: got 3 values in row 1, need 2, .*2 of 4 rows"),
    ("columns that don't fit the ids", lambda t: batch(advantages=torch.ones(4, 5)), ValueError,
     r"got shape \(4, 5\), need \[4, 2\]"),
    ("expanding what has a value a token", lambda t: batch().expand(
        batch().columns["response_ids"]), ValueError, "'response_ids' of ragged rows"),
    ("expanding a [B, T] tensor", lambda t: batch().expand(torch.ones(4, 2)), ValueError,
     "bound as it is"),
    ("a mask of the wrong length", lambda t: batch().select(np.array([True])), ValueError,
     r"need \[4\]"),
    ("a position outside", lambda t: batch().select([9]), IndexError, "need at most 3"),
    ("expanding the wrong number", lambda t: batch().expand(one[:2]), ValueError,
     r"need \[4\], one value a response"),
    ("nothing to concatenate", lambda t: rk.Batch.concat([]), ValueError, "need at least one"),
    ("concatenating other columns", lambda t: rk.Batch.concat([batch(), batch(
        uid=[7, 8, 9, 10], extra=one)]), ValueError, "got columns that differ"),
    ("more minibatches than groups", lambda t: batch().minibatches(3), ValueError,
     "got 3 for 2 groups"),
    ("zero minibatches", lambda t: batch().minibatches(0), ValueError, "need at least 1"),
    ("minibatches by halves", lambda t: batch().minibatches(1.5), TypeError, WHOLE),
    ("minibatches that are a bool", lambda t: batch().minibatches(True), TypeError, "got True"),
    ("a token budget that is a float", lambda t: batch().microbatches(8.0), TypeError, WHOLE),
    ("chunks of a float", lambda t: batch().chunks(2.0), TypeError, WHOLE),
    ("a token budget of 0", lambda t: batch().microbatches(0), ValueError, "need at least 1 token"),
    ("chunks of 0", lambda t: batch().chunks(0), ValueError, "need at least 1 row"),
    ("a mean of the wrong shape", lambda t: batch().token_mean(torch.ones(4, 5)), Exception,
     "shape|B T"),
    ("ragged rows that don't add up", lambda t: Rows(one, torch.tensor([1, 2])), ValueError,
     "add up to 3, need 4"),
    # algorithms
    ("rewards of the wrong length", lambda t: group_relative(one[:3], torch.zeros(4).long()),
     Exception, "3|B"),
    ("a loss without old logprobs", lambda t: clipped_policy_loss(torch.ones(4, 2), batch()),
     KeyError, "run that first"),
    ("a negative clip", lambda t: clipped_policy_loss(torch.ones(4, 2), batch(), clip_low=-1.0),
     ValueError, "clip_low"),
    # workers
    ("an empty batch", lambda t: update(batch().select([])), ValueError, "empty batch"),
    ("no epochs", lambda t: update(epochs=0), ValueError, "need at least 1"),
    ("epochs by halves", lambda t: update(epochs=1.5), TypeError, "epochs: got 1.5"),
    ("minibatches of an update by halves", lambda t: update(minibatches=2.0), TypeError, WHOLE),
    ("a token budget of a worker", lambda t: rk.ActorWorker(rk.models.tiny(), token_budget=1e4),
     TypeError, "token_budget: got 10000.0"),
    ("a loss that sees a mask of twos", lambda t: update(twos()), ValueError, "need 0 or 1"),
    ("a loss by name", lambda t: update(loss_fn="grpo"), TypeError, "need a function"),
    ("a loss of one parameter", lambda t: update(loss_fn=lambda x: x), TypeError,
     r"need \(logprobs, batch\)"),
    ("a loss that returns a number", lambda t: update(loss_fn=lambda lp, b: 1.0), TypeError,
     "need .scalar loss, dict"),
    ("a loss that isn't reduced", lambda t: update(loss_fn=lambda lp, b: (lp, {})), TypeError,
     "token_mean"),
    ("a metric that isn't reduced", lambda t: update(loss_fn=lambda lp, b: (lp.sum(), {"m": lp})),
     TypeError, "metric 'm'"),
    ("a NaN logprob", lambda t: update(batch(old_logprobs=torch.full((4, 2), nan))), ValueError,
     "old_logprobs: got nan in the row of uid 0"),
    ("an infinite advantage", lambda t: update(batch(advantages=torch.full((4, 2), torch.inf))),
     ValueError, "advantages: got inf"),
    ("a negative learning rate", lambda t: rk.ActorWorker(rk.models.tiny(), lr=-1.0), ValueError,
     "need a finite number of at least 0"),
    ("zero responses a prompt", lambda t: generate(n=0), ValueError, "need at least 1 response"),
    ("half a response a prompt", lambda t: generate(n=1.5), TypeError, "n: got 1.5"),
    ("a negative temperature", lambda t: generate(temperature=-1.0), ValueError, "greedy"),
    ("a temperature of nearly 0", lambda t: generate(temperature=1e-4), ValueError,
     r"need 0 \(greedy\) or .* at least 0.001"),
    ("negative new tokens", lambda t: generate(max_new_tokens=-1), ValueError, "need at least 1"),
    ("zero new tokens", lambda t: generate(max_new_tokens=0), ValueError, "got 0, need at least 1"),
    ("new tokens by halves", lambda t: generate(max_new_tokens=2.5), TypeError, "got 2.5"),
    ("a worker of zero new tokens", lambda t: rk.RolloutWorker(
        rk.models.tiny(), max_new_tokens=0), ValueError, "max_new_tokens: got 0"),
    ("a group id too large", lambda t: generate_from(batch(group_ids=[1 << 47] * 4)), ValueError,
     "need 0 to 2.47 - 1"),
    ("sample numbers that two prompts share", lambda t: generate_from(
        batch(), first_sample=np.zeros(4, int)), ValueError, "a group id of its own"),
    ("a response that can't fit", lambda t: generate(max_new_tokens=999), ValueError,
     "Shorten the prompt or lower max_new_tokens"),
    ("no prompts", lambda t: generate_from(batch().select([])), ValueError, "need at least one"),
    ("token ids outside the vocabulary", lambda t: rk.TorchEngine(rk.models.tiny()).add(
        Request([99], [0])), ValueError, "need ids from 0 to 22"),
    ("zero slots", lambda t: rk.TorchEngine(rk.models.tiny(), max_rows=0), ValueError,
     "need at least 1 slot"),
    # rewards and tasks
    ("a reward that fails", lambda t: rk.score(lambda p, r, a: 1 / 0, batch()), ZeroDivisionError,
     "failed on row 0: "),
    ("a reward that is no number", lambda t: rk.score(lambda p, r, a: "1", batch()), TypeError,
     "need a float"),
    ("a reward by name", lambda t: rk.score("exact_match", batch()), TypeError,
     r"got 'exact_match', need a function of \(prompt, response, answer\)"),
    ("a verifier of two texts", lambda t: evaluate(verify=lambda a, b: 1.0), TypeError,
     r"need a function of \(prompt, response, answer\): too many"),
    ("pass@5 of 4", lambda t: evaluate(n=4, k=5), ValueError, "got k=5 of n=4 .* 1 to n: raise n"),
    ("pass@0", lambda t: evaluate(k=0), ValueError, "k: got 0, need at least 1"),
    ("pass@2 of verdicts of one", lambda t: rk.tasks.pass_at_k(torch.ones(3, 1), 2), ValueError,
     "got k=2 of n=1"),
    ("an evaluation without prompts", lambda t: evaluate(batch().select([])), ValueError,
     "got no prompts, need at least one"),
    ("more held-out prompts than there are", lambda t: pairs(5).held_out(6), ValueError,
     "more than the 5 prompts that are held out, .* Ask for fewer"),
    ("a task with another model's tokenizer", lambda t: rk.recipes.grpo(
        local(), rk.models.tiny(), pairs(5, tokenizer=rk.models.char_tokenizer("1>0"))), ValueError,
     r"Tokenizer\(6 tokens\) encodes, need .*Tokenizer\(23 .*tokenizer=model\.tokenizer"),
    ("a recipe of a model's name", lambda t: rk.recipes.ppo(local(), "tiny", pairs(5)), TypeError,
     r"got 'tiny', need rk\.models\.tiny"),
    ("a task of length 0", lambda t: rk.tasks.reverse_digits(length=0), ValueError, "from 1 to 40"),
    ("no held-out prompts", lambda t: rk.tasks.sort().held_out(0), ValueError, "at least 1 prompt"),
    ("batches of no prompts", lambda t: rk.tasks.sort().batches(size=0, steps=1), ValueError,
     "need at least 1 prompt"),
    ("a character outside the alphabet", lambda t: rk.models.char_tokenizer().encode("z"),
     ValueError, r"got characters \['z'\]"),
    # clusters
    ("an unknown backend", lambda t: rk.launch(backend="slurm"), ValueError, "'ray' or 'local'"),
    ("an unknown device", lambda t: rk.launch(devices="tpu"), ValueError, "need one of auto"),
    ("no devices", lambda t: rk.launch(num_devices=0), ValueError, "need at least 1"),
    ("no time", lambda t: rk.launch(timeout_s=0), ValueError, "need more than 0 seconds"),
    ("a negative seed", lambda t: rk.launch(seed=-1), ValueError, "seed: got -1, need at least 0"),
    ("a seed that is a float", lambda t: rk.launch(seed=0.5), TypeError, "seed: got 0.5"),
    ("two local workers", lambda t: local().spawn(rk.ReferenceWorker, rk.models.tiny(), n=2),
     ValueError, "has one process"),
    ("an unknown method", lambda t: local().spawn(rk.ReferenceWorker, rk.models.tiny()).train(),
     AttributeError, "need one of"),
    ("a method nearly right", lambda t: local().spawn(
        rk.ReferenceWorker, rk.models.tiny()).compute_logprob(), AttributeError,
     "Did you mean 'compute_logprobs'"),
    ("a public name nearly right", lambda t: rk.RolloutWorkr, AttributeError,
     "Did you mean 'RolloutWorker'"),
    ("a resharder the wrong way round", lambda t: rk.Resharder(
        source=local().spawn(rk.ReferenceWorker, rk.models.tiny()), target=None), TypeError,
     "actors as the source"),
    ("a swap between devices", lambda t: rk.plan_reshard(
        spec(), rk.Layout(), rk.Layout(), devices=(1, 1)), ValueError, "on disjoint devices"),
    # files and configs
    ("a folder that isn't there", lambda t: rk.models.load(t / "x"), FileNotFoundError,
     "need a Hugging Face checkpoint folder"),
    ("a model by its name", lambda t: local().spawn(rk.RolloutWorker, "Qwen/Qwen3-8B"), TypeError,
     r"got 'Qwen/Qwen3-8B', need .* rk\.models\.load\(folder\)"),
    ("an actor of a folder's name", lambda t: rk.ActorWorker(t), TypeError, r"models\.load\(fold"),
    ("a critic of a folder's name", lambda t: rk.CriticWorker(t), TypeError, r"models\.load\(fold"),
    ("an engine of a folder's name", lambda t: rk.TorchEngine(t), TypeError, r"models\.load\(fold"),
    ("a vLLM of a folder's name", lambda t: rk.VLLMEngine(t), TypeError, r"models\.load\(folder"),
    ("a truncated checkpoint", truncated, ValueError, "cut short"),
    ("a config that is no JSON", unreadable_config, ValueError, "not JSON"),
    ("another architecture", lambda t: rk.models.load(folder(t, architectures=["GPT2"])),
     ValueError, "got 'GPT2', need one of"),
    ("weights of another shape", lambda t: rk.models.load(folder(t, hidden_size=48)), ValueError,
     r"got shape \(.*, 96\), need"),
    ("shipped weights by a wrong name", lambda t: rk.models.tiny(pretrained="x"), ValueError,
     "need one of .'reverse_digits'"),
    ("heads that don't divide", lambda t: spec(num_kv_heads=3), ValueError, "divides num_heads"),
    ("an odd head", lambda t: spec(head_dim=3), ValueError, "need an even number"),
    ("a layout that is none", lambda t: rk.launch(backend="local").spawn(
        rk.ActorWorker, rk.models.tiny(), layout={"tp": 2}), TypeError, "need one such as"),
    ("an option of a backend", lambda t: check_arguments(
        rk.ActorWorker, (rk.models.tiny(),), {"options": 1}), TypeError, "'options'; need"),
    ("a layout for one process", lambda t: rk.launch(backend="local").spawn(
        rk.ActorWorker, rk.models.tiny(), layout=rk.Layout(tp=2)), ValueError, "got 2 workers"),
    ("a layout of nothing", lambda t: rk.Layout(tp=0), ValueError, "at least 1"),
    ("a decay before its warm-up ends", lambda t: config.linear(5, warmup_steps=5), ValueError,
     "need more than warmup_steps=5"),
    ("an unknown key", lambda t: config.from_dict(rk.Layout, {"dq": 2}), ValueError,
     r"unknown keys \['dq'\]"),
    ("a key nearly right", lambda t: config.from_dict(rk.SamplingParams, {"temperatures": 1.0}),
     ValueError, "Did you mean 'temperature'"),
    # logs
    ("a step that is no number", lambda t: rk.MetricLog().add("one"), TypeError, "need an int"),
    ("a metric by the step's name", lambda t: rk.MetricLog().add(3, {"step": 9}), ValueError,
     "step: got 9 as a metric"),
    ("a metric that is a vector", lambda t: rk.MetricLog().add(0, reward=one), TypeError,
     "Reduce it first"),
    ("a plot of a name nearly right", lambda t: rk.viz.plot_metric(frame(), "rewards"), ValueError,
     "Did you mean 'reward'"),
    ("results without a unit", lambda t: experiment.check_results(rk.MetricLog().tidy()),
     ValueError, "are missing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "says"), [r[1:] for r in TABLE], ids=[r[0] for r in TABLE]
)
def test_a_wrong_call_errs_at_once_and_says_what_it_needs(call, error, says, tmp_path):
    start = time.monotonic()
    with pytest.raises(error, match=says):
        call(tmp_path)
    assert time.monotonic() - start < 20  # 2 s on an idle machine; a hang is what fails here


def test_the_table_is_long_enough():
    assert len(TABLE) >= 40
