"""Losses side by side: what each does to every token of one frozen batch."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.algo.aggregate import LossBatch
from rlkit.algo.losses.ratios import column_like

Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def compare_losses(
    batch: LossBatch, losses: Mapping[str, Loss], *, logprobs: Tensor | None = None
) -> Any:
    """DataFrame, a row an objective and trainable token: d loss / d logprob, and what is clipped.

    losses: name -> a loss as ``actor.update`` takes it. logprobs [B, T] of the current policy, by
    default the batch's column of that name: ``batch["logprobs"] = actor.compute_logprobs(batch)``
    after an update; on the old policy itself no ratio is clipped. A loss with a parameter
    ``entropy`` gets the batch's column.

    Columns: objective, loss (of the whole batch), uid, token, advantage, ratio (new over old),
    gradient (d loss / d logprob: below 0 pushes the token up) and clipped (the gradient is 0 though
    the advantage is not). ``rk.viz.plot_losses`` draws it, ``rk.viz.loss_summary`` has a row an
    objective.
    """
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    if not losses:
        raise ValueError("losses: got none, need {name: loss_fn, ...}, one or more.")
    now: Tensor = batch["logprobs"] if logprobs is None else logprobs
    now = now.detach()
    rows, tokens = batch["response_mask"].bool().nonzero(as_tuple=True)  # [N] each
    advantages = column_like("advantages", now, batch)[rows, tokens]
    ratios = (now - column_like("old_logprobs", now, batch))[rows, tokens].exp()
    frames: list[Any] = []
    for name, loss_fn in losses.items():
        loss, gradient = _gradient(loss_fn, now, batch)
        gradient = gradient[rows, tokens]
        columns = {
            "uid": batch["uid"][rows],
            "token": tokens,
            "advantage": advantages,
            "ratio": ratios,
            "gradient": gradient,
            "clipped": (gradient == 0) & (advantages != 0),
        }
        numbers = {key: value.cpu().numpy() for key, value in columns.items()}
        frames.append(pd.DataFrame({"objective": name, "loss": loss, **numbers}))
    return pd.concat(frames, ignore_index=True)


def _gradient(loss_fn: Loss, logprobs: Tensor, batch: LossBatch) -> tuple[float, Tensor]:
    """The loss and its gradient in the logprobs [B, T]."""
    leaf = logprobs.clone().requires_grad_()
    wants_entropy = "entropy" in inspect.signature(loss_fn).parameters
    more = {"entropy": batch["entropy"]} if wants_entropy else {}
    loss, _ = loss_fn(leaf, batch, **more)
    if not loss.requires_grad:
        return float(loss), torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)
    return float(loss.detach()), gradient
