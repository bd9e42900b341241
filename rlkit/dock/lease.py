"""Lease: rows that a holder got, until it answers for them."""

from typing import Any

import numpy as np

from rlkit.batch import Batch
from rlkit.dock.messages import Grant


class Lease:
    """Rows of one ``get``: ``batch`` has them; ``ack`` or ``nack`` answers for them."""

    def __init__(self, grant: Grant, batch: Batch) -> None:
        self.grant, self.batch = grant, batch

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every lease of this stage before."""
        return self.grant.token

    @property
    def uids(self) -> np.ndarray:
        """[N] int64."""
        return self.batch.uids

    def __len__(self) -> int:
        return len(self.batch)

    def __repr__(self) -> str:
        grant = self.grant
        return f"Lease({grant.token} of {grant.stage!r}: {len(self)} rows, held by {grant.holder})"


def granted(lease: Any) -> Grant:
    """The grant of a lease; TypeError for what is none, such as its batch."""
    if not isinstance(lease, Lease):
        raise TypeError(f"lease: got {type(lease).__name__}, need what dock.get returned.")
    return lease.grant
