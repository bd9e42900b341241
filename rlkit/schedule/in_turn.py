"""Schedules that train on what the newest weights have generated: one step after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rlkit.schedule.parts import Record, check_calls, check_prompts, record, returned


def synchronous(
    prompts: Iterable[Any],
    rollout_step: Callable[[Any], Any],
    prepare: Callable[[Any], None],
    train_step: Callable[[Any], Mapping[str, Any]],
    sync: Callable[[], object],
) -> Iterator[Record]:
    """Generate all, prepare all, train, hand over the weights; yields a record a step.

    ``rollout_step(prompts) -> batch``; ``prepare(batch)`` binds rewards, logprobs and advantages in
    it; ``train_step(batch) -> metrics``; ``sync()`` moves the weights, such as
    ``resharder.reshard``. A record is ``{"step", "batch", **metrics}``.
    """
    check_calls(rollout_step=rollout_step, prepare=prepare, train_step=train_step, sync=sync)
    for step, asked in enumerate(check_prompts(prompts)):
        batch = returned(rollout_step(asked))
        prepare(batch)
        metrics = train_step(batch)
        sync()
        yield record(step, batch, metrics)


def streamed(
    prompts: Iterable[Any],
    rollout_step: Callable[[Any], Iterable[Any]],
    prepare: Callable[[Any], None],
    train_step: Callable[[Any], Mapping[str, Any]],
    sync: Callable[[], object],
) -> Iterator[Record]:
    """``synchronous``, but prepares complete groups while others still generate.

    ``rollout_step(prompts)`` yields batches of complete groups, as ``rollout.stream`` does. The
    batch that ``train_step`` gets has all rows in the order of the prompts, so the numbers are
    those of ``synchronous``. What needs the whole batch, such as whitening, belongs into
    ``train_step``.
    """
    check_calls(rollout_step=rollout_step, prepare=prepare, train_step=train_step, sync=sync)
    for step, asked in enumerate(check_prompts(prompts)):
        chunks = []
        for chunk in returned(rollout_step(asked)):
            prepare(chunk)
            chunks.append(chunk)
        batch = in_order(chunks, asked)
        metrics = train_step(batch)
        sync()
        yield record(step, batch, metrics)


def in_order(chunks: list[Any], asked: Any) -> Any:
    """The chunks' rows in one batch, groups in the order of the prompts asked for."""
    wanted = asked.meta["group_ids"]
    if not chunks:
        raise ValueError(
            f"streamed: got nothing for {len(wanted)} prompts, need all their groups. rollout_step "
            "yields batches of complete groups; return rollout.stream(prompts, n=...)."
        )
    batch = chunks[0].concat(chunks)
    place = {group: i for i, group in enumerate(wanted.tolist())}
    found = batch.meta["group_ids"].tolist()
    missing = [group for group in wanted.tolist() if group not in set(found)]
    if missing or not set(found) <= place.keys():
        raise ValueError(
            f"streamed: got {len(set(found))} groups, need those of the {len(wanted)} prompts "
            f"asked for; missing: {missing[:5]}. rollout_step yields every group once, whole."
        )
    return batch.select(np.lexsort((batch.meta["uid"], [place[group] for group in found])))
