"""Groups that an engine generates: from prompts' rows to the rows of finished groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.batch import Batch
from rlkit.engines.requests import Response
from rlkit.rows import Rows, concat
from rlkit.store import Column


@dataclass(slots=True)
class Asked:
    """Prompts of one call, their values at hand."""

    columns: dict[str, Rows]
    store: Any

    @classmethod
    def of(cls, prompts: Batch) -> "Asked":
        """Load the prompts' columns."""
        columns = {name: column.load(prompts.uids) for name, column in prompts.columns.items()}
        return cls(columns, prompts.store)


@dataclass(slots=True)
class Group:
    """One prompt, and the responses to it that have come."""

    asked: Asked
    row: int
    """Of the prompt among those asked with it."""
    group_id: int
    uids: list[int]
    done: dict[int, Response] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all responses have come."""
        return len(self.done) == len(self.uids)


class InFlight:
    """Groups by the uids of their responses."""

    def __init__(self) -> None:
        self._of: dict[int, Group] = {}
        self.finished: list[Group] = []
        """Whole ones, in the order in which they ended, until they are taken."""

    def __len__(self) -> int:
        return len({id(group) for group in self._of.values()})

    def add(self, prompts: Batch, uids: np.ndarray) -> None:
        """Expect responses ``uids`` [P, n] to P prompts."""
        asked = Asked.of(prompts)
        ids = prompts.meta["group_ids"].tolist()
        for row, (group_id, mine) in enumerate(zip(ids, uids.tolist(), strict=True)):
            group = Group(asked, row, group_id, mine)
            self._of |= dict.fromkeys(mine, group)

    def note(self, response: Response) -> None:
        """A response has ended; those of nobody's groups are passed over."""
        group = self._of.get(response.uid)
        if group is not None:
            group.done[response.uid] = response
            if group.whole:
                self.finished.append(group)
                for uid in group.uids:
                    del self._of[uid]

    def take(self) -> list[Group]:
        """The finished groups, in the order of their prompts' call and row."""
        taken, self.finished = self.finished, []
        return taken

    def clear(self) -> list[int]:
        """Forget everything; the uids that had not ended."""
        left = list(self._of)
        self._of.clear()
        self.finished.clear()
        return left


def batch_of(groups: Sequence[Group], tokenizer: Any) -> Batch:
    """Rows of whole groups: the prompts' columns once for each response, and the responses'."""
    responses = [group.done[uid] for group in groups for uid in group.uids]
    uids = np.asarray([response.uid for response in responses], dtype=np.int64)
    columns = _repeated(groups) | _responses(responses, tokenizer)
    store = groups[0].asked.store
    versions = [int(r.token_version.min()) if len(r.token_version) else 0 for r in responses]
    return Batch(
        uids,
        store=store,
        group_ids=np.asarray([g.group_id for g in groups for _ in g.uids], dtype=np.int64),
        policy_version=np.asarray(versions, dtype=np.int64),
        columns={
            name: Column(name, store, uids, [store.put(name, uids, rows)])
            for name, rows in columns.items()
        },
    )


def _repeated(groups: Sequence[Group]) -> dict[str, Rows]:
    """Each prompt's values as often as it has responses; one selection for prompts of one call."""
    found: dict[str, list[Rows]] = {name: [] for name in groups[0].asked.columns}
    for _, run in groupby(groups, key=lambda group: id(group.asked)):
        mine = list(run)
        index = torch.tensor([group.row for group in mine for _ in group.uids])
        for name, rows in mine[0].asked.columns.items():
            found[name].append(rows.select(index))
    return {name: concat(rows, name=name) for name, rows in found.items()}


def _responses(responses: Sequence[Response], tokenizer: Any) -> dict[str, Rows]:
    lengths = torch.tensor([len(r.token_ids) for r in responses], dtype=torch.int64)

    def ragged(values: list[Tensor]) -> Rows:
        return Rows(torch.cat(values), lengths)

    texts = tokenizer.decode_batch([r.token_ids.tolist() for r in responses])
    return {
        "response": Rows(texts),
        "response_ids": ragged([r.token_ids for r in responses]),
        "response_mask": Rows(torch.ones(int(lengths.sum()), dtype=torch.int8), lengths),
        "rollout_logprobs": ragged([r.logprobs for r in responses]),
        "token_version": ragged([r.token_version for r in responses]),
        "finish_reason": Rows([r.finish_reason for r in responses]),
        "temperature": Rows(torch.tensor([r.temperature for r in responses], dtype=torch.float32)),
    }
