"""Dynamic sampling: draw prompts until enough of their groups are worth a step."""

from collections.abc import Callable

from rlkit.batch import Batch


def fill_groups(
    sample: Callable[[int], Batch],
    keep: Callable[[Batch], bool],
    *,
    num_groups: int,
    max_rounds: int = 10,
    allow_short: bool = False,
) -> Batch:
    """Exactly ``num_groups`` groups that pass ``keep``, drawn in rounds (DAPO, 2503.14476, 2025).

    ``sample(num)`` generates and scores a batch of ``num`` new prompts; each round asks for as many
    groups as are missing, and groups beyond the number needed are left out. ``keep(group)`` judges
    one group: pass it the accuracy, not a shaped reward, which gives spread to a group that is all
    wrong. After ``max_rounds`` a RuntimeError says how many there are, or, with ``allow_short``,
    these are returned, if there are any.
    """
    if num_groups < 1 or max_rounds < 1:
        raise ValueError(
            f"fill_groups: got num_groups={num_groups}, max_rounds={max_rounds}; need at least 1 "
            "of each."
        )
    kept: list[Batch] = []
    num_rows, num_drawn, total = 0, 0, 0.0
    for _ in range(max_rounds):
        batch = sample(num_groups - len(kept))
        groups = list(batch.groups())
        num_rows, num_drawn = num_rows + len(batch), num_drawn + len(groups)
        total += float(batch["rewards"].double().nansum())
        kept += [group for group in groups if keep(group)]
        if len(kept) >= num_groups:
            break
    if len(kept) < num_groups and not (allow_short and kept):
        raise RuntimeError(
            f"fill_groups: got {len(kept)} of the {num_groups} groups needed after {max_rounds} "
            f"rounds and {num_drawn} prompts (mean reward {total / max(num_rows, 1):.3g}). Near 0 "
            "take easier prompts, near 1 harder ones; or raise max_rounds, or pass "
            "allow_short=True for a smaller step."
        )
    return Batch.concat(kept[:num_groups])
