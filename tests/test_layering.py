"""Imports inside rlkit point one way, and only a few files know of devices and big packages.

The table is the one of docs/design.md: a part may import itself, the parts of its own row and those
listed for it. Imports inside functions count too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rlkit"

# batch, and what functions that travel need.
BASE = {
    "types",
    "algo",
    "batch",
    "checks",
    "html",
    "functions",
    "source_lines",
    "shield",
    "waits",
}
BASE |= {"config", "layout", "model_spec", "device", "glossary", "metrics", "trace"}
DATA = BASE | {"models", "rewards", "tasks"}
COMPUTE = DATA | {"engines", "backends"}
PLAN = {"tables", "forms", "ranks", "cells", "moves", "frames", "strategies", "layouts"}
PLAN = {"reshard.memory", *(f"reshard.plan_{name}" for name in PLAN)}
CARRY = {"exchange", "fingerprints", "pieces", "report", "run", "shards", "swap"}
CARRY = {f"reshard.{name}" for name in CARRY}
RESHARD = {"reshard", *CARRY, *PLAN}
DOCK = {"dock", "dock.traffic"}
WHOLE = COMPUTE | {"workers", "cluster", "schedule"} | RESHARD | DOCK

MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "trace": BASE | {"viz"},  # Trace.timeline() draws itself
    "record": BASE,
    "exporters": BASE,
    "algo": {"types"},  # pure functions on tensors
    "models": DATA | {"reshard.plan_tables"},  # names and shapes of experts
    "rewards": BASE,
    "tasks": DATA,
    "engines": COMPUTE,
    "backends": COMPUTE | PLAN,  # which rows a rank of a cut model holds
    "workers": COMPUTE | CARRY | PLAN,  # their end of a weight transfer
    "dock": BASE | DOCK,
    "dock.traffic": {"config", "types"},
    "cluster": COMPUTE | DOCK | {"workers"},
    **dict.fromkeys(PLAN, {"checks", "config", "types"} | PLAN),
    **dict.fromkeys(["reshard", *CARRY], BASE | RESHARD),
    "schedule": {"checks", "types"},
    "checkpoint": WHOLE,
    "recipes": WHOLE | {"checkpoint", "record"},
    "nb": BASE,
    "checkup": {"device"},
    "experiment": BASE | {"record"},
    "sim": {"checks", "config", "types", "metrics", "trace", "schedule", "dock.traffic"} | PLAN,
    "viz": {"checks", "glossary", "trace"},  # test_import.py: neither torch nor ray
}

BIG = {"ray", "vllm", "vllm_ascend", "megatron", "torch_npu", "mindspeed"}
BIG_ALLOWED = {"cluster", "dock", "engines", "backends", "device"}
DEVICE_FILES = {"rlkit.device", "rlkit.backends.megatron_cpu", "rlkit.engines.vllm_settings"}
DEVICE_FILES |= {"rlkit.checkup"}  # which packages a kind of device needs
KINDS = "cuda|npu|nccl|hccl|ascend"  # kinds of device, and what belongs to one kind
DEVICE_WORD = re.compile(  # not in input, nor in ascending
    rf"(?<![A-Za-z])(?i:{KINDS})(?![a-z])|(?<![A-Z])(?:{KINDS.upper()})(?![A-Z])"
)
SAYS = {"debug", "info", "warning", "error", "exception", "warn", "print"}  # to a person


def part_of(module: str) -> str:
    """The part a module belongs to: 'rlkit.reshard.plan' -> 'reshard.plan', 'rlkit' -> ''."""
    names = module.split(".")[1:]
    two = ".".join(names[:2])
    return two if two in MAY_IMPORT else ".".join(names[:1])


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The full name of the module that a `from` import names."""
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    parents = parents[: len(parents) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[ast.AST, str]]:
    """Every module a file may load, as (node, full name); `from a import b` gives 'a.b'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package=is_package)
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in {"import_module", "__import__"}:
                yield node, str(node.args[0].value)


def at_import_time(tree: ast.Module) -> set[ast.AST]:
    """Nodes that run when the file is imported: outside functions and `if TYPE_CHECKING`."""
    found: set[ast.AST] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if later or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        found.add(node)
        todo.extend(ast.iter_child_nodes(node))
    return found


def wrong_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Imports in a file's text that point the wrong way, or load a big package."""
    if module == "rlkit":  # the lazy __init__: what it loads is test_import.py's matter
        return []
    tree, here, wrong = ast.parse(source), part_of(module), []
    if here not in MAY_IMPORT:
        return [f"{module}: a part that docs/design.md does not know; add it to the table"]
    early = at_import_time(tree)
    for node, name in imports(tree, module, is_package=is_package):
        top, there = name.split(".")[0], part_of(name)
        where = f"{module}:{node.lineno}"
        if top in BIG and here not in BIG_ALLOWED:
            wrong.append(f"{where} imports {top}; only {sorted(BIG_ALLOWED)} may")
        elif top in BIG and node in early:
            wrong.append(f"{where} imports {top} when loaded; move it into the function")
        elif top == "rlkit" and there not in MAY_IMPORT:
            wrong.append(f"{where} imports {name}; import from the module that defines it")
        elif top == "rlkit" and there != here and there not in MAY_IMPORT[here]:
            wrong.append(f"{where} imports {name}; {here} may import {sorted(MAY_IMPORT[here])}")
    return wrong


def prose(tree: ast.AST) -> set[ast.AST]:
    """Nodes of docstrings, and of what is raised, logged or printed: these may speak of devices."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        call = node.func if isinstance(node, ast.Call) else None
        says = getattr(call, "attr", getattr(call, "id", "")) in SAYS
        if says or isinstance(node, ast.Raise):
            found.update(n for n in ast.walk(node) if isinstance(n, ast.Constant))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(node.value)
    return found


def device_words(source: str, module: str) -> list[str]:
    """Places outside prose that name a kind of device; rlkit.device is asked instead."""
    if module in DEVICE_FILES:
        return []
    tree = ast.parse(source)
    skipped, found = prose(tree), []
    fields = ("attr", "id", "arg", "name", "asname", "module", "value")
    for node in ast.walk(tree):
        if node in skipped:
            continue
        for name in [getattr(node, field, None) for field in fields]:
            if isinstance(name, str) and DEVICE_WORD.search(name):
                found.append(f"{module}:{node.lineno} has {name!r}; ask rlkit.device")
    return found


def modules() -> dict[str, tuple[str, bool]]:
    """Module name -> (text, is it an __init__) of every file of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        is_package = names[-1] == "__init__"
        name = ".".join(names[:-1] if is_package else names)
        found[name] = (path.read_text(encoding="utf-8"), is_package)
    assert len(found) > 5, f"got {len(found)} modules under {PACKAGE}"
    return found


def test_imports_point_one_way():
    wrong = [w for m, (s, p) in modules().items() for w in wrong_imports(s, m, is_package=p)]
    assert not wrong, "\n".join(wrong)


def test_only_device_py_names_a_kind_of_device():
    found = [w for module, (source, _) in modules().items() for w in device_words(source, module)]
    assert not found, "\n".join(found)


def test_parts_do_not_import_each_other_in_a_circle():
    edges: dict[str, set[str]] = {}
    for module, (source, is_package) in modules().items():
        tree = ast.parse(source)
        early = at_import_time(tree)
        targets = {
            part_of(name)
            for node, name in imports(tree, module, is_package=is_package)
            if node in early and name.startswith("rlkit.")
        }
        edges.setdefault(part_of(module), set()).update(targets - {part_of(module)})
    while leaves := {part for part in edges if not edges[part] & edges.keys()}:
        edges = {part: targets for part, targets in edges.items() if part not in leaves}
    assert not edges, f"in or before a circle: {edges}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rlkit.algo.losses", "from rlkit.batch import Batch"),
        ("rlkit.algo.losses", "from ..models import tiny"),
        ("rlkit.algo.losses", "def f():\n    from rlkit import sim"),
        ("rlkit.models.tiny", "import rlkit.engines.torch"),
        ("rlkit.workers.actor", "from rlkit.cluster.group import WorkerGroup"),
        ("rlkit.workers.actor", "def f():\n    import ray.util"),
        ("rlkit.cluster.launch", "import ray"),
        ("rlkit.cluster.launch", "class A:\n    from ray import get"),
        ("rlkit.schedule.rules", "from rlkit.dock import TransferDock"),
        ("rlkit.reshard.plan_moves", "from .resharder import Resharder"),
        ("rlkit.sim.cost", "from rlkit.dock.controller import Controller"),
        ("rlkit.sim.cost", "import importlib\nimportlib.import_module('rlkit.cluster')"),
        ("rlkit.dock.client", "import rlkit as rk"),
        ("rlkit.dock.client", "from rlkit import Batch"),
        ("rlkit.checkpoint", "from rlkit.viz import plot_reward"),
        ("rlkit.manager", "x = 1"),
    ],
)
def test_a_planted_wrong_import_is_found(module, source):
    assert len(wrong_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rlkit.cluster.launch", "def f():\n    import ray"),
        ("rlkit.cluster.launch", "if TYPE_CHECKING:\n    import ray"),
        ("rlkit.sim.cost", "from rlkit.dock.traffic import bytes_moved"),
        ("rlkit.sim.cost", "from rlkit.reshard import plan_layouts"),
        ("rlkit.reshard.resharder", "from .plan_layouts import plan_reshard\nfrom . import memory"),
        ("rlkit.algo.losses", "import torch\nfrom rlkit.algo.masking import masked_mean"),
    ],
)
def test_a_right_import_passes(module, source):
    assert wrong_imports(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "x.to('cuda')",
        "x.to('cuda:0')",
        "x.to(f'npu:{i}')",
        "resources = {'NPU': 8}",
        "torch.cuda.synchronize()",
        "x.npu()",
        "x.is_cuda",
        "def f(npu): ...",
        "importlib.import_module('torch.npu')",
        "import torch.cuda",
        "from torch import npu",
        "import torch_npu as backend",
        "where = 'cuda' if big else 'cpu'",
        "os.environ['ASCEND_RT_VISIBLE_DEVICES'] = '0'",
        "CUDA_VISIBLE_DEVICES = '0'",
        "dist.ProcessGroupNCCL(store, 0, 1)",
        "options = 'cpu:gloo,npu:hccl'",
        "getattr(torch, 'npu')",
        "f(devices='npu')",
        "match kind:\n    case 'cuda': pass",
        "if kind == 'npu':\n    raise ValueError(kind)",
    ],
)
def test_a_planted_device_word_is_found(source):
    assert device_words(source, "rlkit.workers.actor")


def test_docstrings_comments_and_messages_may_speak_of_devices():
    source = '"""On an NPU."""\nx = "input"  # cuda\nraise ValueError("got 0, need 8 NPUs")'
    assert device_words(source, "rlkit.workers.actor") == []
    source = 'logger.warning("no NPU here")\nframe.sort_values("x", ascending=True)\nINPUTS = 1'
    assert device_words(source, "rlkit.workers.actor") == []
    assert device_words("x.to('npu')", "rlkit.device") == []
