"""A batch: named columns of B rows, and where their values lie.

``batch`` is what users hold, over ``table`` (columns by name, ``columns``) and ``store`` (parts of
columns, each a write; ``shelf`` is its inside); ``rows`` are the values themselves, unpadded;
``planning`` cuts batches into groups, micro-batches and shares of ranks.
"""

from rlkit.batch.batch import MAX_SAMPLES, Batch

__all__ = ["MAX_SAMPLES", "Batch"]
