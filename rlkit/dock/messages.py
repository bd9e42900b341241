"""What controllers, warehouses and clients of the dock tell each other: metadata, never values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlkit.batch.rows import Rows, object_nbytes
from rlkit.checks import fits, whole
from rlkit.dock.samplers import check_size
from rlkit.functions import Shipped


class StaleLeaseError(RuntimeError):
    """A lease that ended is answered for: its rows may be in other hands, so the work is void."""


class KindError(TypeError):
    """Values of another kind or dtype than those that other rows of their column have."""


class ClosedError(RuntimeError):
    """The dock was closed, or its cluster shut down."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One column of one write: how long its rows are, and what they are."""

    kind: str
    dtype: str
    nbytes: np.ndarray
    """[N] int64: bytes of each row."""
    lengths: np.ndarray | None
    """[N] int64 of ragged rows."""

    @classmethod
    def of(cls, rows: Rows) -> "Facts":
        """The facts of N rows."""
        if isinstance(rows.values, list):
            sizes = [object_nbytes(x) for x in rows.values]
            return cls("objects", "object", np.asarray(sizes, dtype=np.int64), None)
        lengths = None if rows.lengths is None else rows.lengths.numpy()
        count = np.ones(len(rows), dtype=np.int64) if lengths is None else lengths
        size = rows.values.element_size() * int(np.prod(rows.values.shape[1:], dtype=np.int64))
        return cls(rows.kind, str(rows.values.dtype)[6:], count * size, lengths)

    def at(self, index: np.ndarray) -> "Facts":
        """The facts of rows ``index`` [M]."""
        lengths = None if self.lengths is None else self.lengths[index]
        return Facts(self.kind, self.dtype, self.nbytes[index], lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One write: columns of N rows that lie on ``node`` now."""

    node: str
    stage: str
    """The stage that wrote."""
    uids: np.ndarray
    columns: Mapping[str, Facts]
    group_ids: np.ndarray | None = None
    """[N]; None: as known, and of new rows the uid."""
    versions: np.ndarray | None = None
    """[N] policy versions; None: as known, and of new rows 0."""
    partition: str = "train"
    """Of new rows."""
    stamp: int = 0
    """When it was written, in ns: of two writes of one value the later counts."""

    def of(self, columns: Mapping[str, Facts], *, node: str) -> "Notice":
        """The same write of other columns, on a node."""
        return replace(self, columns=columns, node=node)

    def at(self, index: np.ndarray) -> "Notice":
        """The same write of rows ``index`` [M]."""
        return Notice(
            node=self.node,
            stage=self.stage,
            uids=self.uids[index],
            columns={name: facts.at(index) for name, facts in self.columns.items()},
            group_ids=None if self.group_ids is None else self.group_ids[index],
            versions=None if self.versions is None else self.versions[index],
            partition=self.partition,
            stamp=self.stamp,
        )


class Kinds:
    """What each column's values are; the rows of one must agree, or none could read them all."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}

    def check(self, notice: Notice, others: Callable[[str], int]) -> None:
        """Enter a write's; KindError if ``others(column)``, the number of other rows, is not 0."""
        if not len(notice.uids):
            return
        found = {name: (facts.kind, facts.dtype) for name, facts in notice.columns.items()}
        for name, kind in found.items():
            known = self._known.get(name, kind)
            if known != kind and (num := others(name)):
                raise KindError(
                    f"{name}: got {' '.join(kind)} values, need {' '.join(known)}, as {num} other "
                    "rows have. Cast them where they are written, or use another name."
                )
        self._known |= found


@dataclass(frozen=True, slots=True)
class Peers:
    """Processes of one model-parallel group, which must get the same rows of one call."""

    group: str
    """Which group: data-parallel rank 0 of the actor, for instance."""
    size: int
    """Processes in it; rows count as consumed when all of them acknowledge."""
    call: tuple[int, ...]
    """Which call of the group: (step, batch), the same in all its processes."""

    def __post_init__(self) -> None:
        whole("size", self.size, what="process")
        if not (isinstance(self.group, str) and isinstance(self.call, tuple)):
            raise TypeError(
                f"Peers: got group {self.group!r} and call {self.call!r}, need a name and a tuple "
                "of numbers, (step, batch)."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a holder asks its controller for: from ``least`` to ``n`` rows with all ``columns``."""

    columns: tuple[str, ...]
    n: int
    least: int
    holder: str
    sampler: Any
    partition: str = "train"
    peers: Peers | None = None
    id: str = ""
    """Names the request, for ``withdraw``."""

    def __post_init__(self) -> None:
        whole("n", self.n, what="row")
        if not (self.peers is None or isinstance(self.peers, Peers)):
            raise TypeError(
                f"peers: got {self.peers!r}, need rk.dock.Peers(group, size, call=(step, batch))."
            )
        if whole("least", self.least, what="row") > self.n:
            raise ValueError(f"least: got {self.least} rows, need at most {self.n}, which is n.")
        if not isinstance(self.sampler, Shipped):
            fits("sampler", self.sampler, "rows", "n")
            check_size(self.sampler, self.n, self.least)


@dataclass(slots=True, kw_only=True)
class Held:
    """A lease as its controller keeps it, and as its ledger keeps it for a controller that died."""

    token: int
    uids: np.ndarray
    seats: dict[str, float]
    """Holder -> when its last heartbeat runs out; "" stands for peers that have not asked yet."""
    size: int = 1
    key: tuple[Any, ...] | None = None
    acked: frozenset[str] = frozenset()
    asked: str = ""
    """Id of the request that opened it."""

    @property
    def done(self) -> bool:
        """Whether every peer acknowledged."""
        return len(self.acked) == self.size

    @property
    def deadline(self) -> float:
        """When the lease ends unless somebody's heartbeat comes first."""
        return min(at for holder, at in self.seats.items() if holder not in self.acked)


@dataclass(frozen=True, slots=True)
class Places:
    """N rows, and on which node each of their columns lies."""

    uids: np.ndarray
    group_ids: np.ndarray
    versions: np.ndarray
    nodes: tuple[str, ...]
    at: Mapping[str, np.ndarray]
    """Column -> [N] index into ``nodes``."""

    def by_node(self) -> dict[str, dict[str, np.ndarray]]:
        """Node -> column -> the uids to pull from there."""
        found: dict[str, dict[str, np.ndarray]] = {}
        before, pieces = None, {}
        for column, codes in self.at.items():
            if before is None or not np.array_equal(codes, before):  # else as of that column
                pieces = {self.nodes[c]: self.uids[codes == c] for c in codes_in(codes)}
            before = codes
            for node, uids in pieces.items():
                found.setdefault(node, {})[column] = uids
        return found


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease, as the holder gets it: the token answers for it, heartbeats keep it."""

    token: int
    stage: str
    holder: str
    places: Places
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why a wait came to nothing: what was there, what was missing."""

    stage: str
    columns: tuple[str, ...]
    n: int
    waited_s: float
    rows: int = 0
    """Rows of the partition that this stage has not consumed."""
    ready: int = 0
    leased: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Holder -> uids that it has of this stage."""
    missing: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Column -> uids of rows that lack it."""
    writers: Mapping[str, str] = field(default_factory=dict)
    """Column -> the stage that wrote some rows of it."""
    gone: tuple[int, ...] = ()
    """Uids asked for that were freed or cleared."""
    unknown: tuple[int, ...] = ()
    """Uids asked for that nobody has put."""


def codes_in(codes: np.ndarray) -> list[int]:
    """The small numbers, 0 and above, that occur in ``codes`` [N], in order."""
    if len(codes) and codes[0] >= 0 and (codes == codes[0]).all():  # one node, mostly
        return [int(codes[0])]
    return np.flatnonzero(np.bincount(codes + 1)[1:]).tolist()
