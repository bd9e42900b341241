"""One bucket of a plan over a process group: what is open, and what arrives."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit import waits
from rlkit.reshard.pieces import Frame, Message, Part, damaged, differing, pack, unpack
from rlkit.reshard.shards import Shards


class _Arriving(NamedTuple):
    message: Message
    parts: list[Part]
    frames: list[Frame]
    works: list[Any]
    """Of each frame, then of the fingerprints."""
    sums: Tensor


class Exchange:
    """Messages of one rank, bucket by bucket: ``start`` sets a bucket's on their way, ``take`` ends
    it.

    Receives are open before the first send, and a bucket ends before the next begins, so ranks that
    are a bucket apart never wait for each other in a circle. Fingerprints are taken while bytes
    travel: the sender's come last, and the receiver's of each part when it is there. Without a
    version there are none. Buffers: for all that does not arrive in place, and for two messages
    that are sent, one being packed while the other travels.
    """

    def __init__(
        self,
        group: Any,
        shards: Shards,
        into: Mapping[str, Tensor],
        waiter: waits.Waiter,
        *,
        version: int | None,
        in_place: bool = True,
    ) -> None:
        self.group, self.shards, self.into = group, shards, into
        self.version, self.in_place, self._waiter = version, in_place, waiter
        arriving, leaving = shards.share.rooms(in_place=in_place)
        self._inbox, *self._outbox = (shards.buffer(n) for n in (arriving, leaving, leaving))
        self._incoming: list[_Arriving] = []
        self._sending: list[tuple[Message, list[Any]]] = []
        self._known: dict[tuple[Any, ...], Tensor] = {}  # fingerprints of large pieces, by place

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(flat.nbytes for flat in (self._inbox, *self._outbox))

    def start(self, bucket: int) -> None:
        """Open a bucket's receives, then send."""
        share, start = self.shards.share, 0
        self._incoming, self._sending = [], []
        for message in share.far(share.incoming, bucket):
            size = message.room(in_place=self.in_place)
            self._incoming.append(self._receive(message, self._inbox[start : start + size]))
            start += size
        for i, message in enumerate(share.far(share.outgoing, bucket)):
            if i > 1:  # its buffer is the one of the message before the last
                self._wait("to", *self._sending[i - 2])
            self._sending.append((message, self._send(message, self._outbox[i % 2])))

    def take(self) -> list[str]:
        """Put what arrives in place: names of pieces with other bits than were sent."""
        bad: list[str] = []
        for message, parts, frames, works, sums in self._incoming:
            found: list[Tensor] = []
            arrivals = self._each("from", message, works)
            for frame, _ in zip(frames, arrivals, strict=False):
                if self.version is not None:
                    found.append(frame.fingerprints(self.version))
                unpack(frame.inside)
            if self.version is not None:
                next(arrivals)  # the fingerprints are there, too
                bad += damaged(parts, sums, torch.cat(found))
        return self._end(bad)

    def compare(self) -> list[str]:
        """Leave what arrives in the buffers: elements in which the rank's tensors differ."""
        bad: list[str] = []
        for message, parts, _, works, _ in self._incoming:
            self._wait("from", message, works)
            bad += differing(parts)
        return self._end(bad)

    def _receive(self, message: Message, flat: Tensor) -> _Arriving:
        parts = message.parts(self.into, flat, in_place=self.in_place)
        frames = message.frames(parts, flat)
        sums = torch.zeros(len(parts), dtype=torch.int64, device=flat.device)
        tensors = [frame.bytes for frame in frames] + [sums] * (self.version is not None)
        works = [self.group.recv([each], message.peer, message.bucket) for each in tensors]
        return _Arriving(message, parts, frames, works, sums)

    def _send(self, message: Message, flat: Tensor) -> list[Any]:
        parts = message.parts(self.shards.training, flat, in_place=self.in_place)
        pack(parts)
        frames, place = message.frames(parts, flat), (message.peer, message.bucket)
        works, sums = [], []
        for frame in frames:
            works.append(self.group.send([frame.bytes], *place))
            if self.version is not None:  # just read, so still in the processor's cache
                sums.append(self._fingerprints(frame, self.version))
        if sums:
            works.append(self.group.send([torch.cat(sums)], *place))
        return works

    def _fingerprints(self, frame: Frame, version: int) -> Tensor:
        """Those of a frame that leaves: of what goes to several ranks once."""
        first = frame.inside[0].piece
        if not first.in_place:
            return frame.fingerprints(version)
        key = first.name, first.corner, first.nbytes
        if key not in self._known:
            self._known[key] = frame.fingerprints(version)
        return self._known[key]

    def _end(self, bad: list[str]) -> list[str]:
        for message, works in self._sending[-2:]:
            self._wait("to", message, works)
        return bad

    def _wait(self, way: str, message: Message, works: Sequence[Any]) -> None:
        for _ in self._each(way, message, works):
            pass

    def _each(self, way: str, message: Message, works: Sequence[Any]) -> Iterator[None]:
        """Yields as each of a message's works is done."""
        try:
            yield from self._waiter.each(works)
        except RuntimeError as error:
            raise RuntimeError(
                f"reshard: rank {self.shards.rank} waited in vain for bucket {message.bucket} "
                f"{way} rank {message.peer} ({message.pieces[0].name} first); version "
                f"{self.shards.version} stays. Did that rank call reshard, with the same plan? "
                f"({str(error).splitlines()[0]})"
            ) from error
