"""Plans carried out: over ranks in one process, and over the ranks of a process group."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.reshard.fingerprints import fingerprint
from rlkit.reshard.pieces import Message
from rlkit.reshard.resharder import ReshardReport
from rlkit.reshard.shards import Shards

logger = logging.getLogger("rlkit.reshard")

Wire = Callable[[int, Message, Tensor], Tensor | None]
"""(source, message, bytes) -> the bytes that arrive; None: they are lost."""


def reshard_in_process(
    shards: Sequence[Shards],
    *,
    version: int,
    check: bool = True,
    elementwise: bool = False,
    wire: Wire | None = None,
) -> ReshardReport:
    """Fill the generation tensors of all ranks of a plan, one rank after the other.

    Every piece is compared by fingerprint (``check``), or element by element too, so that an error
    names the first element that differs. The ranks publish ``version`` together or not at all.
    """
    start, peak, stamp = time.perf_counter(), 0, version if check else None
    by_rank = {s.rank: s for s in shards}
    wire = wire or (lambda source, message, flat: flat)
    try:
        into = {s.rank: s.begin() for s in shards}
        bad: list[str] = []
        for bucket in range(shards[0].share.num_buckets):
            inbox, packed = _deliver(shards, bucket, wire, version=stamp)
            for s in shards:
                bad += _take(s, bucket, inbox[s.rank], into[s.rank], version=stamp)
                peak = max(peak, _held(s) + sum(f.nbytes for f in inbox[s.rank].values())
                           + packed[s.rank])  # fmt: skip
        if elementwise:
            bad = list(_elementwise(by_rank, into)) or bad
        _raise_for(bad, shards[0].version)
        for s in shards:
            s.swap_out()
    except BaseException:
        for s in shards:
            s.discard()
        raise
    for s in shards:
        s.publish(version)
    return _report(shards[0], start, peak, version, verified=check or elementwise)


def reshard_over(
    group: Any, shards: Shards, *, version: int, check: bool = True, elementwise: bool = False
) -> ReshardReport:
    """``reshard_in_process`` for the rank that this process is; all ranks call it.

    group: a torch process group over the plan's ranks. Its timeout ends every wait.
    """
    start, stamp, bad = time.perf_counter(), version if check else None, []
    try:
        into, share = shards.begin(), shards.share
        buffers = [_buffer(nbytes, shards) for nbytes in (share.most_in, *[share.most_out] * 2)]
        peak = _held(shards) + sum(buffer.nbytes for buffer in buffers)
        for bucket in range(share.num_buckets):
            logger.debug("rank %d: bucket %d", shards.rank, bucket)
            inbox = _exchange(group, shards, bucket, buffers, version=stamp)
            bad += _take(shards, bucket, inbox, into, version=stamp)
        if elementwise:
            bad = list(_elementwise_over(group, shards, into, buffers)) or bad
        _raise_for(bad, shards.version, elsewhere=_sum(group, len(bad)))
        del buffers
        _swap_together(group, shards)
    except BaseException:
        shards.discard()
        raise
    shards.publish(version)
    return _report(shards, start, peak, version, verified=check or elementwise)


# ---- one bucket ----


def _deliver(
    shards: Sequence[Shards], bucket: int, wire: Wire, *, version: int | None
) -> tuple[dict[int, dict[int, Tensor]], dict[int, int]]:
    """What each rank receives by source, and the largest message that each packs."""
    inbox: dict[int, dict[int, Tensor]] = {s.rank: {} for s in shards}
    packed = dict.fromkeys(inbox, 0)
    for s in shards:
        for message in s.share.far(s.share.outgoing, bucket):
            flat = message.pack(s.training, _buffer(message.nbytes, s), version=version)
            packed[s.rank] = max(packed[s.rank], flat.nbytes)
            arrived = wire(s.rank, message, flat)
            if arrived is not None:
                inbox[message.peer][s.rank] = arrived
    return inbox, packed


def _exchange(
    group: Any, shards: Shards, bucket: int, buffers: Sequence[Tensor], *, version: int | None
) -> dict[int, Tensor]:
    """``_deliver`` over a process group: receives are open before the first send, and a bucket ends
    before the next begins, so ranks that are a bucket apart never wait for each other in a circle.
    One message is packed while another is sent.
    """
    share, waits, inbox, start = shards.share, [], {}, 0
    for message in share.far(share.incoming, bucket):
        inbox[message.peer] = buffers[0][start : start + message.nbytes]
        start += message.nbytes
        waits.append((message, group.recv([inbox[message.peer]], message.peer, bucket)))
    sending: list[tuple[Message, Any]] = []
    for i, message in enumerate(share.far(share.outgoing, bucket)):
        if i > 1:  # its buffer is the one of the message before the last
            _wait(*sending[i - 2], shards, "to")
        flat = message.pack(shards.training, buffers[1 + i % 2][: message.nbytes], version=version)
        sending.append((message, group.send([flat], message.peer, bucket)))
    for message, work in sending[-2:]:
        _wait(message, work, shards, "to")
    for message, work in waits:
        _wait(message, work, shards, "from")
    return inbox


def _wait(message: Message, work: Any, shards: Shards, way: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"reshard: rank {shards.rank} waited in vain for bucket {message.bucket} {way} rank "
            f"{message.peer} ({message.pieces[0].name} first); version {shards.version} stays. "
            f"Did that rank call reshard, with the same plan? ({str(error).splitlines()[0]})"
        ) from error


def _take(
    s: Shards,
    bucket: int,
    inbox: dict[int, Tensor],
    into: dict[str, Tensor],
    *,
    version: int | None,
) -> list[str]:
    """Put what arrived, and pieces that are here already, in place: names of damaged ones."""
    bad: list[str] = []
    for message in s.share.incoming.get(bucket, []):
        if message.peer == s.rank:
            bad += _copy(s, bucket, message, into, check=version is not None)
            continue
        flat = inbox.get(message.peer)
        if flat is None:
            raise RuntimeError(
                f"reshard: of bucket {bucket} nothing arrived at rank {s.rank} from rank "
                f"{message.peer} ({len(message.pieces)} pieces, {message.pieces[0].name} first); "
                f"version {s.version} stays. Reshard again."
            )
        message.unpack(flat, into)
        bad += [] if version is None else message.damaged(flat, into, version=version)
    return bad


def _copy(
    s: Shards, bucket: int, message: Message, into: dict[str, Tensor], *, check: bool
) -> list[str]:
    """Pieces that stay on their device."""
    bad = []
    own = next(m for m in s.share.outgoing[bucket] if m.peer == s.rank)
    for source, target in zip(own.pieces, message.pieces, strict=True):
        if target.here is None:
            continue
        before, after = source.view(s.training), target.view(into)
        after.copy_(before.view(after.shape))
        if check and fingerprint(before) != fingerprint(after):
            bad.append(target.name)
    return bad


# ---- checks ----


def _elementwise(by_rank: dict[int, Shards], into: dict[int, dict[str, Tensor]]) -> Iterator[str]:
    """Every piece is packed once more and compared with what lies at its target."""
    for source in by_rank.values():
        for message in (m for each in source.share.outgoing.values() for m in each):
            target = by_rank[message.peer].share.incoming[message.bucket]
            twin = next(m for m in target if m.peer == source.rank)
            flat = _buffer(message.nbytes, source)
            message.pack(source.training, flat, version=None)
            yield from twin.differing(flat, into[message.peer])


def _elementwise_over(
    group: Any, shards: Shards, into: dict[str, Tensor], buffers: Sequence[Tensor]
) -> Iterator[str]:
    for bucket in range(shards.share.num_buckets):
        inbox = _exchange(group, shards, bucket, buffers, version=None)
        for message in shards.share.far(shards.share.incoming, bucket):
            yield from message.differing(inbox[message.peer], into)


def _raise_for(bad: Sequence[str], version: int, *, elsewhere: int = 0) -> None:
    if bad or elsewhere:
        what = f"{len(bad)} pieces differ from what was sent, first {list(bad[:3])}"
        raise RuntimeError(
            f"reshard: {what if bad else f'{elsewhere} pieces differ on other ranks'}; version "
            f"{version} stays. Reshard again; with elementwise=True the error names the element."
        )


def _buffer(nbytes: int, s: Shards) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=s.device)


def _swap_together(group: Any, shards: Shards) -> None:
    """Swap out on every rank, or raise on every rank."""
    error: Exception | None = None
    try:
        shards.swap_out()
    except Exception as caught:
        error = caught
    failed = _sum(group, int(error is not None))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            f"reshard: training shards did not go to host memory on {failed} other ranks; version "
            f"{shards.version} stays. Their errors say why."
        )


def _sum(group: Any, number: int) -> int:
    total = torch.tensor([number])
    group.allreduce([total]).wait()
    return int(total)


def _held(s: Shards) -> int:
    return s.memory()["weights"]


def _report(s: Shards, start: float, peak: int, version: int, *, verified: bool) -> ReshardReport:
    return ReshardReport(
        seconds=time.perf_counter() - start,
        bytes=s.plan.nbytes,
        peak_gib=peak / 2**30,
        verified=verified,
        version=version,
    )
