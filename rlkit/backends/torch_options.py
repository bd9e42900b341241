"""What TorchBackend may be asked for, and what it refuses."""

from dataclasses import dataclass

from rlkit.config import Layout, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """What TorchBackend may do differently; none of it changes numbers beyond rounding."""

    recompute: bool = False
    """Keep only each block's input in the forward pass; compute the rest again in the backward."""
    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the tokens, too."""
    fully_shard: bool = False
    """Spread weights, gradients and moments over data-parallel ranks (FSDP2)."""


def check_layout(spec: ModelSpec, layout: Layout, options: TorchOptions) -> None:
    """ValueError for what TorchBackend does not compute."""
    if layout.pp > 1 or layout.ep > 1:
        raise ValueError(
            f"TorchBackend: got layout {layout.short()}, need pp=1 and ep=1. Pipeline stages and "
            "experts are cut by backend=rk.MegatronBackend."
        )
    if layout.cp > 1:
        raise ValueError(
            f"TorchBackend: got cp={layout.cp}, need cp=1: torch's context parallelism cuts "
            "sequences of one length, and rows of a batch lie packed end to end. Use "
            "backend=rk.MegatronBackend, or TorchOptions(sequence_parallel=True) with tp."
        )
    sizes = {
        "key-value heads": spec.num_kv_heads,
        "heads": spec.num_heads,
        "columns of an MLP": spec.intermediate_size,
    } | ({"tokens of the vocabulary": spec.vocab_size} if options.fully_shard else {})
    for what, size in sizes.items():
        if size % layout.tp:
            raise ValueError(
                f"TorchBackend: got tp={layout.tp} for {size} {what}, need a tp that divides them. "
                "Lower tp; with tp=1, dp and TorchOptions(fully_shard=True) cut any model."
            )
    if (layout.tp - 1) * -(-spec.vocab_size // layout.tp) >= spec.vocab_size:
        raise ValueError(
            f"TorchBackend: got tp={layout.tp} for {spec.vocab_size} tokens of the vocabulary, of "
            "which the last ranks would have none. Lower tp."
        )
    if options.sequence_parallel and layout.tp == 1:
        raise ValueError(
            "TorchOptions.sequence_parallel: got True with tp=1, need tp of at least 2. Leave it "
            "out."
        )
