"""The nine algorithms: three recipes, and six that are GRPO's loop with another choice."""

from functools import partial
from typing import Any

import pandas as pd

import rlkit as rk
from rlkit import algo, recipes

CONFIGS = {"grpo": recipes.GRPOConfig, "ppo": recipes.PPOConfig, "dapo": recipes.DAPOConfig}
RECIPES = {"GRPO": recipes.grpo, "PPO": recipes.ppo, "DAPO": recipes.dapo}
TOKEN_SUM = partial(algo.clipped_policy_loss, aggregate=algo.seq_mean_token_sum)
FIXED_LENGTH = partial(
    algo.clipped_policy_loss, aggregate=partial(algo.seq_mean_token_sum, length=32)
)
VARIANTS = {  # advantage, loss, minibatches
    "Dr. GRPO": (algo.dr_grpo, FIXED_LENGTH, 2),
    "RLOO": (algo.rloo, TOKEN_SUM, 1),
    "REINFORCE++": (algo.reinforce_pp, algo.clipped_policy_loss, 2),
    "GSPO": (algo.group_relative, algo.gspo_loss, 2),
    "CISPO": (algo.group_relative, algo.cispo_loss, 2),
    "SAPO": (algo.group_relative, algo.sapo_loss, 2),
}
NAMES = ("GRPO", "Dr. GRPO", "RLOO", "REINFORCE++", "PPO", "DAPO", "GSPO", "CISPO", "SAPO")
KEPT = ("sampling/accuracy", "sampling/num_responses", "eval/accuracy", "time/step_s")


def run(name: str, seed: int, configs: dict[str, Any], sources: dict) -> pd.DataFrame:
    """One run in this process: tidy rows of the kept metrics, also if it stopped with an error."""
    task = rk.tasks.reverse_digits(length=6, seed=seed)
    model = rk.models.tiny(pretrained="reverse_digits")
    config, logs = configs.get(name.lower(), configs["grpo"]), []
    loop = RECIPES.get(name) or partial(_group_loop, choice=VARIANTS[name])
    try:
        with rk.launch(backend="local", seed=seed) as cluster:
            loop(cluster, model, task, config, on_step=logs.append)
    except RuntimeError as error:
        print(f"{name}, seed {seed}: stopped after {len(logs)} steps: {error}")
    for record in logs[-1].records:  # all but DAPO train on what they draw
        record.setdefault("sampling/accuracy", record["reward"])
        record.setdefault("sampling/num_responses", config.size * config.n)
    sources |= logs[-1].sources
    facts = {"run": name, "system": "rlkit", "model": "tiny-0.23M", "devices": 1, "seed": seed}
    frame = logs[-1].tidy(**facts, source="measured")
    return frame[frame["metric"].isin(KEPT)]


def _group_loop(cluster, model, task, config, *, choice, on_step):
    """``recipes.grpo`` with another advantage and loss, and no KL."""
    advantage_fn, loss_fn, minibatches = choice
    rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=config.max_new_tokens)
    actor = cluster.spawn(rk.ActorWorker, model, lr=config.lr)
    resharder, log = rk.Resharder(source=actor, target=rollout), rk.MetricLog()
    held_out = task.held_out(config.eval_prompts)
    for step, prompts in enumerate(task.batches(size=config.size, steps=config.steps)):
        batch = rollout.generate(prompts, n=config.n, temperature=config.temperature)
        batch["rewards"] = rk.score(task.verify, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        advantages = advantage_fn(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)
        metrics = actor.update(batch, loss_fn=loss_fn, minibatches=minibatches)
        resharder.reshard()
        if (step + 1) % config.eval_every == 0:
            metrics |= rk.evaluate(rollout, held_out, task.verify)
        log.add(step, metrics, reward=batch["rewards"].mean())
        on_step(log)
