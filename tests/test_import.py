"""`import rlkit` is quick because it loads nothing heavy.

Seconds, in a fresh interpreter (0.5 s is the aim):
    python -c "import time; t = time.perf_counter(); import rlkit; print(time.perf_counter() - t)"
"""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "megatron", "torch_npu", "transformers", "pandas", "matplotlib")


def heavy_modules_after(statement: str) -> list[str]:
    loaded = f"[name for name in {HEAVY} if name in sys.modules]"
    code = f"import json, sys\n{statement}\nprint(json.dumps({loaded}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_rlkit_loads_nothing_heavy():
    assert heavy_modules_after("import rlkit") == []


def test_listing_the_public_names_loads_nothing_heavy():
    assert heavy_modules_after("import rlkit; assert rlkit.__all__; dir(rlkit)") == []


def test_drawing_needs_neither_torch_nor_ray():
    assert not {"torch", "ray"} & set(heavy_modules_after("import rlkit.viz"))


def test_the_process_of_a_reward_needs_neither_torch_nor_ray():
    assert not {"torch", "ray"} & set(heavy_modules_after("import rlkit.rewards"))


def test_every_public_name_resolves():
    import rlkit

    missing = [name for name in rlkit.__all__ if not hasattr(rlkit, name)]
    assert not missing


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    import rlkit

    with pytest.raises(AttributeError, match="no_such_part"):
        _ = rlkit.no_such_part
