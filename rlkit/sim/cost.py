"""Seconds of each stage from counts of operations and bytes, with a lower and an upper bound.

Operations of a decoder (Kaplan et al., 2020, section 2.1): 2 a weight and token forward, 4
backward, and the attention's, which grow with the square of a sequence.
"""

from dataclasses import dataclass, replace

from rlkit.config import ModelSpec
from rlkit.sim.specs import counts
from rlkit.sim.work import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one stage needs of each resource, in seconds of that resource alone."""

    compute_s: float = 0.0
    """Matrix products."""
    memory_s: float = 0.0
    """Traffic to high-bandwidth memory."""
    network_s: float = 0.0
    """Traffic between devices."""
    other_s: float = 0.0
    """What none of them explains: launches, schedulers, bubbles, latencies."""
    hidden_s: float = 0.0
    """Seconds of one resource that pass while another works: at most the smaller of the two."""

    @property
    def lower_s(self) -> float:
        """Everything overlaps: the busiest resource."""
        return max(self.compute_s, self.memory_s, self.network_s)

    @property
    def upper_s(self) -> float:
        """Nothing overlaps: the sum."""
        return self.compute_s + self.memory_s + self.network_s + self.other_s

    @property
    def seconds(self) -> float:
        """The estimate, between the two."""
        return self.upper_s - self.hidden_s

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
            network_s=self.network_s + other.network_s,
            other_s=self.other_s + other.other_s,
            hidden_s=self.hidden_s + other.hidden_s,
        )

    def __mul__(self, times: float) -> "Cost":
        return Cost(
            compute_s=times * self.compute_s,
            memory_s=times * self.memory_s,
            network_s=times * self.network_s,
            other_s=times * self.other_s,
            hidden_s=times * self.hidden_s,
        )


def software(run: Run) -> float:
    """Factor on compute and overhead: 1, but for the 910 family (``Costs.slow_software``)."""
    return run.costs.slow_software if run.node.device.name.startswith("910") else 1.0


def forward_flops(model: ModelSpec, tokens: float, squares: float) -> float:
    """Of one forward over sequences with these sums of lengths and of squared lengths (causal)."""
    attention = 2.0 * model.num_layers * counts(model).attention_size * squares
    return 2.0 * counts(model).active_parameters * tokens + attention


def decode_step(run: Run, rows: float, context: float) -> Cost:
    """One token for each of ``rows`` sequences of an engine that hold ``context`` tokens in all.

    The floor: weights are read once however few rows there are; each row's cache is read, too.
    """
    costs, cut, model = run.costs, run.generate, run.counts
    devices, slow = cut.num_devices, software(run)
    read = costs.memory_efficiency * run.node.device.memory_bytes_per_s
    flops = costs.matmul_efficiency * run.node.device.flops / slow
    experts = 2.0 * model.expert_parameters * model.expert_share(rows)
    weights_s = (model.dense_bytes / cut.tp + experts / (cut.ep * cut.tp_of_experts)) / read
    products_s = 2.0 * model.active_parameters * rows / devices / flops
    cache_s = run.kv_bytes * context / devices / read
    attention_s = 4.0 * run.model.num_layers * model.attention_size * context / devices / flops
    return Cost(
        compute_s=products_s + attention_s,
        memory_s=weights_s + cache_s,
        network_s=_layer_traffic_s(run, rows * cut.tp / devices, cut.tp, devices),
        other_s=slow * (costs.decode_overhead_s + costs.decode_s_per_row * rows),
        # One kernel reads weights and multiplies; the attention's reads the cache and multiplies.
        hidden_s=min(weights_s, products_s) + min(cache_s, attention_s),
    )


def _layer_traffic_s(run: Run, tokens: float, tp: int, devices: int) -> float:
    """Collectives of one forward: two all-reduces a layer (tp), two all-to-alls (experts)."""
    model, costs = run.model, run.costs
    inside = max(tp, devices if model.moe else tp) <= run.node.num_devices
    link = run.node.link_bytes_per_s if inside else run.node.network_bytes_per_s
    rate, size = costs.link_efficiency * link, 2.0 * model.hidden_size * tokens
    seconds = 0.0
    if tp > 1:
        reduce_s = 2.0 * (tp - 1) / tp * size / (costs.link_efficiency * run.node.link_bytes_per_s)
        seconds += 2.0 * model.num_layers * (costs.collective_s + reduce_s)
    if model.moe and devices > 1:
        away = (devices - 1) / devices * model.moe.experts_per_token / tp
        seconds += 2.0 * model.num_layers * (costs.collective_s + away * size / rate)
    return seconds


def prefill(run: Run, tokens: float, squares: float) -> Cost:
    """``tokens`` prompt tokens through one engine; also the cache again after an interruption."""
    devices = run.generate.num_devices
    flops = forward_flops(run.model, tokens, squares) / devices
    mine = tokens * run.generate.tp / devices
    away = _layer_traffic_s(run, mine, run.generate.tp, devices)
    return _matmuls(run, flops, network_s=away, other_s=0.0)


def _matmuls(run: Run, flops: float, *, network_s: float, other_s: float) -> Cost:
    """Large products on one device, and the traffic of what lies between them, one by one."""
    costs, device, slow = run.costs, run.node.device, software(run)
    return Cost(
        compute_s=slow * flops / (costs.matmul_efficiency * device.flops),
        memory_s=slow * flops * costs.train_bytes_per_flop / device.memory_bytes_per_s,
        network_s=network_s,
        other_s=other_s,
    )


def logprobs(run: Run, tokens: float, squares: float, sequences: float) -> Cost:
    """``run.forwards`` forwards of the trainer over these sequences."""
    whole = replace(run, minibatches=1)
    one = _pass(whole, tokens, squares, sequences, forwards=1.0, exchanges=1.0)
    return (one + _call(run, sequences)) * run.forwards


def update(run: Run, tokens: float, squares: float, sequences: float) -> Cost:
    """Forward, backward (4 of 6 operations), recomputation and optimizer steps of one train step.

    ``other_s`` holds the bubble of the pipeline, (pp - 1) / micro-batches (Narayanan et al., 2021),
    and what does not scale with devices: a part a step, a part a sequence.
    """
    forwards = 4.0 if run.recompute else 3.0
    cost = _pass(run, tokens, squares, sequences, forwards=forwards, exchanges=3.0)
    cost += _call(run, sequences)
    shard = run.counts.weight_bytes / (run.train.tp * run.train.pp)
    ranks, gradients_s = run.train_dp * run.train.cp, 0.0  # each has gradients of its own tokens
    if not run.sharded and ranks > 1:  # reduce-scatter in fp32, all-gather in bf16
        away = (ranks - 1) / ranks
        gradients_s = run.minibatches * 3.0 * shard * away / _network(run)
    return cost + Cost(network_s=gradients_s, other_s=run.costs.trainer_s)


def _call(run: Run, sequences: float) -> Cost:
    """Handing sequences to the trainer, once a call: data path, balancing, what ranks wait for."""
    return Cost(other_s=run.costs.trainer_s_per_sequence * sequences)


def _pass(
    run: Run, tokens: float, squares: float, sequences: float, *, forwards: float, exchanges: float
) -> Cost:
    """Passes over the trainer's devices that count as ``forwards`` of one forward's operations.

    Ranks are balanced as well as whole sequences allow: in no mini-batch is the fullest one done
    before the longest sequence. The cp devices of a rank share its sequences evenly.
    """
    cut, model = run.train, run.model
    longest = run.workload.lengths.longest(sequences / run.minibatches) + run.workload.prompt_tokens
    even = tokens / run.train_dp
    mine = max(even, run.minibatches * longest)
    flops = forwards * forward_flops(model, tokens, squares) / run.train_devices * mine / even
    micro = max(run.minibatches, mine / run.micro_batch_tokens)  # micro-batches of a rank
    experts = cut.ep * cut.tp_of_experts if model.moe else 1
    # Activations go through the layers of one stage; weights of FSDP are gathered by all trainers.
    once_s = _layer_traffic_s(run, mine / micro / cut.cp, cut.tp, max(experts, cut.tp))
    network_s = forwards * (micro * once_s + _context_traffic_s(run, mine)) / cut.pp
    if run.sharded:
        network_s += exchanges * micro * run.counts.weight_bytes / _network(run)
    busy = _matmuls(run, flops, network_s=network_s, other_s=0.0)
    bubble = (cut.pp - 1) / micro * busy.seconds
    return busy + Cost(other_s=bubble)


def _context_traffic_s(run: Run, tokens: float) -> float:
    """One pass's exchange of keys and values between the cp devices of a rank with ``tokens``.

    Each gets what the others hold of every layer, by a ring or an all-gather (Liu et al., 2023);
    backward their gradients go the other way, which counts as two passes do.
    """
    cp, tp = run.train.cp, run.train.tp
    inside = tp * cp <= run.node.num_devices
    link = run.node.link_bytes_per_s if inside else run.node.network_bytes_per_s
    away = (cp - 1) / cp * tokens * 2.0 * run.model.num_layers * run.counts.kv_size / tp
    return away / (run.costs.link_efficiency * link)


def _network(run: Run) -> float:
    """Bytes a second of one device in a collective over all trainers."""
    inside = run.train_devices <= run.node.num_devices
    rate = run.node.link_bytes_per_s if inside else run.node.network_bytes_per_s
    return run.costs.link_efficiency * rate
