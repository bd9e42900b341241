"""Simulated runs are driven by the schedules of real ones, and call the stages in their order."""

from dataclasses import replace
from itertools import islice

import pytest
from small_runs import WORKLOAD, small_run

import rlkit as rk
import rlkit.sim as sim
from rlkit.schedule import Inline, StalenessRule
from rlkit.sim.events import Loop
from rlkit.sim.memory import memory

STEPS, SIZE = 4, 4
MOST_TURNS = 10_000  # of a feed whose next groups never come
ORDERS = {
    rk.schedule.synchronous: sim.synchronous(),
    rk.schedule.one_step_off: sim.one_step_off(),
    rk.schedule.asynchronous: sim.asynchronous(max_staleness=2),
}


class Simulated(Loop):
    """Lists what the schedule does, groups by number."""

    def __init__(self, schedule):
        work = replace(WORKLOAD, prompts=SIZE)
        quick = sim.Costs(trainer_s=0.0, trainer_s_per_sequence=0.0, reward_s=0.0)
        run = small_run(workload=work, costs=quick, reshard=None)
        super().__init__(run, schedule, memory(run), seed=0)
        self.events, self._add = [], self.generation.add
        self.generation.add = self.add

    def note(self, name, batch):
        self.events.append((name, [group.number for group in batch.rows]))

    def add(self, prompts):
        self.note("begin", prompts)
        self._add(prompts)

    def prepare(self, batch):
        self.note("prepare", batch)
        super().prepare(batch)

    def train_step(self, batch):
        self.note("train", batch)
        return super().train_step(batch)

    def sync(self):
        self.events.append(("sync", []))
        return super().sync()


class Real:
    """The same of a real run: a rollout worker generates, groups come when ``script`` says."""

    interrupts = True

    def __init__(self, cluster, script):
        model = rk.models.tiny(pretrained="reverse_digits")
        self.rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=4, max_rows=8)
        self.task, self.events, self.running = rk.tasks.reverse_digits(seed=3), [], {}
        self.numbers, self.turns = {}, 0
        self.coming = [(i, ids) for i, (name, ids) in enumerate(script) if name == "prepare"]

    def note(self, name, batch):
        ids = dict.fromkeys(batch.meta["group_ids"].tolist())
        self.events.append((name, [self.numbers.setdefault(i, len(self.numbers)) for i in ids]))

    @property
    def num_running(self):
        return len(self.running)

    def add(self, prompts):
        self.note("begin", prompts)
        for row, number in enumerate(self.events[-1][1]):
            self.running[number] = prompts.select([row])

    def advance(self):
        self.turns += 1
        assert self.turns < MOST_TURNS, self.events
        if not self.coming or self.coming[0][0] > len(self.events):
            return None
        prompts = [self.running.pop(number) for number in self.coming.pop(0)[1]]
        return self.rollout.generate(prompts[0].concat(prompts), n=2)

    def generate(self, prompts):
        self.note("begin", prompts)
        return self.rollout.generate(prompts, n=2)

    def prepare(self, batch):
        self.note("prepare", batch)

    def train(self, batch):
        self.note("train", batch)
        return {}

    def sync(self):
        self.events.append(("sync", []))

    def mend(self, sync):
        return False

    def close(self):
        self.running.clear()


def real_records(order, loop):
    prompts = loop.task.stream(size=SIZE)
    parts = (loop.prepare, loop.train, loop.sync)
    if order is rk.schedule.asynchronous:
        rule = StalenessRule(groups_per_step=SIZE, max_staleness=2)
        return order(prompts, loop, *parts, Inline(), rule=rule)
    if order is rk.schedule.one_step_off:
        return order(prompts, loop.generate, *parts, Inline())
    return order(prompts, loop.generate, *parts)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_a_simulated_run_is_a_run_of_the_real_schedule(order):
    assert ORDERS[order].start(Simulated(ORDERS[order])).gi_code is order.__code__


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_stages_come_in_the_order_of_a_real_run(order):
    simulated = Simulated(ORDERS[order])
    simulated.play(STEPS)
    with rk.launch(backend="local") as cluster:
        real = Real(cluster, simulated.events)
        list(islice(real_records(order, real), STEPS))
    assert [name for name, _ in real.events].count("train") == STEPS
    assert real.events == simulated.events
