"""What benchmarks compute; what they measure is not tested."""

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

from rlkit.config import SamplingParams
from rlkit.dock import samplers
from rlkit.engines.requests import Request
from rlkit.models import tiny

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_overlap_is_what_prepare_and_generate_have_in_common():
    rows = [("generate", 0.0, 10.0), ("score", 8.0, 9.0), ("ref_logprobs", 8.5, 12.0)]
    frame = pd.DataFrame(rows, columns=["stage", "start_s", "end_s"])
    assert load("streamed").overlap(frame) == pytest.approx((4.0, 2.0))
    assert load("streamed").overlap(frame[:1]) == (0.0, 0.0)


def test_long_tailed_lengths_are_a_prompts_own():
    engine = load("streamed").LongTailed(tiny())
    sampling = SamplingParams(max_new_tokens=60, stop_token_ids=(3,))
    asked = [Request([5], [group << 16, (group << 16) + 1], sampling) for group in range(20)]
    lengths = [len(r.token_ids) for r in engine.generate(asked)]
    assert lengths[::2] == lengths[1::2]
    assert len(set(lengths)) > 5
    assert max(lengths) <= 60


def test_the_controllers_calls_are_timed_each():
    spent = load("dock").controller_ms(2, samplers.in_order)
    assert list(spent) == ["notice", "get", "places by node", "ack", "forget", "in all"]


def test_simulated_runs_of_384_devices_fit_their_memory():
    from rlkit import sim

    for run, schedule in load("simulate").runs(384).values():
        assert sim.simulate(run, schedule, steps=1).out_of_memory == ""
