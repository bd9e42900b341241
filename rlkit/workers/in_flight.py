"""Groups that an engine generates: from prompts' rows to the rows of finished groups."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.batch import Batch
from rlkit.engines.requests import Response
from rlkit.rows import Rows, concat
from rlkit.store import Column


@dataclass(slots=True, eq=False)
class Asked:
    """Prompts of one call, their values at hand."""

    number: int
    """Of the call."""
    columns: dict[str, Rows]
    store: Any


@dataclass(slots=True, eq=False)
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
        self._calls = itertools.count()
        self.finished: list[Group] = []
        """Whole ones, in the order in which they ended, until they are taken."""

    @property
    def running(self) -> int:
        """Responses that have not ended."""
        return len(self._of)

    def add(self, prompts: Batch, uids: np.ndarray) -> Asked:
        """Expect responses ``uids`` [P, n] to P prompts."""
        columns = {name: column.load(prompts.uids) for name, column in prompts.columns.items()}
        asked = Asked(next(self._calls), columns, prompts.store)
        ids = prompts.meta["group_ids"].tolist()
        for row, (group_id, mine) in enumerate(zip(ids, uids.tolist(), strict=True)):
            group = Group(asked, row, group_id, mine)
            self._of |= dict.fromkeys(mine, group)
        return asked

    def note(self, response: Response) -> None:
        """A response has ended; those of nobody's groups are passed over."""
        group = self._of.get(response.uid)
        if group is not None:
            group.done[response.uid] = response
            if group.whole:
                self.finished.append(group)
                for uid in group.uids:
                    del self._of[uid]

    def has(self, asked: Asked) -> bool:
        """Whether groups of that call are left, running or finished."""
        return any(g.asked is asked for g in itertools.chain(self._of.values(), self.finished))

    def num_finished(self, asked: Asked) -> int:
        """Finished groups of that call."""
        return sum(group.asked is asked for group in self.finished)

    def take(self, asked: Asked | None = None) -> list[Group]:
        """The finished groups, or those of one call, in the order of call and row."""
        mine = [group for group in self.finished if asked is None or group.asked is asked]
        self.finished = [group for group in self.finished if group not in mine]
        return sorted(mine, key=lambda group: (group.asked.number, group.row))

    def drop(self, asked: Asked) -> list[int]:
        """Forget the groups of one call; their uids that had not ended."""
        left = [uid for uid, group in self._of.items() if group.asked is asked]
        for uid in left:
            del self._of[uid]
        self.finished = [group for group in self.finished if group.asked is not asked]
        return left


def batch_of(groups: Sequence[Group], tokenizer: Any, *, of: Asked | None = None) -> Batch:
    """Rows of whole groups: the prompts' columns once for each response, and the responses'.

    Without groups an empty batch with the columns of the call ``of``.
    """
    first = of or groups[0].asked
    responses = [group.done[uid] for group in groups for uid in group.uids]
    uids = np.asarray([response.uid for response in responses], dtype=np.int64)
    columns = _repeated(groups, first) | _responses(responses, tokenizer)
    versions = [int(r.token_version.min()) if len(r.token_version) else 0 for r in responses]
    return Batch(
        uids,
        store=first.store,
        group_ids=np.asarray([g.group_id for g in groups for _ in g.uids], dtype=np.int64),
        policy_version=np.asarray(versions, dtype=np.int64),
        columns={
            name: Column(name, first.store, uids, [first.store.put(name, uids, rows)])
            for name, rows in columns.items()
        },
    )


def _repeated(groups: Sequence[Group], first: Asked) -> dict[str, Rows]:
    """Each prompt's values as often as it has responses; one selection for prompts of one call."""
    none = torch.zeros(0, dtype=torch.long)
    found = {name: [rows.select(none)] for name, rows in first.columns.items()}
    for _, run in itertools.groupby(groups, key=lambda group: id(group.asked)):
        mine = list(run)
        index = torch.tensor([group.row for group in mine for _ in group.uids])
        for name, rows in mine[0].asked.columns.items():
            found[name].append(rows.select(index))
    return {name: concat(rows, name=name) for name, rows in found.items()}


def _responses(responses: Sequence[Response], tokenizer: Any) -> dict[str, Rows]:
    lengths = torch.tensor([len(r.token_ids) for r in responses], dtype=torch.int64)

    def ragged(values: list[Tensor], dtype: torch.dtype) -> Rows:
        return Rows(torch.cat(values) if values else torch.zeros(0, dtype=dtype), lengths)

    ids = [r.token_ids.tolist() for r in responses]
    decoded = tokenizer.decode_batch(ids)  # of a stop string the text before it
    texts = [text if r.text is None else r.text for r, text in zip(responses, decoded, strict=True)]
    temperatures = [r.temperature for r in responses]
    return {
        "response": Rows(texts),
        "response_ids": ragged([r.token_ids for r in responses], torch.int64),
        "response_mask": Rows(torch.ones(int(lengths.sum()), dtype=torch.int8), lengths),
        "rollout_logprobs": ragged([r.logprobs for r in responses], torch.float32),
        "token_version": ragged([r.token_version for r in responses], torch.int64),
        "finish_reason": Rows([r.finish_reason for r in responses]),
        "temperature": Rows(torch.tensor(temperatures, dtype=torch.float32)),
    }
