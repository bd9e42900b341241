"""Context and tensor parallelism on two GPUs or two NPUs: the numbers of one CPU process."""

from contextlib import closing
from functools import partial

import pytest
from megatron_ranks import SP, both, context_of, dense_model, make_batch, train
from several_ranks import by_rank, check, run_on_ranks

import rlkit as rk
from rlkit import device as devices
from rlkit.config import Layout

LAYOUTS = {"CP2": (Layout(cp=2), None), "TP2, sequence parallel": (Layout(tp=2), SP)}


def main(rank: int, store, kind: str) -> dict:
    """What a rank finds in each layout, on a device of its own."""
    found = {}
    for name, (layout, options) in LAYOUTS.items():
        context = context_of(layout, rank, store, name)
        build = partial(rk.MegatronBackend, dense_model("qwen3"), device=f"{kind}:{rank}", lr=1e-2)
        with closing(build(context=context, options=options)) as backend:
            found[name] = both(backend, context)
    return found


@pytest.mark.megatron
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("npu", marks=pytest.mark.npu),
    ],
)
def test_two_devices_train_as_one_process_does(kind):
    if (there := devices.num_devices(kind)) < 2:
        pytest.skip(f"{there} devices of kind {kind}, two are needed")
    found = run_on_ranks(partial(main, kind=kind), 2)
    one = train(rk.TorchBackend(dense_model("qwen3"), lr=1e-2), make_batch())
    for name in LAYOUTS:
        check(by_rank(found, name), one)
