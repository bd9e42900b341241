"""Plans carried out: over ranks in one process, and over the ranks of a process group."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit import waits
from rlkit.reshard.exchange import Exchange
from rlkit.reshard.pieces import (
    Frame,
    Message,
    damaged,
    differing,
    pack,
    unpack,
)
from rlkit.reshard.report import ReshardReport
from rlkit.reshard.shards import Shards

logger = logging.getLogger("rlkit.reshard")

Wire = Callable[[int, Message, list[Tensor]], list[Tensor] | None]
"""(source, message, bytes of each piece, then the fingerprints) -> those that arrive; None: they
are lost."""


@torch.no_grad()
def reshard_in_process(
    shards: Sequence[Shards],
    *,
    version: int,
    check: bool = True,
    elementwise: bool = False,
    wire: Wire | None = None,
) -> ReshardReport:
    """Fill the generation tensors of all ranks of a plan, one rank after the other.

    Every piece that travels is compared by fingerprint (``check``), or element by element too, so
    that an error names the first element that differs. The ranks publish ``version`` together or
    not at all.
    """
    start, stamp, bad = time.perf_counter(), version if check else None, []
    try:
        into = {s.rank: s.begin() for s in shards}
        peak = max(map(_peak, shards))
        for bucket in range(shards[0].share.num_buckets):
            for s in shards:
                _copy(s, bucket, into[s.rank])
            for pair in _pairs(shards, bucket):
                bad += _deliver(pair, into[pair.target.rank], wire, version=stamp)
        if elementwise:
            bad = [
                name
                for bucket in range(shards[0].share.num_buckets)
                for pair in _pairs(shards, bucket)
                for name in _elementwise(pair, into[pair.target.rank])
            ] or bad
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


@torch.no_grad()
def reshard_over(
    group: Any, shards: Shards, *, version: int, check: bool = True, elementwise: bool = False
) -> ReshardReport:
    """``reshard_in_process`` for the rank that this process is; all ranks call it.

    group: a torch process group over the plan's ranks. Its timeout ends every wait.
    """
    start, stamp, bad = time.perf_counter(), version if check else None, []
    try:
        with waits.Waiter() as waiter:
            into = shards.begin()
            exchange = Exchange(group, shards, into, waiter, version=stamp)
            peak = _held(shards) + exchange.buffer_bytes
            for bucket in range(shards.share.num_buckets):
                logger.debug("rank %d: bucket %d", shards.rank, bucket)
                exchange.start(bucket)
                _copy(shards, bucket, into)  # while messages travel
                bad += exchange.take()
            del exchange
            if elementwise:
                again = Exchange(group, shards, into, waiter, version=None, in_place=False)
                bad = _sent_again(again) or bad
                del again
        _raise_for(bad, shards.version, elsewhere=_sum(group, len(bad)))
        _swap_together(group, shards)
    except BaseException:
        shards.discard()
        raise
    shards.publish(version)
    return _report(shards, start, peak, version, verified=check or elementwise)


# ---- one bucket ----


class Pair(NamedTuple):
    """A message that travels, as both ends have it."""

    source: Shards
    target: Shards
    sent: Message
    received: Message


def _pairs(shards: Sequence[Shards], bucket: int) -> Iterator[Pair]:
    by_rank = {s.rank: s for s in shards}
    for source in shards:
        for sent in source.share.far(source.share.outgoing, bucket):
            target = by_rank[sent.peer]
            incoming = target.share.incoming[bucket]
            received = next(m for m in incoming if m.peer == source.rank)
            yield Pair(source, target, sent, received)


def _deliver(
    pair: Pair, into: dict[str, Tensor], wire: Wire | None, *, version: int | None
) -> list[str]:
    """Copy a message's parts from one rank's tensors or buffer to the other's: damaged ones."""
    source, target, sent, received = pair
    out, box = source.buffer(sent.room()), target.buffer(received.room())
    leaving, arriving = sent.parts(source.training, out), received.parts(into, box)
    pack(leaving)
    arrived = [part.bytes for part in leaving]
    if version is not None:
        arrived += [_fingerprints(sent.frames(leaving, out), version)]
    if wire is not None:
        arrived = wire(source.rank, sent, arrived)
    if arrived is None:
        raise RuntimeError(
            f"reshard: of bucket {sent.bucket} nothing arrived at rank {target.rank} from rank "
            f"{source.rank} ({len(sent.pieces)} pieces, {sent.pieces[0].name} first); "
            f"version {target.version} stays. Reshard again."
        )
    for part, bytes_ in zip(arriving, arrived, strict=False):
        part.bytes.copy_(bytes_)
    unpack(arriving)
    if version is None:
        return []
    return damaged(arriving, arrived[-1], _fingerprints(received.frames(arriving, box), version))


def _fingerprints(frames: Sequence[Frame], version: int) -> Tensor:
    return torch.cat([frame.fingerprints(version) for frame in frames])


def _copy(s: Shards, bucket: int, into: dict[str, Tensor]) -> None:
    """Copy pieces that stay on their device."""
    own = [m for m in s.share.outgoing.get(bucket, []) if m.peer == s.rank]
    for message in (m for m in s.share.incoming.get(bucket, []) if m.peer == s.rank):
        for source, target in zip(own[0].pieces, message.pieces, strict=True):
            if target.here is not None:
                after = target.view(into)
                after.copy_(source.view(s.training).view(after.shape))


# ---- checks ----


def _elementwise(pair: Pair, into: dict[str, Tensor]) -> list[str]:
    """A message is packed once more and compared with what lies at its target."""
    source, _, sent, received = pair
    flat = source.buffer(sent.room(in_place=False))
    pack(sent.parts(source.training, flat, in_place=False))
    return differing(received.parts(into, flat, in_place=False))


def _sent_again(exchange: Exchange) -> list[str]:
    """Everything is sent once more and compared with what lies in this rank's tensors."""
    bad: list[str] = []
    for bucket in range(exchange.shards.share.num_buckets):
        exchange.start(bucket)
        bad += exchange.compare()
    return bad


def _raise_for(bad: Sequence[str], version: int, *, elsewhere: int = 0) -> None:
    if bad or elsewhere:
        what = f"{len(bad)} pieces differ from what was sent, first {list(bad[:3])}"
        raise RuntimeError(
            f"reshard: {what if bad else f'{elsewhere} pieces differ on other ranks'}; version "
            f"{version} stays. Reshard again; elementwise=True compares each element."
        )


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
    waits.finish(group.allreduce([total]))
    return int(total)


def _held(s: Shards) -> int:
    return s.memory()["weights"]


def _peak(s: Shards) -> int:
    arriving, leaving = s.share.rooms()
    return _held(s) + arriving + 2 * leaving


def _report(s: Shards, start: float, peak: int, version: int, *, verified: bool) -> ReshardReport:
    return ReshardReport(
        seconds=time.perf_counter() - start,
        bytes=s.plan.nbytes,
        peak_gib=peak / 2**30,
        verified=verified,
        version=version,
    )
