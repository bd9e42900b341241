"""The names of metrics: unit and meaning of each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A name of the glossary."""

    name: str
    unit: str
    meaning: str


UNITS = {
    "s": "s",
    "ms": "ms",
    "gib": "GiB",
    "mib": "MiB",
    "bytes": "B",
    "tokens": "tokens",
    "steps": "steps",
    "rows": "rows",
    "groups": "groups",
}
REDUCTIONS = ("mean", "max", "min", "std", "sum")

_BIN = "share of tokens by the ratio of the trainer's probability to the engine's"
_ROWS = (
    ("step", "", "training step, counted from 0"),
    ("reward", "", "mean reward of the step's responses"),
    ("reward/num_timeouts", "", "responses whose reward, or a part of it, ran out of time"),
    ("reward/num_errors", "", "responses whose reward is an error, or has a part that is"),
    ("eval/accuracy", "", "share of held-out responses judged right"),
    ("eval/pass_at_k", "1", "probability that one of k responses to a held-out prompt is right"),
    ("eval/num_failed", "", "held-out responses that could not be judged, in no mean"),
    ("response/length_mean_tokens", "tokens", "mean response length"),
    ("policy/loss", "", "policy loss, signed, mean over the trainable tokens of an optimizer step"),
    ("policy/clip_fraction", "", "share of trainable tokens whose ratio the clip holds back"),
    ("policy/ratio_mean", "", "mean of new over old probability"),
    ("policy/ratio_max", "", "largest ratio of new over old probability"),
    ("group/num_failed_rewards", "", "responses whose reward is NaN"),
    ("group/num_single", "", "groups of one valid response, which have no advantage"),
    ("group/signal_fraction", "", "share of groups whose rewards differ"),
    ("sampling/num_rounds", "", "rounds of dynamic sampling in the step"),
    ("sampling/num_responses", "", "responses drawn in these rounds, kept or not"),
    ("sampling/num_carried", "", "groups that the step before had left over"),
    ("sampling/kept_fraction", "", "share of the groups drawn that pass the filter"),
    ("sampling/accuracy", "", "mean of the filter's column over all responses drawn, where finite"),
    ("policy/kl_ref", "nats", "KL from the reference policy, estimated on sampled tokens"),
    ("policy/kl_old", "nats", "KL from the old policy, estimated on sampled tokens"),
    ("policy/gate_mean", "", "mean of SAPO's gate on the gradient, 1 on-policy"),
    ("policy/behaviour_weight_mean", "", "mean proximal over behaviour probability, as applied"),
    ("policy/behaviour_weight_max", "", "largest of these weights"),
    ("mismatch/logprob_mean", "nats", "mean distance of the trainer's logprobs from the engine's"),
    ("mismatch/logprob_max", "nats", "largest of these distances"),
    ("mismatch/kl", "nats", "KL of the trainer's policy from the engine's, on sampled tokens"),
    ("mismatch/ratio_below_0.5_fraction", "", _BIN),
    ("mismatch/ratio_0.5_to_0.9_fraction", "", _BIN),
    ("mismatch/ratio_0.9_to_0.99_fraction", "", _BIN),
    ("mismatch/ratio_0.99_to_1.01_fraction", "", _BIN),
    ("mismatch/ratio_1.01_to_1.1_fraction", "", _BIN),
    ("mismatch/ratio_1.1_to_2_fraction", "", _BIN),
    ("mismatch/ratio_above_2_fraction", "", _BIN),
    ("policy/entropy", "nats", "mean entropy of the next-token distribution"),
    ("critic/loss", "", "critic's loss, averaged over the trainable tokens of an optimizer step"),
    ("critic/clip_fraction", "", "share of trainable tokens whose value the clip holds back"),
    ("critic/value_mean", "", "mean of the critic's values"),
    ("critic/return_mean", "", "mean of the returns that the critic learns"),
    ("critic/grad_norm", "", "L2 norm of the critic's gradient before clipping"),
    ("critic/lr", "", "the critic's learning rate of the last optimizer step"),
    ("critic/version", "steps", "the critic's version: train steps done"),
    ("critic/skipped_steps", "steps", "the critic's optimizer steps skipped, as the actor's"),
    ("critic/loss_hash", "", "12 hex digits over the critic's loss's source"),
    ("actor/grad_norm", "", "L2 norm of the gradient before clipping"),
    ("actor/lr", "", "learning rate of the last optimizer step"),
    ("actor/version", "steps", "policy version: train steps done"),
    ("actor/skipped_steps", "steps", "skipped: gradient not finite, or too few prompts rewarded"),
    ("actor/loss_hash", "", "12 hex digits over the loss's source and what it captured"),
    ("staleness/head_steps", "steps", "train steps from a response's first token to its training"),
    ("staleness/tail_steps", "steps", "train steps from a response's last token to its training"),
    ("staleness/token_mean_steps", "steps", "train steps from a token to its training, mean"),
    ("staleness/dropped_groups", "groups", "groups left out as too old, since the loop began"),
    ("staleness/max_steps", "steps", "largest staleness of a step's tokens (simulated runs)"),
    ("time/step_s", "s", "wall time since the previous record"),
    ("time/generate_s", "s", "wall time of generation"),
    ("time/score_s", "s", "wall time of reward functions"),
    ("time/logprobs_s", "s", "wall time of the actor's logprobs"),
    ("time/ref_logprobs_s", "s", "wall time of the reference's logprobs"),
    ("time/values_s", "s", "wall time of the critic's values"),
    ("time/critic_update_s", "s", "wall time of the critic's update"),
    ("time/update_s", "s", "wall time of the actor's update"),
    ("time/reshard_s", "s", "wall time of moving weights to the engines"),
    ("time/evaluate_s", "s", "wall time of evaluation"),
    ("time/dock_s", "s", "wall time of moving samples (simulated runs)"),
    ("time/checkpoint_s", "s", "wall time of saving or loading a checkpoint"),
    ("time/other_s", "s", "step time in none of the stages above"),
    ("throughput/tokens_per_s", "tokens/s", "prompt + response tokens trained, over time/step_s"),
    ("throughput/tokens_per_s_per_device", "tokens/s/device", "that over the cluster's devices"),
    (
        "throughput/update_tflops_per_s_per_device",
        "TFLOP/s",
        "of the trainer while it updates; published and simulated",
    ),
)
GLOSSARY: dict[str, Metric] = {row[0]: Metric(*row) for row in _ROWS}
"""Every metric rlkit writes: name, unit, meaning."""


def unit_of(name: str) -> str:
    """Unit of a metric: the glossary's, else what the name ends in; ``1`` for a pure number."""
    metric = GLOSSARY.get(name)
    return (metric.unit if metric else _unit_from_ending(name)) or "1"


def _unit_from_ending(name: str) -> str:
    """``peak_gib`` -> GiB, ``wait_s_max`` -> s, ``gib_per_s`` -> GiB/s."""
    words = name.rsplit("/", 1)[-1].split("_")
    while len(words) > 1 and words[-1] in REDUCTIONS:
        words.pop()
    if "per" not in words[1:-1]:
        return UNITS.get(words[-1], "1") if len(words) > 1 else "1"
    start = words.index("per", 1)
    parts = [words[start - 1], *" ".join(words[start + 1 :]).split(" per ")]
    return "/".join(UNITS.get(part, part) for part in parts)
