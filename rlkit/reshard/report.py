"""What a reshard says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """One move of the weights, measured."""

    seconds: float
    """Wall time from the call to the publication on the last target."""
    bytes: int
    """Bytes that arrived, all targets together."""
    peak_gib: float
    """Weights that one target held at the same time: those in use and those that arrived."""
    verified: bool
    """Every tensor's fingerprint matched on every target."""
    version: int
    """Policy version that the targets serve now."""
