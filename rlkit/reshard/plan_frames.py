"""DataFrames of a plan: its moves, and who holds what."""

from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.checks import did_you_mean
from rlkit.reshard.plan_cells import Cut, holds, make_grid
from rlkit.reshard.plan_tables import Parameter

if TYPE_CHECKING:
    from rlkit.reshard.plan_moves import ReshardPlan

PHASES = ("copy", "gather", "swap_out", "swap_in")


def moves(plan: "ReshardPlan") -> Any:
    """A row a move, and of a plan that swaps a row a tensor and device out and in."""
    import pandas as pd

    blocks, found = plan.blocks, plan.moves
    width = int(found.layer.max()) + 2
    keys, tensor = np.unique(found.block * width + found.layer + 1, return_inverse=True)
    names = [blocks[k // width].parameter.named(int(k % width) - 1) for k in keys.tolist()]
    starts = np.cumsum([0, *(len(b.grid.nbytes) for b in blocks)])
    texts = [
        _slice(b.parameter, e, r) for b in blocks for e, r in zip(*_ranges(b.grid), strict=True)
    ]
    frame = pd.DataFrame(
        {
            "phase": np.where(found.source == found.target, "copy", "gather"),
            "bucket": found.bucket,
            "source": found.source,
            "target": found.target,
            "tensor": _category(names, tensor),
            "slice": _category(texts, starts[found.block] + found.cell),
            "bytes": found.nbytes,
        }
    )
    frame = pd.concat([frame, *_swaps(plan.cut)], ignore_index=True) if plan.swaps else frame
    return frame.assign(
        phase=pd.Categorical(frame["phase"], PHASES), tensor=frame["tensor"].astype("category")
    )


def holders(cut: Cut, tensor: str) -> Any:
    """A row a rank and run of a tensor that it holds."""
    import pandas as pd

    p, layer = find(cut, tensor)
    rows = []
    for name, side in (("train", cut.train), ("infer", cut.infer)):
        grid = make_grid(p, (side,), None)
        has = holds(side, p, grid) & np.isin(side.stage, side.stages(p, layer))[:, None]
        experts, parts = _ranges(grid)
        for rank, cell in np.argwhere(has).tolist():
            place = side.place(rank, p, layer, experts[cell], parts[cell])[0]
            rows.append(
                {"side": name, "rank": side.first_rank + rank,
                 "slice": _slice(p, experts[cell], parts[cell]),
                 "bytes": int(grid.nbytes[cell]), "stored_in": place.name,
                 "stored_at": place.index[-len(p.shape) + p.axis].start}
            )  # fmt: skip
    return pd.DataFrame(rows)


def find(cut: Cut, tensor: str) -> tuple[Parameter, int]:
    """The parameter and layer of a name."""
    known = {p.named(layer): (p, layer) for p in cut.table for layer in p.instances}
    if tensor not in known:
        raise ValueError(
            f"tensor: got {tensor!r}, need the name of a parameter, such as "
            f"{', '.join([*known][:3])}; of experts '*' stands for the number."
            f"{did_you_mean(tensor, known)}"
        )
    return known[tensor]


def _swaps(cut: Cut) -> list[Any]:
    """Frames of training shards on their way to host memory, and back."""
    import pandas as pd

    parts = []
    for p in cut.table:
        for layer in p.instances:
            ranks = np.flatnonzero(np.isin(cut.train.stage, cut.train.stages(p, layer)))
            parts.append((p.named(layer), ranks, cut.train.nbytes_of(p)))
    ranks = np.concatenate([ranks for _, ranks, _ in parts])
    counts = [len(ranks) for _, ranks, _ in parts]
    columns = {
        "source": ranks,
        "target": ranks,
        "tensor": np.repeat([name for name, _, _ in parts], counts),
        "slice": "",
        "bytes": np.repeat([size for _, _, size in parts], counts),
    }
    return [pd.DataFrame({"phase": phase, "bucket": -1} | columns) for phase in PHASES[2:]]


def _category(names: list[str], codes: np.ndarray) -> Any:
    import pandas as pd

    unique = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return pd.Categorical.from_codes(np.array([unique[name] for name in names])[codes], [*unique])


def _ranges(grid: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return list(map(tuple, grid.experts.tolist())), list(map(tuple, grid.rows.tolist()))


def _slice(p: Parameter, experts: tuple[int, int], rows: tuple[int, int]) -> str:
    """As Python writes it: ``[0:4, :, 8:16]``."""
    parts = [":"] * len(p.shape)
    if p.experts:
        parts[0] = f"{experts[0]}:{experts[1]}"
    parts[p.axis] = f"{rows[0]}:{rows[1]}"
    return f"[{', '.join(parts)}]"
