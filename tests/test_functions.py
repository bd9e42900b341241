import functools
import importlib.util
import math
import subprocess
import sys
import textwrap
import threading
import traceback
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.algo import (
    clipped_policy_loss,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from rlkit.functions import round_trip, ship, source_of


@pytest.fixture
def module(tmp_path):
    """A function that writes a user's module and imports it anew, as a notebook re-runs a cell."""
    count = iter(range(100))

    def load(text):
        name = f"users_code_{next(count)}"
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made
        spec.loader.exec_module(made)
        return made

    yield load
    for i in range(100):
        sys.modules.pop(f"users_code_{i}", None)


def hash_of(module, text, name="loss"):
    return source_of(getattr(module(text), name)).hash


def scaled(beta):
    """A loss-like closure over a number."""
    return lambda x: x * beta


def wrapped(fn):
    """A closure over a function."""
    return lambda x: fn(x)


def test_hash_is_the_same_for_the_same_code_and_numbers():
    assert source_of(scaled(0.1)).hash == source_of(scaled(0.1)).hash


def test_hash_is_12_hex_digits():
    text = source_of(scaled(0.1)).hash
    assert len(text) == 12
    assert int(text, 16) >= 0


def test_hash_changes_with_a_captured_number():
    assert source_of(scaled(0.1)).hash != source_of(scaled(0.2)).hash


def test_hash_changes_with_the_source(module):
    before = hash_of(module, "def loss(x):\n    return x + 1\n")
    assert before != hash_of(module, "def loss(x):\n    return x + 2\n")


def test_hash_changes_with_a_global_number(module):
    text = "BETA = {}\ndef loss(x):\n    return x * BETA\n"
    assert hash_of(module, text.format(0.1)) != hash_of(module, text.format(0.2))


@pytest.mark.parametrize(
    "body",
    ["return sum(BETA * y for y in x)", "return [BETA * y for y in x]", "return (lambda: BETA)()"],
)
def test_hash_changes_with_a_global_number_read_inside_a_nested_function(module, body):
    text = f"BETA = {{}}\ndef loss(x):\n    {body}\n"
    assert hash_of(module, text.format(0.1)) != hash_of(module, text.format(0.2))


def test_hash_changes_with_a_helper_function(module):
    text = "def helper(x):\n    return x * {}\ndef loss(x):\n    return helper(x)\n"
    assert hash_of(module, text.format(1)) != hash_of(module, text.format(2))


def test_hash_changes_with_a_helper_of_a_helper(module):
    text = """
    def deep(x):
        return x * {}
    def helper(x):
        return deep(x)
    def loss(x):
        return helper(x)
    """
    assert hash_of(module, text.format(1)) != hash_of(module, text.format(2))


def test_hash_changes_with_a_number_of_a_helper(module):
    text = "BETA = {}\ndef helper(x):\n    return x * BETA\ndef loss(x):\n    return helper(x)\n"
    assert hash_of(module, text.format(1)) != hash_of(module, text.format(2))


def test_hash_changes_with_a_default(module):
    text = "def loss(x, beta={}):\n    return x * beta\n"
    assert hash_of(module, text.format(1)) != hash_of(module, text.format(2))


def test_hash_changes_with_what_a_partial_binds():
    first, second = (functools.partial(clipped_policy_loss, clip_high=x) for x in (0.2, 0.28))
    assert source_of(first).hash != source_of(second).hash


def test_hash_of_a_partial_that_binds_a_function_is_the_same_when_made_again(module):
    text = "import functools\ndef helper(x):\n    return x\ndef loss(x, fn):\n    return fn(x)\n"
    text += "bound = functools.partial(loss, fn=helper)\n"
    assert hash_of(module, text, "bound") == hash_of(module, text, "bound")
    assert hash_of(module, text, "bound") != hash_of(module, text.replace("x\n", "-x\n"), "bound")


def test_hash_changes_with_which_function_is_captured():
    def loss(aggregate):
        return lambda logprobs, batch: clipped_policy_loss(logprobs, batch, aggregate=aggregate)

    assert source_of(loss(token_mean)).hash != source_of(loss(seq_mean_token_mean)).hash
    assert source_of(loss(token_mean)).hash == source_of(loss(token_mean)).hash


def test_hash_changes_with_a_partial_that_is_captured():
    def loss(length):
        aggregate = functools.partial(seq_mean_token_sum, length=length)
        return lambda logprobs, batch: clipped_policy_loss(logprobs, batch, aggregate=aggregate)

    assert source_of(loss(8)).hash != source_of(loss(9)).hash


def test_hash_changes_with_numbers_in_a_captured_tuple():
    def loss(clip):
        return lambda x: x.clamp(*clip)

    assert source_of(loss((0.2, 0.2))).hash != source_of(loss((0.2, 0.28))).hash


@dataclass(frozen=True, slots=True)
class Clip:
    low: float
    more: object = None

    def loss(self, x):
        return x * self.low

    def __call__(self, x):
        return x * self.low


class Side(Enum):
    LOW = 1
    HIGH = 2


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x],
        lambda x: {"clip": x},
        lambda x: {x: 1},
        lambda x: {x},
        lambda x: (1, [{"a": (x,)}]),
        Clip,
        lambda x: Clip(0.0, {"inner": [Clip(x)]}),
        np.float32,
        lambda x: [np.float64(x)],
        lambda x: Side.LOW if x == 0.1 else Side.HIGH,
        lambda x: SimpleNamespace if x == 0.1 else Clip(1.0),
    ],
)
def test_hash_changes_with_numbers_inside_what_is_captured(make):
    one, again, other = (source_of(scaled(make(x))).hash for x in (0.1, 0.1, 0.2))
    assert one == again != other


def test_hash_changes_with_a_number_of_a_callable_dataclass_and_of_its_methods():
    assert source_of(Clip(0.1)).hash == source_of(Clip(0.1)).hash != source_of(Clip(0.2)).hash
    assert source_of(Clip(0.1).loss).hash != source_of(Clip(0.2).loss).hash


def test_hash_does_not_change_with_the_order_of_a_dict_or_set():
    assert source_of(scaled({"a": 1, "b": 2})).hash == source_of(scaled({"b": 2, "a": 1})).hash


def test_what_holds_itself_has_a_hash():
    loop = [1]
    loop.append(loop)
    assert len(source_of(scaled(loop)).hash) == 12


def test_a_name_that_has_no_value_yet_has_a_hash():
    def early():
        return lambda x: x * later

    loss = early()
    before = source_of(loss).hash
    assert ship(loss).source.hash == before
    later = 2
    assert loss(1) == 2
    assert source_of(loss).hash != before


def test_hash_changes_with_the_attribute_of_a_callable_object():
    class Scaled:
        def __init__(self, beta):
            self.beta = beta

        def __call__(self, x):
            return x * self.beta

    assert source_of(Scaled(0.1)).hash != source_of(Scaled(0.2)).hash


def test_hash_does_not_change_with_comments_elsewhere(module):
    text = "# {}\nOTHER = {}\ndef loss(x):\n    return x\n# {}\n"
    assert hash_of(module, text.format("a", 1, "b")) == hash_of(module, text.format("c", 2, "d"))


def test_functions_that_call_each_other_have_a_hash(module):
    text = (
        "def helper(x):\n    return loss(x - 1)\ndef loss(x):\n    return helper(x) if x else 0\n"
    )
    assert hash_of(module, text) == hash_of(module, text)


def test_function_without_a_source_file_has_a_hash_of_its_code():
    scope_1, scope_2 = {}, {}
    exec("def loss(x):\n    return x + 1", scope_1)
    exec("def loss(x):\n    return x + 2", scope_2)
    assert source_of(scope_1["loss"]).hash != source_of(scope_2["loss"]).hash


def test_source_keeps_name_and_text(module):
    source = source_of(module("def loss(x):\n    return x + 1\n").loss)
    assert source.name == "loss"
    assert source.text == "def loss(x):\n    return x + 1\n"


def test_round_trip_copies_the_function():
    fn = scaled(3)
    copy = round_trip(fn)
    assert copy(2) == 6
    assert copy is not fn


def test_round_trip_keeps_source_and_hash():
    fn = scaled(3)
    assert source_of(round_trip(round_trip(fn))) == source_of(fn)


def test_what_a_copy_changes_stays_in_the_copy():
    seen = []

    def remember(x):
        seen.append(x)
        return len(seen)

    assert round_trip(remember)(1) == 1
    assert seen == []


def test_users_module_travels_by_value(module):
    fn = module(
        "BETA = 2\ndef helper(x):\n    return x * BETA\ndef loss(x):\n    return helper(x)\n"
    )
    shipped = ship(fn.loss)
    del sys.modules[fn.__name__]  # as on a worker, which doesn't have it
    assert shipped.load()(3) == 6


def test_helper_of_another_users_module_travels_by_value(module):
    helpers = module("def deep(x):\n    return x * 2\ndef helper(x):\n    return deep(x)\n")
    losses = module(f"from {helpers.__name__} import helper\ndef loss(x):\n    return helper(x)\n")
    helper = helpers.helper
    shipped = [ship(losses.loss), ship(lambda x: helper(x))]
    for made in (helpers, losses):
        del sys.modules[made.__name__]
    assert [each.load()(3) for each in shipped] == [6, 6]


def test_function_inside_a_partial_or_a_closure_travels_by_value(module):
    helpers = module("def reward(x):\n    return x * 2\n")
    fns = [functools.partial(lambda x, fn: fn(x), fn=helpers.reward), wrapped(helpers.reward)]
    shipped = [ship(fn) for fn in fns]
    del sys.modules[helpers.__name__]
    assert [each.load()(3) for each in shipped] == [6, 6]


def test_installed_functions_travel_by_name():
    assert round_trip(math.sqrt) is math.sqrt
    assert len(ship(clipped_policy_loss).payload) < 500


def test_captured_tensor_travels():
    weights = torch.arange(3)
    assert round_trip(lambda: weights.sum().item())() == 3


def test_function_that_captures_what_cannot_travel_is_an_error_that_names_it():
    lock = threading.Lock()

    def loss(x):
        with lock:
            return x

    with pytest.raises(TypeError, match=r"loss: this function can't be sent to a worker .*lock"):
        ship(loss)


def test_a_users_function_inside_the_kits_own_travels_by_value(tmp_path, monkeypatch):
    """A reward from the user's module, wrapped by rk.score and by the function that is sent."""
    from rlkit.batch.columns import Applied
    from rlkit.functions import ship
    from rlkit.tasks.score import score

    (tmp_path / "users_rewards.py").write_text("def reward(p, r, a): return float(len(r))\n")
    monkeypatch.syspath_prepend(tmp_path)
    import users_rewards

    class Capture:
        columns = ()

        def apply(self, fn, *names):
            return fn

    applied = Applied(score(users_rewards.reward, Capture()), ("prompt",), False)
    (tmp_path / "sent").write_bytes(ship(applied).payload)
    code = "import cloudpickle, sys; f = cloudpickle.load(open(sys.argv[1], 'rb'))"
    code += "; print(f.fn(['p'], ['abc'], ['a']))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "sent")], capture_output=True, text=True
    )
    assert "tensor([3.])" in done.stdout, done.stderr


def test_a_module_that_holds_a_lock_is_imported_by_the_worker(tmp_path, monkeypatch):
    (tmp_path / "has_a_lock.py").write_text(
        "import threading\nlock = threading.Lock()\ndef two(): return 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import has_a_lock

    assert ship(lambda: has_a_lock.two()).load()() == 2


class Fails:
    def fail(self):
        numbers = [1, 0]
        return [1 / n for n in numbers]  # fails here


def test_a_traceback_of_a_function_that_came_by_value_shows_its_lines():
    def outer(n):
        return 1 / n  # the line that fails

    def uses(n):
        return outer(n)

    for call, line in ((lambda: ship(uses).load()(0), "the line that fails"),
                       (lambda: ship(Fails).load()().fail(), "fails here")):  # fmt: skip
        with pytest.raises(ZeroDivisionError) as caught:
            call()
        text = "".join(traceback.format_exception(caught.value))
        assert line in text
        assert "dynamic-code" not in text


def test_sources_of_classes_are_found_in_many_threads():
    """Python 3.11's parser raises SystemError where two threads parse at once."""
    from concurrent.futures import ThreadPoolExecutor

    from rlkit import source_lines

    classes = [rk.Batch, rk.MetricLog, rk.TorchEngine, rk.TorchBackend, rk.ActorWorker] * 8
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            source_lines._classes.clear()
            for found, cls in zip(
                pool.map(source_lines.source_lines, classes), classes, strict=True
            ):
                assert found[0][0].startswith(("class", "@")), cls


def test_a_class_with_a_cached_property_has_a_source():
    class Worker:
        @functools.cached_property
        def three(self):
            return 3

    assert "return 3" in source_of(Worker).text
