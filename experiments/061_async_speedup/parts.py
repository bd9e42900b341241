"""One run: an arrangement of workers, a schedule, responses with a long tail of lengths."""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

import rlkit as rk
from rlkit import algo
from rlkit.schedule import StalenessRule, asynchronous, synchronous

MAX_ROWS = 256  # that a device decodes at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Numbers of the runs of one table: workload, devices, and latencies if they are simulated."""

    steps: int = 12
    size: int = 16
    """Prompts a step."""
    n: int = 4
    """Responses a prompt."""
    median_tokens: int = 16
    """Of a response; lengths are lognormal with sigma 1."""
    longest_tokens: int = 112
    devices: int = 2
    generating: int = 1
    """Devices that generate in the asynchronous runs; the others train."""
    max_staleness: int = 4
    slice_s: float = 0.1
    """Seconds that an engine generates before its finished groups, prompts and weights move."""
    decode_s: float = 0.0
    """Seconds that a decoding step takes at least, however few rows run: simulated latency."""
    train_token_s: float = 0.0
    """Seconds that training a token takes at least on one device: simulated latency."""

    @property
    def simulated(self) -> bool:
        """Whether one worker stands for all devices that do the same, and takes their time."""
        return self.decode_s > 0


class LongTailedEngine(rk.TorchEngine):
    """Every response has a length of its own, drawn by its uid, whatever it says."""

    setting: dict[str, Any]

    def _queue(self, requests: Any) -> None:
        super()._queue([self._alone(r, uid) for r in requests for uid in r.uids])

    def _alone(self, request: Any, uid: int) -> Any:
        median, longest = self.setting["median_tokens"], self.setting["longest_tokens"]
        length = int(median * np.random.default_rng(int(uid)).lognormal(sigma=1.0))
        limit = {"max_new_tokens": min(max(length, 1), longest), "stop_token_ids": ()}
        return replace(request, uids=[uid], sampling=replace(request.sampling, **limit))

    def step(self, **options: Any) -> Any:
        """One token for every running row; sleeps for what is left of the simulated latency."""
        start = time.monotonic()
        found = super().step(**options)
        time.sleep(max(0.0, self.setting["decode_s"] - (time.monotonic() - start)))
        return found


class Rollout(rk.RolloutWorker):
    """A rollout worker with such an engine; the setting is a dict, to travel as plain data."""

    def __init__(self, model: Any, *, setting: dict[str, Any], context: Any = None) -> None:
        options = {"max_new_tokens": setting["longest_tokens"], "max_rows": setting["max_rows"]}
        super().__init__(model, engine=LongTailedEngine, **options, context=context)
        self.engine.setting = setting


class Actor(rk.ActorWorker):
    """An actor whose updates sleep for what is left of the simulated latency."""

    def __init__(self, model: Any, *, token_s: float, context: Any = None) -> None:
        super().__init__(model, lr=1e-4, context=context)
        self.token_s = token_s

    def _update(self, batch: Any, *args: Any, **options: Any) -> Any:
        start = time.monotonic()
        found = super()._update(batch, *args, **options)
        latency_s = self.token_s * float(batch.num_tokens.sum())
        time.sleep(max(0.0, latency_s - (time.monotonic() - start)))
        return found


def run(name: str, seed: int, setting: Setting, cluster: Any, sources: dict) -> pd.DataFrame:
    """One run on an open cluster, measured after the first step: tidy rows."""
    load, start, records, log = os.getloadavg()[0], 0.0, [], rk.MetricLog()
    for record in train(name, cluster, setting, seed=seed):
        sources |= record["metrics"].sources
        start = start or time.time()
        records.append(record)
    seconds, frame = time.time() - start, rk.trace.frame()
    metrics = _speed(records[1:], seconds) | _idle(
        frame[frame["start_s"] >= start], together=name == "synchronous"
    )
    metrics |= _ages(records) | {"load/1min_mean": (load + os.getloadavg()[0]) / 2}
    log.add(len(records) - 1, metrics)
    facts = {"run": name + ", simulated latency" * setting.simulated, "system": "rlkit"}
    facts |= {"model": "tiny-0.23M", "devices": setting.devices, "seed": seed}
    tidy = log.tidy(**facts, source="simulated" if setting.simulated else "measured")
    return tidy[tidy["metric"].isin(metrics)]


def train(name: str, cluster: Any, setting: Setting, *, seed: int) -> Iterator[dict[str, Any]]:
    """The schedule's records; 073 predicts such runs. Names are those of ``run.NAMES``."""
    task = rk.tasks.reverse_digits(length=6, seed=seed)
    model = rk.models.tiny(pretrained="reverse_digits")
    together = name == "synchronous"  # both on every device, taking turns
    generating = setting.devices if together else setting.generating
    training = setting.devices if together else setting.devices - setting.generating
    numbers = asdict(setting) | {"max_rows": MAX_ROWS * (generating if setting.simulated else 1)}
    ranks = [1, 1] if setting.simulated else [generating, training]
    rollout = cluster.spawn(Rollout, model, setting=numbers, n=ranks[0])
    where = {"colocate_with": rollout} if together else {"n": ranks[1]}
    actor = cluster.spawn(Actor, model, token_s=setting.train_token_s / training, **where)
    resharder = rk.Resharder(source=actor, target=rollout)
    resharder.reshard()

    def prepare(batch: Any) -> None:
        batch["rewards"] = rk.score(task.verify, batch)
        advantages = algo.dr_grpo(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)

    def train_step(batch: Any) -> dict[str, Any]:
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        return {"metrics": actor.update(batch, loss_fn=algo.decoupled_policy_loss)}

    if together:
        prompts = task.batches(size=setting.size, steps=setting.steps)
        parts = (partial(rollout.generate, n=setting.n), prepare, train_step, resharder.reshard)
        yield from synchronous(prompts, *parts)
        return
    stream, interrupts = task.stream(size=setting.size), name != "asynchronous, no interrupts"
    prompts = (next(stream) for _ in range(setting.steps + setting.max_staleness + 1))
    feed = rk.RolloutFeed(rollout, n=setting.n, seconds=setting.slice_s, interrupts=interrupts)
    rule = StalenessRule(groups_per_step=setting.size, max_staleness=setting.max_staleness)
    for record in asynchronous(prompts, feed, prepare, train_step, resharder.reshard, rule=rule):
        yield record
        if record["step"] + 1 == setting.steps:
            return


def _speed(records: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    tokens = sum(float(record["batch"].num_tokens.sum()) for record in records)
    return {"throughput/tokens_per_s": tokens / seconds}


def _idle(frame: pd.DataFrame, *, together: bool) -> dict[str, float]:
    """Idle fractions of the workers, and of devices: what no worker of a device is busy."""
    work = frame[frame["worker"].str.contains("/") & ~frame["stage"].str.startswith("wait/")]
    work = work[work["worker"].str.startswith(("rollout", "actor"))]
    work = work.assign(worker=work["worker"].str.replace(r"_\d+/", "/", regex=True))
    found = rk.trace.idle_fractions(work).set_index("worker")["idle_fraction"]
    idle = {f"idle/{worker}": float(value) for worker, value in found.items()}
    ranks = work["worker"].str.split("/").str[-1]
    by_device = rk.trace.idle_fractions(work.assign(worker=ranks) if together else work)
    return idle | {"idle/device_mean": float(by_device["idle_fraction"].mean())}


def _ages(records: list[dict[str, Any]]) -> dict[str, float]:
    """How often weights changed within a response, and the share of tokens of each staleness."""
    interruptions, ages = 0, []
    for record in records:
        batch = record["batch"]
        versions, mask = batch["token_version"], batch["response_mask"].bool()
        interruptions += int(((versions[:, 1:] != versions[:, :-1]) & mask[:, 1:]).sum())
        ages.append((record["step"] - versions)[mask].numpy())
    steps, counts = np.unique(np.concatenate(ages), return_counts=True)
    shares = {
        f"staleness/share_of_{s}": float(c / counts.sum())
        for s, c in zip(steps, counts, strict=True)
    }
    return shares | {"interruptions/num": interruptions}
