"""What becomes of groups that are older than a bound when they are trained; how old tokens are.

A policy is a function ``(group, *, version, max_staleness) -> group``, or None to train without it.
The staleness of a token is the trainer's version minus the version that sampled it, in train steps.
"""

from typing import Any


def admit(group: Any, *, version: int, max_staleness: float) -> Any:
    """Train on it, however old: the bound holds what is in flight, not every token."""
    return group


def drop(group: Any, *, version: int, max_staleness: float) -> Any:
    """Leave the group out if its oldest token is older than the bound; another takes its slot."""
    return None if version - oldest_version(group) > max_staleness else group


def mask(group: Any, *, version: int, max_staleness: float) -> Any:
    """Take tokens older than the bound out of loss and denominator; the rest is trained."""

    def response_mask(mask: Any, token_version: Any) -> Any:
        return mask * (version - token_version <= max_staleness)

    if version - oldest_version(group) > max_staleness:
        group["response_mask"] = group.apply(response_mask, "response_mask", "token_version")
    return group


def oldest_version(group: Any) -> int:
    """The version that sampled a group's oldest token."""
    return int(group.meta["policy_version"].min())


def judged(group: Any, rule: Any) -> Any:
    """What a rule's ``stale_policy`` leaves of a group; None: nothing."""
    oldest = oldest_version(group)
    if oldest > rule.version:
        raise ValueError(
            f"rule: got version {rule.version}, need {oldest} or more, the version that generated "
            "a group. Begin with rule.rebase(version=actor.version), and update the actor once a "
            "train_step. An actor that was respawned has lost its weights: load a checkpoint."
        )
    kept = rule.stale_policy(group, version=rule.version, max_staleness=rule.max_staleness)
    if kept is not None and not (hasattr(kept, "meta") and len(kept)):
        raise TypeError(
            f"stale_policy: got {kept!r} back, need the group (or some of its rows), or None to "
            "leave it out."
        )
    return kept


def staleness_metrics(batch: Any, *, version: int) -> dict[str, float]:
    """Means over responses, in train steps: of the first token, of the last, of all tokens."""

    def staleness(token_version: Any, response_mask: Any) -> Any:
        ages = []
        for versions, trainable in zip(token_version, response_mask, strict=True):
            age = version - versions[trainable > 0]
            mean = float(age.sum()) / max(1, len(age))
            ages.append([float(age[0]), float(age[-1]), mean] if len(age) else None)
        return ages

    names = ("staleness/head_steps", "staleness/tail_steps", "staleness/token_mean_steps")
    found = batch.apply(staleness, "token_version", "response_mask").load().values
    rows = [ages for ages in found if ages is not None]
    return {name: sum(ages[i] for ages in rows) / max(1, len(rows)) for i, name in enumerate(names)}
