"""Writes, leases, answers, crashes in any order: each row once a stage, groups whole, none lost."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from rlkit.dock import Graph, LocalTransport, Stage, StaleLeaseError, TransferDock, samplers

GROUP_SIZE, LEASE_S = 3, 10
NODES, STAGES, HOLDERS = ("a", "b"), ("reference", "train"), ("p", "q", "r")
COLUMNS = {"reference": ["x"], "train": ["x", "y"]}
GRAPH = Graph(
    (
        Stage("driver", writes=("x",)),
        Stage("reference", reads=("x",), writes=("y",)),
        Stage("train", reads=("x", "y")),
    )
)
SAMPLERS = (
    samplers.in_order,
    samplers.token_balanced,
    samplers.oldest_version,
    partial(samplers.seeded_random, seed=7),
)


class AnyOrder(RuleBasedStateMachine):
    """The dock beside a model of what must hold; the model knows sets of uids and no more."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.now = 0.0
        transport = LocalTransport(NODES, graph=GRAPH, lease_s=LEASE_S, clock=lambda: self.now)
        self.dock = TransferDock(transport, timeout_s=0)
        self.rows: set[int] = set()  # put, and neither freed nor lost
        self.x, self.num_writes = {}, 0  # uid -> its value
        self.consumed = {stage: set() for stage in STAGES}
        self.held = {}  # (stage, token) -> holder, uids, deadline; of leases that live
        self.saved = None

    # ---- what happens ----

    @initialize(where=st.sampled_from(NODES))
    def begin(self, where):
        """Two groups on one node, one whole and one not; rows of both lie apart."""
        self.write([0, 3, 1, 4, 2], where)

    @rule(
        group=st.integers(0, 4),
        first=st.integers(0, 2),
        n=st.integers(1, 3),
        where=st.sampled_from(NODES),
    )
    def put(self, group, first, n, where):
        """Some rows of a group; a row is written once."""
        uids = [group * GROUP_SIZE + i for i in range(first, min(GROUP_SIZE, first + n))]
        uids = [u for u in uids if u not in self.rows and u not in self.consumed["train"]]
        self.write(uids, where)

    def write(self, uids, where):
        groups = [u // GROUP_SIZE for u in uids]
        if not uids:
            return
        self.num_writes += 1
        values = [self.num_writes * 1000 + u for u in uids]
        self.dock.at(node=where).put({"x": values}, uids, group_ids=groups)
        self.rows |= set(uids)
        self.x |= dict(zip(uids, values, strict=True))

    @rule(where=st.sampled_from(NODES), every=st.integers(1, 3))
    def write_again(self, where, every):
        """Other values, perhaps on another node."""
        self.write(sorted(self.rows)[::every], where)

    @rule(
        target=leases,
        stage=st.sampled_from(STAGES),
        holder=st.sampled_from(HOLDERS),
        where=st.sampled_from(NODES),
        sampler=st.sampled_from(SAMPLERS),
        whole=st.integers(1, 2),
    )
    def get(self, stage, holder, where, sampler, whole):
        """A lease of new rows, in whole groups when training; or nothing."""
        size = GROUP_SIZE if stage == "train" else 1
        n, sampler = whole * size, partial(sampler, group_size=size)
        try:
            lease = self.dock.at(node=where, holder=holder).get(stage, COLUMNS[stage], n, sampler)
        except TimeoutError:
            return None
        uids = set(lease.uids.tolist())
        assert len(uids) == n
        assert uids <= self.rows - self.consumed[stage]
        assert not uids & {u for (s, _), h in self.held.items() if s == stage for u in h[1]}
        assert lease.batch["x"].tolist() == [self.x[u] for u in lease.uids]
        if stage == "train":
            assert lease.batch["y"].tolist() == [u * 10 + 1 for u in lease.uids]
            assert len(uids) == GROUP_SIZE * len({u // GROUP_SIZE for u in uids})
        self.held[stage, lease.token] = [holder, uids, self.now + LEASE_S]
        return lease

    @rule(lease=consumes(leases), where=st.sampled_from(NODES), write=st.booleans())
    def ack(self, lease, where, write):
        """The work is done: written, then acknowledged; an answer for an ended lease is refused."""
        if lease is None:
            return
        stage = lease.grant.stage
        if stage == "reference" and (write or (stage, lease.token) in self.held):
            uids = sorted(set(lease.uids.tolist()) & self.rows)
            if uids:
                self.dock.at(node=where).put({"y": torch.tensor(uids) * 10 + 1}, uids, stage=stage)
        if (stage, lease.token) not in self.held:
            with pytest.raises(StaleLeaseError):
                self.dock.ack(lease)
            return
        _, uids, _ = self.held.pop((stage, lease.token))
        self.dock.ack(lease)
        assert not uids & self.consumed[stage]
        self.consumed[stage] |= uids
        self.rows -= self.consumed["reference"] & self.consumed["train"]

    @rule(stage=st.sampled_from(STAGES), where=st.sampled_from(NODES), whole=st.integers(1, 3))
    def work(self, stage, where, whole):
        """A holder that takes rows, does the work and says so."""
        whole = whole * (GROUP_SIZE if stage == "reference" else 1)
        self.ack(self.get(stage, "p", where, samplers.in_order, whole), where, True)

    @rule(lease=consumes(leases))
    def nack(self, lease):
        """Rows given back."""
        if lease is None:
            return
        if self.held.pop((lease.grant.stage, lease.token), None) is None:
            with pytest.raises(StaleLeaseError):
                self.dock.nack(lease)
        else:
            self.dock.nack(lease)

    @rule(seconds=st.integers(1, 11))
    def time_goes_on(self, seconds):
        """Leases run out."""
        self.now += seconds
        self.dock.frame()
        self.held = {k: h for k, h in self.held.items() if h[2] > self.now}

    @rule(holder=st.sampled_from(HOLDERS))
    def heartbeat(self, holder):
        """A holder says that it lives."""
        self.dock.at(holder=holder).heartbeat()
        for held in self.held.values():
            held[2] = self.now + LEASE_S if held[0] == holder else held[2]

    @rule(holder=st.sampled_from(HOLDERS))
    def holder_dies(self, holder):
        """Its rows are free at once."""
        self.dock.drop(holder)
        self.held = {k: h for k, h in self.held.items() if h[0] != holder}

    @rule(stage=st.sampled_from((*STAGES, "driver")))
    def controller_dies(self, stage):
        """Another takes over from the warehouses; holders get a whole lease time."""
        self.dock.transport.kill(stage)
        for (of, _), held in self.held.items():
            held[2] = self.now + LEASE_S if of == stage else held[2]

    @rule(node=st.sampled_from(NODES), again=st.booleans())
    def node_dies(self, node, again):
        """Rows with a column there are made again, but for those trained already."""
        frame = self.dock.frame()
        hit = frame[(frame[[c for c in "xy" if c in frame]] == node).any(axis=1)]
        on_node = set(hit["uid"].tolist())
        self.dock.transport.lose(node)
        found = set(self.dock.lost(node).tolist())
        assert found == on_node - self.consumed["train"]
        self.held = {k: h for k, h in self.held.items() if not h[1] & found}
        gone = on_node - found
        for held in self.held.values():
            held[1] -= gone
        self.held = {k: h for k, h in self.held.items() if h[1]}
        self.rows -= on_node
        self.consumed["reference"] -= found
        self.saved = None  # a snapshot may hold rows that are written again now
        if again:
            self.write(sorted(found), "a")

    @rule()
    def save(self):
        """A snapshot, and what the model knows."""
        consumed = {stage: set(uids) for stage, uids in self.consumed.items()}
        self.saved = self.dock.snapshot(), set(self.rows), consumed, dict(self.x)

    @rule()
    def restore(self):
        """Back to the snapshot; all leases since are void."""
        if self.saved is None:
            return
        saved, rows, consumed, x = self.saved
        self.dock.restore(saved)
        self.rows, self.held, self.x = set(rows), {}, dict(x)
        self.consumed = {stage: set(uids) for stage, uids in consumed.items()}

    # ---- what holds ----

    @invariant()
    def each_row_is_in_one_state_at_each_stage(self):
        """The dock's own table agrees with the model."""
        frame = self.dock.frame()
        assert set(frame["uid"]) == self.rows
        for stage in STAGES:
            said = dict(zip(frame["uid"], frame[f"stage:{stage}"], strict=True))
            held = {u: h[0] for (s, _), h in self.held.items() if s == stage for u in h[1]}
            for uid, state in said.items():
                if uid in self.consumed[stage]:
                    assert state == "consumed"
                else:
                    assert state == (f"leased by {held[uid]}" if uid in held else "waiting")

    def teardown(self):
        """Nothing is lost: in the end every row goes through every stage, and all is freed."""
        self.now += LEASE_S
        self.held = {}
        every = range(5 * GROUP_SIZE)
        self.write([u for u in every if u not in self.rows | self.consumed["train"]], "b")
        for stage in STAGES:
            while self.rows - self.consumed[stage]:
                lease = self.get(stage, "p", "a", samplers.in_order, 1)
                self.ack(lease, "b", True)
        assert self.consumed["train"] == set(every)
        self.dock.sweep()
        stats = self.dock.transport.warehouses("stats", dict.fromkeys(NODES, ()))
        assert [reply.value["nbytes"] for reply in stats.values()] == [0, 0]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
