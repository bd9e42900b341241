"""Sliders over simulated runs: what they show, and that they work without a notebook."""

from dataclasses import replace
from types import SimpleNamespace

import IPython
import pytest

import rlkit.sim as sim
from rlkit.config import Layout, ModelSpec
from rlkit.sim import specs
from rlkit.viz import WhatIf

LENGTHS = sim.Lengths(mean_tokens=500, sigma=0.8, limit_tokens=2048)
RUN = sim.Run(
    model=ModelSpec.qwen25_7b(), node=specs.NODE_H100, num_devices=8, rollout_devices=4,
    workload=sim.Workload(prompts=8, samples=4, prompt_tokens=100, lengths=LENGTHS),
    train=Layout(tp=2), reshard=sim.broadcast,
)  # fmt: skip
OVER = {"rollout_devices": [4, 6], "max_staleness": [0, 2]}


def what_if(**fields):
    schedule = sim.asynchronous(max_staleness=1)
    return sim.simulate(*sim.change(RUN, schedule, **fields), steps=3)


@pytest.fixture
def in_notebook(monkeypatch):
    """As in a Jupyter kernel: widgets live without a front end."""
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))


def test_without_a_notebook_a_choice_is_simulated_and_drawn():
    view = WhatIf(what_if, OVER)
    found = view.choose(max_staleness=2)
    assert found.step_s == what_if(rollout_devices=4, max_staleness=2).step_s
    assert view.frame()["max_staleness"].tolist() == [0, 2]
    bundle = view._repr_mimebundle_()
    assert "max_staleness=2" in bundle["text/plain"]
    assert "data:image/png;base64" in bundle["text/html"]
    assert view.widget is None
    assert view.seconds > 0


def test_moving_a_slider_draws_the_run_anew(in_notebook):
    view = WhatIf(what_if, OVER)
    before = view.page.value
    view.sliders["rollout_devices"].value = 6
    assert view.found.run.rollout_devices == 6
    assert view.page.value != before
    assert "rollout_devices=6" in view.page.value


def test_a_choice_that_does_not_fit_is_drawn_with_its_reason():
    small = replace(specs.H100, memory_bytes=8e9)
    node = replace(specs.NODE_H100, device=small)
    nodes = [specs.NODE_H100, node]
    view = WhatIf(
        lambda node: sim.simulate(replace(RUN, node=node), sim.synchronous()), {"node": nodes}
    )
    view.choose(node=node)
    assert "GiB of 7.5 GiB" in view.frame()["out_of_memory"].iloc[-1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_staleness": 7}, r"got max_staleness=7, need one of \[0, 2\]"),
        ({"staleness": 2}, r"got 'staleness', need some of \['rollout_devices', 'max_staleness'\]"),
    ],
)
def test_a_wrong_choice_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        WhatIf(what_if, OVER).choose(**values)


def test_a_slider_without_values_is_named():
    with pytest.raises(ValueError, match=r"got no values for \['max_staleness'\]"):
        WhatIf(what_if, {"max_staleness": []})
