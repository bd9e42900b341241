"""What moves from a training layout to a generation layout.

Pure arithmetic on names, shapes and types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One parameter: Hugging Face name, shape, torch dtype name such as ``float32``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class WholePlan:
    """Buckets of whole tensors, sent in this order by the source to ``num_targets`` processes."""

    buckets: tuple[tuple[TensorFacts, ...], ...]
    num_targets: int

    @property
    def nbytes(self) -> int:
        """Bytes that arrive, all targets together."""
        return self.num_targets * sum(t.nbytes for bucket in self.buckets for t in bucket)

    def frame(self) -> Any:
        """DataFrame, a row a tensor: bucket, name, shape, dtype, bytes, targets."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        return pd.DataFrame(
            [
                {"bucket": i, "name": t.name, "shape": t.shape, "dtype": t.dtype, "bytes": t.nbytes,
                 "targets": self.num_targets}
                for i, bucket in enumerate(self.buckets)
                for t in bucket
            ]
        )  # fmt: skip

    def __repr__(self) -> str:
        count = sum(len(bucket) for bucket in self.buckets)
        return f"WholePlan({count} tensors in {len(self.buckets)} buckets, {self.nbytes:,} bytes)"

    def _repr_html_(self) -> str:
        return f"<b>{self!r}</b>{self.frame().head(10).to_html(index=False)}"


def facts_of(weights: Mapping[str, torch.Tensor]) -> list[TensorFacts]:
    """Facts of named tensors, sorted by name."""
    return [
        TensorFacts(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in sorted(weights.items())
    ]


def plan_equal(
    source: Sequence[TensorFacts],
    target: Sequence[TensorFacts],
    *,
    num_targets: int,
    bucket_bytes: int,
) -> WholePlan:
    """Plan between equal layouts: every tensor whole, in buckets of at most ``bucket_bytes`` (a
    larger one alone).

    Both sides must hold the same names and shapes; the error names the first that differs.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}, need at least 1.")
    here, there = {t.name: t for t in source}, {t.name: t for t in target}
    for name in sorted(here.keys() | there.keys()):
        mine, other = here.get(name), there.get(name)
        if mine is None or other is None or mine.shape != other.shape:
            raise ValueError(
                f"reshard: {name} is {mine and mine.shape} at the source and "
                f"{other and other.shape} at the target; "
                "need the same model on both sides."
            )
    buckets: list[list[TensorFacts]] = []
    used = bucket_bytes
    for tensor in sorted(source, key=lambda t: (t.dtype, t.name)):
        full = used + tensor.nbytes > bucket_bytes
        if full or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            used = 0
        buckets[-1].append(tensor)
        used += tensor.nbytes
    return WholePlan(tuple(map(tuple, buckets)), num_targets)
