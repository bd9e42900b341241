"""What the dock moves by (stage, source node, target node): counted, and predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DRIVER = "driver"
"""The stage of a notebook's own puts and fetches."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the sample flow: columns it reads, and columns it writes."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, columns in (("reads", self.reads), ("writes", self.writes)):
            if isinstance(columns, str):
                raise TypeError(
                    f"{name} of {self.name!r}: got {columns!r}, need a tuple: ({columns!r},)."
                )


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of one row of a column: ``row`` and so many a prompt or response token."""

    row: float = 0
    prompt_token: float = 0
    response_token: float = 0

    def nbytes(self, prompt_len: float, response_len: float) -> float:
        """Bytes of a row of these lengths."""
        return self.row + self.prompt_token * prompt_len + self.response_token * response_len


SIZES = {
    "prompt_ids": Size(prompt_token=8),
    "response_ids": Size(response_token=8),
    "response_mask": Size(response_token=1),
    "rollout_logprobs": Size(response_token=4),
    "token_version": Size(response_token=8),
    "old_logprobs": Size(response_token=4),
    "ref_logprobs": Size(response_token=4),
    "values": Size(response_token=4),
    "returns": Size(response_token=4),
    "rewards": Size(row=4),
    "advantages": Size(row=4),
    "temperature": Size(row=4),
}
"""As rlkit's workers write them; text is not among them."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Stages in the order of the flow; what only the driver writes comes from ``driver``."""

    stages: tuple[Stage, ...]
    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)

    def __post_init__(self) -> None:
        if isinstance(self.stages, Stage) or not all(isinstance(s, Stage) for s in self.stages):
            raise TypeError(f"stages: got {self.stages!r}, need a tuple of Stage(name, ...).")
        names = [stage.name for stage in self.stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"stages: got {twice[0]!r} twice, need a name of its own for each.")

    @property
    def consumers(self) -> tuple[str, ...]:
        """Stages that read: a row is freed when all of them are done with it."""
        return tuple(stage.name for stage in self.stages if stage.reads)

    def writer(self, column: str) -> str | None:
        """The stage that writes a column."""
        return next((s.name for s in self.stages if column in s.writes), None)


_SCORED = ("prompt_ids", "response_ids", "response_mask")
GRPO = Graph(
    (
        Stage(DRIVER, writes=("prompt_ids",)),
        Stage(
            "rollout",
            reads=("prompt_ids",),
            writes=("response_ids", "response_mask", "rollout_logprobs", "token_version"),
        ),
        Stage("score", reads=("response_ids",), writes=("rewards",)),
        Stage("old", reads=_SCORED, writes=("old_logprobs",)),
        Stage("reference", reads=_SCORED, writes=("ref_logprobs",)),
        Stage("advantages", reads=("rewards",), writes=("advantages",)),
        Stage("train", reads=(*_SCORED, "advantages", "old_logprobs", "ref_logprobs")),
    )
)
"""GRPO with a frozen reference; its last stage is the one that must see each row once."""


class Traffic:
    """Bytes, messages and seconds by (stage, source node, target node)."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str, str], tuple[float, int, float]] = {}

    def count(
        self, key: tuple[str, str, str], nbytes: float, messages: int = 0, seconds: float = 0.0
    ) -> None:
        """Add to one row of the table."""
        b, m, s = self.totals.get(key, (0, 0, 0.0))
        self.totals[key] = b + nbytes, m + messages, s + seconds

    def add(self, other: "Traffic") -> None:
        """Add another table."""
        for key, (nbytes, messages, seconds) in other.totals.items():
            self.count(key, nbytes, messages, seconds)

    def copy(self) -> "Traffic":
        """The same table, apart."""
        out = Traffic()
        out.totals = dict(self.totals)
        return out

    def frame(self) -> Any:
        """DataFrame: stage, source, target, bytes, messages, seconds."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        names = ("stage", "source", "target", "bytes", "messages", "seconds")
        rows = [(*key, *total) for key, total in sorted(self.totals.items())]
        return pd.DataFrame(rows, columns=pd.Index(names))


def predicted_traffic(
    graph: Graph,
    groups: int,
    n: int,
    prompt_len: float,
    response_len: float,
    *,
    nodes: Sequence[str] = ("node0",),
    central: bool = False,
) -> Any:
    """The table ``dock.traffic()`` makes of one batch: bytes by stage, source and target.

    ``groups`` prompts of ``n`` responses each, of these mean lengths in tokens. Every row passes
    each stage once; rows and readers are spread evenly over the nodes, independently of each other.
    A column lies where its stage ran, on the first node if the driver wrote it; ``central``: all of
    them on the first node.
    """
    if isinstance(nodes, int):
        raise TypeError(f"nodes: got {nodes}, need a list of so many names.")
    unknown = {c for s in graph.stages for c in (*s.writes, *s.reads)} - graph.sizes.keys()
    if unknown:
        raise ValueError(
            f"sizes: got none of {sorted(unknown)}, need one of each column: "
            "Graph(stages, sizes={..., 'answer': Size(row=8)})."
        )
    found = Traffic()
    for stage in graph.stages:
        for column in (*stage.writes, *stage.reads):
            nbytes = groups * n * graph.sizes[column].nbytes(prompt_len, response_len)
            of_driver = graph.writer(column) in (None, DRIVER)
            homes = nodes[:1] if central or of_driver else nodes
            if column in stage.writes:
                writers = nodes[:1] if of_driver else nodes
                pairs = [(node, nodes[0] if central else node) for node in writers]
            else:
                pairs = [(home, node) for home in homes for node in nodes]
            for source, target in pairs:
                found.count((stage.name, source, target), nbytes / len(pairs))
    return found.frame()[["stage", "source", "target", "bytes"]]
