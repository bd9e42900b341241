"""Groups that an engine generates: from prompts' rows to the rows of finished groups."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.batch import Batch
from rlkit.batch.columns import check_group_ids
from rlkit.batch.rows import Rows, concat
from rlkit.batch.store import Column
from rlkit.checks import whole
from rlkit.engines.requests import Request, Response

UID_BITS = 16  # uid = group id, then the sample's number in its group


def reserve_samples(
    prompts: Batch, *, n: int = 1, first_sample: Any = None, **others: Any
) -> dict[str, Any]:
    """On the driver, before prompts go out: number the samples, so that each draw has new uids."""
    if not isinstance(prompts, Batch):
        raise TypeError(
            f"generate: got {type(prompts).__name__}, need a batch of prompts: of a task, or "
            "rk.tasks.prompt_batch([(prompt, answer), ...], tokenizer=model.tokenizer, "
            "group_ids=[...])."
        )
    n = whole("n", n, what="response a prompt")
    if not len(prompts):
        raise ValueError("generate: got no prompts, need at least one.")
    check_group_ids(prompts.meta["group_ids"])
    if first_sample is None:
        first_sample = prompts.reserve(n)
    return {"first_sample": first_sample}


@dataclass(slots=True, eq=False)
class Asked:
    """Prompts of one call, their values at hand."""

    number: int
    """Of the call."""
    columns: dict[str, Rows]
    store: Any
    kept: bool
    """Whether its groups outlast an error of another call: no call waits for them."""


@dataclass(slots=True, eq=False)
class Group:
    """One prompt, and the responses to it that have come."""

    asked: Asked
    row: int
    """Of the prompt among those asked with it."""
    group_id: int
    request: Request
    done: dict[int, Response] = field(default_factory=dict)

    @property
    def uids(self) -> Sequence[int]:
        """Of its responses."""
        return self.request.uids

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

    def add(self, prompts: Batch, requests: Sequence[Request], *, kept: bool) -> Asked:
        """Expect the responses to P prompts, a request each."""
        columns = {name: column.load(prompts.uids) for name, column in prompts.columns.items()}
        asked = Asked(next(self._calls), columns, prompts.store, kept)
        ids = prompts.meta["group_ids"].tolist()
        for row, (group_id, request) in enumerate(zip(ids, requests, strict=True)):
            group = Group(asked, row, group_id, request)
            self._of |= dict.fromkeys(request.uids, group)
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
        """The finished groups of one call, or all that are kept, in the order of call and row."""
        mine = [g for g in self.finished if g.asked is asked or (asked is None and g.asked.kept)]
        self.finished = [group for group in self.finished if group not in mine]
        return sorted(mine, key=lambda group: (group.asked.number, group.row))

    def kept(self) -> set[int]:
        """Ids of the groups that are kept and not taken."""
        groups = itertools.chain(self._of.values(), self.finished)
        return {group.group_id for group in groups if group.asked.kept}

    def left(self, uids: Collection[int] | None = None) -> list[Request]:
        """What is still wanted of groups that are kept, of these ``uids`` or all."""
        groups = dict.fromkeys(group for group in self._of.values() if group.asked.kept)
        found = []
        for group in groups:
            wanted = [u for u in group.uids if u not in group.done and (uids is None or u in uids)]
            if wanted:
                found.append(replace(group.request, uids=wanted))
        return found

    def drop(self, asked: Asked) -> list[int]:
        """Forget the groups of one call; their uids that had not ended."""
        return self._forget(lambda group: group.asked is asked)

    def drop_kept(self) -> list[int]:
        """Forget the groups that are kept; their uids that had not ended."""
        return self._forget(lambda group: group.asked.kept)

    def drop_calls(self) -> None:
        """Forget all groups that are not kept."""
        self._forget(lambda group: not group.asked.kept)

    def _forget(self, which: Callable[[Group], bool]) -> list[int]:
        gone = [uid for uid, group in self._of.items() if which(group)]
        left = [uid for uid in gone if uid not in self._of[uid].done]
        for uid in gone:
            del self._of[uid]
        self.finished = [group for group in self.finished if not which(group)]
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
    parts = first.store.put_all(uids, columns)
    return Batch(
        uids,
        store=first.store,
        group_ids=np.asarray([g.group_id for g in groups for _ in g.uids], dtype=np.int64),
        policy_version=np.asarray(versions, dtype=np.int64),
        columns={name: Column(name, first.store, uids, [part]) for name, part in parts.items()},
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
