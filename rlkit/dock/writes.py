"""What a put does: values to a warehouse, or handles of values that lie on nodes already; then
notices to the controllers, and what came too late or is out of date is freed.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlkit.batch.rows import Rows
from rlkit.batch.store import Column
from rlkit.dock.explain import no_room
from rlkit.dock.messages import Facts, KindError, Notice
from rlkit.dock.traffic import DRIVER, Traffic
from rlkit.dock.transport import Transport

logger = logging.getLogger("rlkit.dock")


def admit(transport: Transport, uids: np.ndarray, groups: np.ndarray, *, timeout_s: float) -> None:
    """Wait for room at every consumer of the graph; TimeoutError says who holds it."""
    graph, request_id = transport.graph, uuid.uuid4().hex
    stages = graph.consumers if graph and transport.capacity else ()
    calls = dict.fromkeys(stages, (uids, groups, request_id))
    try:
        told = transport.controllers("admit", calls, timeout_s=timeout_s)
        short = [reply.value for reply in told.values() if reply.value is not None]
        if short:
            raise no_room(short[0], uids)
    except BaseException:  # what a stage has promised, or would yet
        transport.controllers("withdraw", dict.fromkeys(stages, (request_id, uids)))
        raise


def put_values(
    transport: Transport, notice: Notice, rows: Mapping[str, Rows], *, source: str
) -> None:
    """Send rows from the node ``source`` to the warehouse of the notice's."""
    facts, home = {name: Facts.of(values) for name, values in rows.items()}, notice.node
    notice = notice.of(facts, node=home)
    call, options = {home: (notice, rows)}, {"source": source}
    try:
        reply = transport.warehouses("put", call, **options)[home]
    except KindError:  # than rows there, which would be lost if rows elsewhere are of that, too
        _tell(transport, notice, [DRIVER], written=False)
        reply = transport.warehouses("put", call, **options, retypes=True)[home]
    count_seconds(transport, (notice.stage, source, home), home, reply.seconds)
    _tell(transport, notice, reply.value)


def count_seconds(
    transport: Transport, key: tuple[str, str, str], node: str, seconds: float
) -> None:
    """Tell the warehouse that counted a message how long it took; nobody waits for that."""
    spent = Traffic()
    spent.count(key, 0, seconds=seconds)
    transport.tell("count", {node: (spent,)})


def put_handles(transport: Transport, notice: Notice, columns: Mapping[str, Column]) -> None:
    """Enter values of the cluster's store: each node's warehouse takes over what lies there."""
    by_node: dict[str, dict[str, list[tuple[str, np.ndarray]]]] = {}
    for name, column in columns.items():
        for part, uids in column.requests(notice.uids)[0]:
            by_node.setdefault(part.place, {}).setdefault(name, []).append((part.key, uids))
    replies = transport.warehouses("adopt", {n: (notice, found) for n, found in by_node.items()})
    for reply in replies.values():
        notices, stages = reply.value
        for entered in notices:
            _tell(transport, entered, stages)


def _tell(
    transport: Transport, notice: Notice, stages: Sequence[str], *, written: bool = True
) -> None:
    try:
        told = transport.controllers("notice", dict.fromkeys(stages, (notice,)))
    except KindError:  # rows on other nodes have values of another kind
        if written:
            call = {notice.node: (notice.uids, list(notice.columns))}
            transport.warehouses("free", call, before=notice.stamp + 1)
        raise
    answers = [answer.value for answer in told.values()]
    late = [uids for uids, _ in answers if len(uids)]
    if late:
        logger.warning("%d rows came after all stages were done with them", len(late[0]))
        transport.warehouses("free", {notice.node: (late[0],)})
    for node, stale in {n: c for _, moved in answers for n, c in moved.items()}.items():
        for name, uids in stale.items():
            logger.info("column %r of %d rows is written again", name, len(uids))
            call = {node: (uids, [name])}
            transport.warehouses("free", call, before=notice.stamp + 1)


def is_handle(transport: Transport, value: Any) -> bool:
    """Whether a value is a column of the store whose nodes are the dock's."""
    return isinstance(value, Column) and value.store is transport.store is not None
