"""Tensors on their way to host memory and back, bucket by bucket."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rlkit import device


@dataclass(slots=True)
class _Away:
    """One storage that is in host memory, and the tensors that lie in it."""

    names: list[str]
    host: Tensor
    device: torch.device
    kept: Any
    """The emptied storage, if somebody else still names it; None once it is gone."""


class HostSwap:
    """Moves the storages of named tensors to host memory, pinned where that exists, and back.

    The tensors stay the same objects, empty meanwhile, so that optimizers keep them. Host memory is
    kept from one swap to the next. A storage that something else names too (a flat buffer whose
    views the tensors are) is emptied in place; all its views are back with it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, bucket_mib: float = 64.0) -> None:
        self._tensors, self._limit = dict(tensors), int(bucket_mib * 2**20)
        self._views: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self._away: list[_Away] = []
        self._hosts: list[Tensor] = []

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held."""
        return sum(host.nbytes for host in self._hosts)

    def out(self) -> int:
        """Move everything to host memory and free it on the device: bytes that moved."""
        if self._away:
            raise RuntimeError("swap: the tensors are in host memory already; call back() first.")
        groups = self._buckets()
        try:
            for i, bucket in enumerate(groups):
                self._bucket_out(bucket, self._host(i, bucket))
        except BaseException:
            self.back()
            raise
        return sum(away.host.nbytes for away in self._away)

    def back(self) -> int:
        """Bring everything back, bit by bit as it was: bytes that moved."""
        moved = 0
        while self._away:
            away = self._away[0]
            if away.kept is None:
                storage = torch.UntypedStorage(away.host.nbytes, device=away.device)
            else:
                storage = away.kept.resize_(away.host.nbytes)
            _bytes_of(storage).copy_(away.host)
            for name in away.names:
                tensor, (offset, size, stride) = self._tensors[name], self._views[name]
                whole = torch.empty(0, dtype=tensor.dtype, device=away.device)
                tensor.data = whole.set_(storage, offset, size, stride)
            moved += away.host.nbytes
            del self._away[0]
        return moved

    def _buckets(self) -> list[list[list[str]]]:
        """Names by storage, storages by bucket; a larger storage has a bucket of its own."""
        by_storage: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        buckets: list[list[list[str]]] = []
        used = self._limit
        for names in by_storage.values():
            size = self._tensors[names[0]].untyped_storage().nbytes()
            if used + size > self._limit:
                buckets.append([])
                used = 0
            buckets[-1].append(names)
            used += size
        return buckets

    def _host(self, i: int, bucket: list[list[str]]) -> Tensor:
        """Host memory of a bucket, the same as the last time if the size is."""
        first = [self._tensors[names[0]] for names in bucket]
        size = sum(_padded(tensor.untyped_storage().nbytes()) for tensor in first)
        if i == len(self._hosts):
            self._hosts.append(torch.empty(0, dtype=torch.uint8))
        if self._hosts[i].nbytes != size:
            host = torch.empty(size, dtype=torch.uint8)
            self._hosts[i] = device.pin(host, first[0].device)
        return self._hosts[i]

    def _bucket_out(self, bucket: list[list[str]], host: Tensor) -> None:
        """Copy all of a bucket, wait once, then free it."""
        parts, start = [], 0
        for names in bucket:
            storage = self._tensors[names[0]].untyped_storage()
            parts.append(host[start : start + storage.nbytes()])
            parts[-1].copy_(_bytes_of(storage), non_blocking=True)
            start += _padded(storage.nbytes())
            del storage
        device.synchronize(self._tensors[bucket[0][0]].device)
        for names, part in zip(bucket, parts, strict=True):
            self._free(names, part)

    def _free(self, names: list[str], host: Tensor) -> None:
        tensors = [self._tensors[name] for name in names]
        storage, where = tensors[0].untyped_storage(), tensors[0].device
        for name, tensor in zip(names, tensors, strict=True):
            self._views[name] = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=where)
        watch = StorageWeakRef(storage)
        del storage
        kept = None
        if not watch.expired():  # a view elsewhere: the memory goes all the same
            kept = torch.UntypedStorage._new_with_weak_ptr(watch.cdata)
            kept.resize_(0)
        self._away.append(_Away(names, host, where, kept))


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _padded(size: int) -> int:
    return -(-size // 64) * 64
