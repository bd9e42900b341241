"""Values of one column for B rows, without padding: what stores hold and wires carry.

Three kinds, told apart by the fields and never by the data (a column of equally long rows is still
ragged):

==========  ======================  ==================  ==========================
kind        ``values``              ``lengths``         row ``i``
==========  ======================  ==================  ==========================
scalar      tensor ``[B]``          ``None``            one number
ragged      tensor ``[sum(L)]``     tensor ``[B]``      tensor ``[L_i]``
objects     list of B objects       ``None``            the object (text, a list)
==========  ======================  ==================  ==========================
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONG = 32
"""Mean length from which rows are copied one by one; below, an index of all values is quicker."""

SUMMED = 256
"""Rows that are added up at a time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of one column, packed end to end; dtype and kind come back as they went in.

    Values of ragged rows may lie in memory that other processes read, too: make a new tensor
    instead of writing into them.
    """

    values: Tensor | list[Any]
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        if not isinstance(self.values, Tensor) or self.lengths.ndim != 1:
            raise TypeError(
                f"ragged rows: got values {type(self.values).__name__}, lengths of "
                f"{self.lengths.ndim} dimensions; need a packed tensor and lengths [B]."
            )
        if int(self.lengths.sum()) != len(self.values):
            raise ValueError(
                f"ragged rows: got lengths that add up to {int(self.lengths.sum())}, need "
                f"{len(self.values)}, the number of packed values."
            )

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> "Rows":
        """Strip right padding: padded [B, T] and lengths [B] -> ragged rows."""
        if padded.ndim < 2 or len(padded) != len(lengths):
            raise ValueError(
                f"padded: got shape {tuple(padded.shape)}, need [{len(lengths)}, T], one row a "
                "length."
            )
        if len(lengths) and int(lengths.max()) > padded.shape[1]:
            raise ValueError(
                f"padded: got width {padded.shape[1]}, need at least {int(lengths.max())}, "
                "the longest row."
            )
        lengths = lengths.to(torch.int64)
        keep = torch.arange(padded.shape[1]) < lengths.cpu()[:, None]  # [B, T]
        return cls(padded[keep.to(padded.device)], lengths.cpu())

    @classmethod
    def from_list(cls, items: Sequence[Any]) -> "Rows":
        """Sort B values into the kind they are.

        Numbers, tensors [L_i, ...], or any other objects.
        """
        items = list(items)
        if items and all(isinstance(x, bool | int | float | np.number | np.bool_) for x in items):
            return cls(torch.tensor(items))
        if items and all(isinstance(x, Tensor) and x.ndim == 0 for x in items):
            return cls(torch.stack(items).detach().cpu())
        if items and all(isinstance(x, Tensor) and x.ndim >= 1 for x in items):
            return cls(torch.cat(items).detach().cpu(), torch.tensor([len(x) for x in items]))
        return cls(items)

    @property
    def kind(self) -> str:
        """``scalar``, ``ragged`` or ``objects``."""
        if self.lengths is not None:
            return "ragged"
        return "scalar" if isinstance(self.values, Tensor) else "objects"

    @property
    def tensor(self) -> Tensor:
        """The packed values of scalar or ragged rows; TypeError for objects."""
        if isinstance(self.values, list):
            if not self.values:  # no row says of which kind it is
                return torch.zeros(0)
            raise TypeError("objects are no tensor: read them as a list.")
        return self.values

    @property
    def row_lengths(self) -> Tensor:
        """[B] int64: the lengths of ragged rows; TypeError for other kinds."""
        if self.lengths is None:
            raise TypeError(f"{self.kind} rows have no lengths.")
        return self.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the values; for objects, of their text (other objects count 8)."""
        if isinstance(self.values, Tensor):
            return self.values.numel() * self.values.element_size()
        return sum(map(object_nbytes, self.values))

    def __len__(self) -> int:
        return len(self.values if self.lengths is None else self.lengths)

    def __reduce__(self) -> Any:
        """Tensors travel as NumPy arrays, which pickle hands on without a copy (PEP 574)."""
        if isinstance(self.values, list):
            return Rows, (self.values,)
        lengths = None if self.lengths is None else self.lengths.numpy()
        return _arrived, (_as_bytes(self.values), self.values.dtype, self.values.shape, lengths)

    def select(self, index: Tensor) -> "Rows":
        """Rows ``index`` [N] (int64), in that order."""
        if isinstance(self.values, list):
            return Rows([self.values[i] for i in index.tolist()])
        if self.lengths is None:
            return Rows(self.values[index])
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[index]
        if len(lengths) and len(self.tensor) >= LONG * len(self.lengths):
            rows = torch.split(self.tensor, self.lengths.tolist())
            return Rows(torch.cat([rows[i] for i in index.tolist()]), lengths)
        first = starts[index] - (lengths.cumsum(0) - lengths)
        flat = first.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))
        return Rows(self.values[flat.to(self.values.device)], lengths)

    def padded(self, *, fill: float = 0) -> Tensor:
        """[B] for scalars; [B, T] for ragged rows, T the longest, padded on the right with
        ``fill``.
        """
        if isinstance(self.values, list) and self.values:
            raise TypeError("objects have no padded form: read them as a list.")
        if self.lengths is None:
            return self.tensor
        width = int(self.lengths.max()) if len(self.lengths) else 0
        shape = (len(self.lengths), width, *self.tensor.shape[1:])
        out = torch.full(shape, fill, dtype=self.tensor.dtype, device=self.tensor.device)
        keep = torch.arange(width) < self.lengths[:, None]
        out[keep.to(out.device)] = self.tensor
        return out

    def unpack(self) -> list[Any]:
        """B separate rows: numbers as 0-d, ragged rows as 1-D tensors, objects as they are."""
        if self.lengths is not None:
            return list(torch.split(self.tensor, self.lengths.tolist()))
        return list(self.values)

    def to(self, device: torch.device | str) -> "Rows":
        """The same rows with the values on ``device``; lengths stay in host memory."""
        if isinstance(self.values, list):
            return self
        return Rows(self.values.to(device), self.lengths)

    def sums(self) -> Tensor:
        """[B] float64: the sum of each row's values (the count of ones, for a mask)."""
        if isinstance(self.values, list) and self.values:
            raise TypeError("objects have no sums.")
        if self.lengths is None:
            return self.tensor.to(torch.float64)
        values, found = self.tensor.detach().cpu(), np.zeros(len(self.lengths))
        if values.dtype == torch.bfloat16:  # which NumPy lacks
            values = values.float()
        full = np.flatnonzero(self.lengths.numpy())
        ends = self.lengths.cumsum(0).numpy()[full]
        starts = ends - self.lengths.numpy()[full]
        for piece in np.split(np.arange(len(full)), range(SUMMED, len(full), SUMMED)):
            if len(piece):  # all at once: a copy as float64, several times the values
                some = values[starts[piece[0]] : ends[piece[-1]]].numpy()
                first = starts[piece] - starts[piece[0]]
                found[full[piece]] = np.add.reduceat(some, first, dtype=np.float64)
        return torch.from_numpy(found)


def object_nbytes(x: Any) -> int:
    """Bytes of one object: of text in UTF-8, whatever is in it; of others a pointer's."""
    return len(x.encode(errors="surrogatepass")) if isinstance(x, str) else 8


def _as_bytes(values: Tensor) -> np.ndarray:
    """The memory of a tensor [N, ...] as uint8, of dtypes that NumPy lacks, too."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _arrived(data: np.ndarray, dtype: torch.dtype, shape: Any, lengths: np.ndarray | None) -> Rows:
    if not data.flags.writeable:  # torch warns of such arrays, once a process
        memory = (ctypes.c_char * data.nbytes).from_address(data.ctypes.data)
        memory.owner = data  # type: ignore[attr-defined]  # which keeps what it points to
        data = memory  # type: ignore[assignment]
    empty = not np.prod(shape)
    values = torch.zeros(0, dtype=dtype) if empty else torch.frombuffer(data, dtype=dtype)
    return Rows(values.reshape(shape), None if lengths is None else torch.tensor(lengths))


def concat(parts: Sequence[Rows], *, name: str = "column") -> Rows:
    """Join rows of the same kind and dtype; errors name the column."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if not parts:
        raise ValueError(f"{name}: got no parts, need at least one.")
    if len(parts) == 1:
        return parts[0]
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise TypeError(f"{name}: got parts of kinds {sorted(kinds)}, need one kind for all rows.")
    if isinstance(parts[0].values, list):
        return Rows([x for part in parts for x in part.values])
    dtypes = {part.tensor.dtype for part in parts}
    if len(dtypes) > 1:
        raise TypeError(
            f"{name}: got parts of dtypes {sorted(map(str, dtypes))}, need one dtype for all rows. "
            "Cast where the column is written."
        )
    values = torch.cat([part.tensor for part in parts])
    if parts[0].lengths is None:
        return Rows(values)
    return Rows(values, torch.cat([part.lengths for part in parts if part.lengths is not None]))
