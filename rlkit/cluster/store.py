"""RayStore: one store actor a node.

A process writes to its own node's and reads from whichever has the rows.
"""

import os
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlkit import trace
from rlkit.batch.rows import Rows
from rlkit.batch.shelf import Shelf
from rlkit.batch.store import Column, Part, new_key
from rlkit.cluster.shared import handed, opened, shared
from rlkit.dock.warehouse import Warehouse
from rlkit.shield import when_collected


class StoreActor:
    """Keeps rows on one node, by key and for docks; runs as a Ray actor."""

    def __init__(self, node: str = "local") -> None:
        self.shelf, self.node = Shelf(), node
        self._docks: dict[str, Warehouse] = {}

    def of_dock(
        self, dock: str, method: str, args: Sequence[Any], options: Any, *, by_value: bool = False
    ) -> Any:
        """A method of a dock's warehouse here; ``make`` makes it if it is not there, for consumers.

        ``close`` ends it. ``by_value``: no references to objects, whose owner is gone.
        """
        if method == "close":
            self._docks.pop(dock, None)
        elif method == "make":
            made = Warehouse(self.node, consumers=args, name=dock, store=self.shelf)
            self._docks.setdefault(dock, made)
        elif dock not in self._docks:
            raise LookupError(
                f"{dock}: its rows on node {self.node!r} are gone: the store process died. Call "
                f"dock.lost({self.node!r}): it returns the uids of rows that must be made again."
            )
        else:
            found = getattr(self._docks[dock], method)(*map(opened, args), **options)
            return found if by_value else handed(found)

    def put(self, uids: np.ndarray, rows: Mapping[str, Any]) -> None:
        """Keep rows under their keys."""
        for key, each in opened(rows).items():
            self.shelf.put(key, uids, each)

    def get(self, requests: Sequence[tuple[str, np.ndarray]], *, by_value: bool = False) -> Any:
        """Rows of each (key, uids); of a dock's rows the key is ``DOCK:COLUMN``."""
        found = [self._rows(key, uids) for key, uids in requests]
        return found if by_value else handed(found)

    def _rows(self, key: str, uids: np.ndarray) -> Rows:
        dock, _, column = key.partition(":")
        if dock in self._docks:
            return self._docks[dock].fetch({column: uids})[column]
        return self.shelf.get(key, uids)

    def free(self, keys: Sequence[str]) -> None:
        """Forget keys."""
        for key in keys:
            self.shelf.free(key)

    def stats(self) -> dict[str, int]:
        """Keys and bytes held, and the process id."""
        return {"keys": len(self.shelf), "nbytes": self.shelf.nbytes, "pid": os.getpid()}


def start_store(node: str, name: str, *, at: str) -> Any:
    """The store actor of a node, on the node ``at``."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Not soft: Ray would place an actor that needs no CPU on any node.
    there = NodeAffinitySchedulingStrategy(at, soft=False)
    how: Any = {"num_cpus": 0, "max_concurrency": 8, "max_restarts": -1, "name": name}
    return ray.remote(StoreActor).options(scheduling_strategy=there, **how).remote(node)


class RayStore:
    """Client of the store actors, one in each process.

    The driver's owns the rows and frees them.
    """

    def __init__(self, actors: dict[str, Any], *, timeout_s: float) -> None:
        self.actors, self.timeout_s = actors, timeout_s
        self.owner = True
        self._owned: weakref.WeakValueDictionary[str, Part] = weakref.WeakValueDictionary()
        self.received_bytes = 0  # by this process: rows fetched and, on the driver, results
        self.run: Callable[..., Column] | None = None  # set by the cluster: runs what apply gets
        self._name = uuid.uuid4().hex[:8]
        self._here: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"actors": self.actors, "timeout_s": self.timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
        self.owner = False

    def _check_open(self, what: str) -> None:
        if not self.actors:
            raise RuntimeError(
                f"{what}: the cluster that held these rows was shut down. Read what you need "
                "before that, such as kept = batch.load() or frame = batch.frame()."
            )

    @property
    def place(self) -> str:
        """Node id of this process, or a node that has a store."""
        if self._here is None:
            import ray

            node = ray.get_runtime_context().get_node_id()
            self._here = node if node in self.actors else next(iter(self.actors))
        return self._here

    def put(self, name: str, uids: np.ndarray, rows: Rows) -> Part:
        """Keep rows on this node."""
        return self.put_all(uids, {name: rows})[name]

    def put_all(self, uids: np.ndarray, columns: Mapping[str, Rows]) -> dict[str, Part]:
        """``put`` of several columns of the same rows, in one message."""
        what = f"writing {', '.join(map(repr, columns))}"
        self._check_open(what)
        owner = f"{self._name}.{os.getpid()}"
        keys = {name: new_key(name, owner) for name in columns}
        nbytes = sum(rows.nbytes for rows in columns.values())
        with trace.span("store/put", rows=len(uids), bytes=nbytes):
            rows = shared({key: columns[name] for name, key in keys.items()})
            self._get([self.actors[self.place].put.remote(uids, rows)], what)
        parts = {
            name: Part(key=key, place=self.place, uids=uids, rows=columns[name], name=name)
            for name, key in keys.items()
        }
        return {n: self.adopt(part) for n, part in parts.items()} if self.owner else parts

    def adopt(self, part: Part) -> Part:
        """Own the rows of a part that a worker wrote: they are freed when nothing here names it.

        Of rows that this process owns already it returns a piece of the part it has.
        """
        if part.fresh:
            part.fresh = False
            self._owned[part.key] = part
            when_collected(part, _free, weakref.ref(self), part.place, part.key)
            return part
        mine = self._owned.get(part.key)
        if mine is not None and mine is not part:
            part.base = mine
        return part

    def fetch(self, requests: Sequence[tuple[Part, np.ndarray]]) -> list[Rows]:
        """Rows of each (part, uids), one message a node."""
        what = f"reading {sorted({part.key.split('#')[0] for part, _ in requests})}"
        self._check_open(what)
        by_place: dict[str, list[int]] = defaultdict(list)
        for i, (part, _) in enumerate(requests):
            by_place[part.place].append(i)
        found: list[Any] = [None] * len(requests)
        with trace.span("store/fetch", rows=sum(len(uids) for _, uids in requests)) as span:
            asked = {
                place: [(requests[i][0].key, requests[i][1]) for i in at]
                for place, at in by_place.items()
            }
            refs = [self.actors[place].get.remote(keys) for place, keys in asked.items()]
            answers = self._get(refs, what)
            for place, rows in zip(by_place, answers, strict=True):
                rows = self._opened(place, asked[place], rows, what)
                for i, row in zip(by_place[place], rows, strict=True):
                    found[i] = row
                    span.bytes += row.nbytes
        self.received_bytes += span.bytes
        return found

    def _opened(self, place: str, keys: Any, rows: Any, what: str) -> list[Rows]:
        from ray.exceptions import ObjectLostError

        try:
            return opened(rows)
        except ObjectLostError:  # who wrote them died, but the store has them mapped
            return self._get([self.actors[place].get.remote(keys, by_value=True)], what)[0]

    def apply(self, call: Callable[[Any], Rows], batch: Any, name: str) -> Column:
        """Run ``call`` in a process of the cluster, never in the driver."""
        if self.run is None:
            raise RuntimeError(
                f"{name}: called inside a worker, where no runner is known; call it on the driver."
            )
        return self.run(call, batch, name)

    def _get(self, refs: list[Any], what: str) -> list[Any]:
        import ray
        from ray import exceptions

        start = time.time()
        try:
            return ray.get(refs, timeout=self.timeout_s)
        except exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"store: {what} took over {time.time() - start:.0f} s (limit "
                f"{self.timeout_s:.0f} s); the store's node is "
                "overloaded or gone. Raise rk.launch(timeout_s=...) or look at cluster.frame()."
            ) from error
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except (exceptions.RayActorError, exceptions.ActorUnschedulableError) as error:
            raise RuntimeError(
                f"store: {what} failed: the node's store process died, and its rows with it "
                f"({str(error).splitlines()[0]}). It starts again empty: run the stages that wrote "
                "those rows again."
            ) from error


def _free(store: weakref.ref, place: str, key: str) -> None:
    """Finalizer of an owned part; a store that is closed has nothing left to free."""
    live = store()
    if live is not None and place in live.actors:
        with trace.span("store/free"):
            live.actors[place].free.remote([key])
