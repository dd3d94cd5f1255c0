"""Holds the architecture: imports run downwards, files and classes stay small, only two modules call Ray.

Every check reads sources with `ast` and returns what it objects to; each is run over the package, and over a source
that breaks it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parent.parent / "torchdl_ray"

# A module may import modules of lower floors, and of its own floor as long as no circle arises.
FLOORS = {
    "errors": 1,
    "metrics": 1,
    "buckets": 1,
    "containers": 1,
    "rendezvous": 1,
    "shared_block": 1,
    "shared_memory": 1,
    "program": 2,
    "payload": 2,
    "wire": 2,
    "tree": 2,
    "reading": 2,
    "source": 2,
    "shipping": 2,
    "adoption": 2,
    "remote_exception": 2,
    "agreement": 2,
    "process_group": 2,
    "ray_group": 2,
    "collective": 2,
    "resources": 2,
    "placement": 2,
    "checkpoint": 2,
    "packing": 3,
    "layout": 3,
    "operations": 3,
    "replica": 3,
    "calls": 3,
    "arrival": 3,
    "interpreter": 3,
    "transfer": 3,
    "worker": 3,
    "group": 4,
    "local_group": 4,
    "entries": 5,
    "setback": 5,
    "stream": 5,
    "workforce": 5,
    "membership": 5,
    "scalar": 2,
    "arithmetic": 2,
    "looks": 2,
    "graph": 2,
    "answer": 6,
    "norm": 6,
    "row_list": 6,
    "remote_tensor": 6,
    "remote_call": 6,
    "recipe": 6,
    "call_kind": 6,
    "caller": 6,
    "values": 6,
    "remote_gradient": 6,
    "gradients": 6,
    "watched": 6,
    "module_state": 6,
    "remote_parameter": 6,
    "stand_in": 6,
    "remote_optimizer": 6,
    "optim": 6,
    "loader": 6,
    "view": 6,
    "wrapped_module": 7,
    "data_parallel": 7,
    "trainer": 8,
    "launch": 8,
    "__init__": 9,
}
MAY_CALL_RAY = {"group", "placement"}
RAY_VERBS = {"get", "put", "wait", "kill", "cancel"}
MAX_LINES_PER_FILE = 400
MAX_LINES_PER_FUNCTION = 60
MAX_PUBLIC_METHODS = 15
MAX_PUBLIC_NAMES = 30
VAGUE_NAMES = {"util", "utils", "common", "base", "manager", "helper", "helpers", "core", "misc", "tools"}


def sources() -> dict[str, str]:
    """The package's modules by name."""
    return {path.stem: path.read_text() for path in sorted(PACKAGE.glob("*.py"))}


def imported_modules(source: str) -> set[str]:
    """The modules of this package that a source imports, imports inside functions and for type checkers included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = "torchdl_ray" if node.level else ""
            origin = ".".join(part for part in (prefix, node.module) if part)
            names = [origin] + [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {part[1] for part in parts if part[0] == "torchdl_ray" and len(part) > 1 and part[1] in FLOORS}
        if any(part == ["torchdl_ray"] for part in parts) and isinstance(node, ast.Import):
            found.add("__init__")
    return found


def upward_imports(modules: dict[str, str]) -> list[str]:
    """Imports of a higher floor, and modules without a floor."""
    faults = [f"{name} has no floor in the table" for name in modules if name not in FLOORS]
    for name, source in modules.items():
        for target in sorted(imported_modules(source)):
            if name in FLOORS and FLOORS[target] > FLOORS[name]:
                faults.append(f"{name} (floor {FLOORS[name]}) imports {target} (floor {FLOORS[target]})")
    return faults


def import_circles(modules: dict[str, str]) -> list[str]:
    """Circles of imports, each once, as `a -> b -> a`."""
    graph = {name: imported_modules(source) for name, source in modules.items()}
    circles: dict[frozenset[str], str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            circles.setdefault(frozenset(circle), " -> ".join([*circle, name]))
            return
        for target in sorted(graph.get(name, ())):
            visit(target, (*path, name))

    for name in sorted(graph):
        visit(name, ())
    return sorted(circles.values())


def ray_calls(name: str, source: str) -> list[str]:
    """Calls of `.remote(...)` and of Ray's verbs outside the modules that may make them."""
    if name in MAY_CALL_RAY:
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            faults += [f"{name}:{node.lineno} imports ray.{a.name}" for a in node.names if a.name in RAY_VERBS]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_ray = isinstance(node.func.value, ast.Name) and node.func.value.id == "ray"
        if node.func.attr == "remote" or (of_ray and node.func.attr in RAY_VERBS):
            faults.append(f"{name}:{node.lineno} calls {ast.unparse(node.func)}()")
    return faults


def adds_no_name(node: ast.AST, bases: list[str]) -> bool:
    """True for a property's setter or deleter, an overload, and what a torch module has anyway: they add no name."""
    if "nn.Module" in bases and getattr(node, "name", "") in dir(torch.nn.Module):
        return True
    decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(d.endswith((".setter", ".deleter", "overload")) for d in decorators)


def oversized(name: str, source: str) -> list[str]:
    """Files, functions and classes over the limits."""
    faults = []
    lines = len(source.splitlines())
    if lines > MAX_LINES_PER_FILE:
        faults.append(f"{name} has {lines} lines")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_LINES_PER_FUNCTION:
                faults.append(f"{name}.{node.name} has {length} lines")
        if isinstance(node, ast.ClassDef):
            public = [
                child.name
                for child in node.body
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                and not child.name.startswith("_")
                and not adds_no_name(child, [ast.unparse(base) for base in node.bases])
            ]
            if len(public) > MAX_PUBLIC_METHODS:
                faults.append(f"{name}.{node.name} has {len(public)} public methods")
    return faults


def undocumented(name: str, source: str) -> list[str]:
    """A module without a docstring."""
    return [] if ast.get_docstring(ast.parse(source)) else [f"{name} has no docstring"]


def vague(name: str) -> list[str]:
    """A module named after no noun of the domain."""
    return [f"{name} says nothing"] if VAGUE_NAMES & set(name.strip("_").split("_")) else []


def public_names(source: str) -> list[str]:
    """Faults of `__all__`: missing, unsorted, doubled, too long, or naming what is not imported."""
    tree = ast.parse(source)
    names: list[str] | None = None
    bound: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign):
            bound |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    if names is None:
        return ["__init__ has no __all__"]
    faults = []
    if names != sorted(set(names)):
        faults.append("__all__ is not sorted")
    if len(names) > MAX_PUBLIC_NAMES:
        faults.append(f"__all__ has {len(names)} names")
    faults += [f"__all__ names {name}, which is not imported" for name in names if name not in bound]
    hidden = {name for name in bound - set(names) - {"annotations"} if not name.startswith("_")}
    faults += [f"{name} is imported but not in __all__" for name in sorted(hidden)]
    return faults


def test_imports_run_downwards():
    assert upward_imports(sources()) == []


def test_there_are_no_import_circles():
    assert import_circles(sources()) == []


@pytest.mark.parametrize("name", sorted(sources()))
def test_module(name: str):
    source = sources()[name]
    assert [*ray_calls(name, source), *oversized(name, source), *undocumented(name, source), *vague(name)] == []


def test_public_names():
    assert public_names(sources()["__init__"]) == []


def test_the_package_is_flat_and_holds_nothing_but_modules():
    folders = [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert folders == []
    assert (PACKAGE / "py.typed").exists()


# ---- each check can fail ----


@pytest.mark.parametrize(
    "source",
    [
        "from torchdl_ray.worker import Worker",
        "from torchdl_ray import worker",
        "from .worker import Worker",
        "from . import worker",
        "import torchdl_ray.worker",
        "def f():\n    from torchdl_ray import worker",
    ],
)
def test_an_upward_import_is_found(source: str):
    assert upward_imports({"tree": source}) == ["tree (floor 2) imports worker (floor 3)"]
    assert upward_imports({"stream": source}) == []


def test_the_public_page_is_above_all_modules():
    assert upward_imports({"launch": "import torchdl_ray"}) == ["launch (floor 8) imports __init__ (floor 9)"]


def test_a_module_without_a_floor_is_found():
    assert upward_imports({"surprise": ""}) == ["surprise has no floor in the table"]


def test_a_circle_is_found():
    circle = {"tree": "from torchdl_ray import program", "program": "from torchdl_ray import tree"}
    assert import_circles(circle) == ["program -> tree -> program"]
    assert import_circles({"tree": "from torchdl_ray import program", "program": ""}) == []


@pytest.mark.parametrize(
    "source",
    ["actor.run.remote(1)", "ray.get(x)", "ray.wait([x])", "ray.put(x)", "ray.kill(x)", "from ray import get"],
)
def test_a_stray_ray_call_is_found(source: str):
    assert len(ray_calls("worker", source)) == 1
    assert ray_calls("group", source) == []
    assert ray_calls("worker", "settings.get(x); queue.put(x); ray.is_initialized()") == []


def test_large_files_functions_and_classes_are_found():
    assert oversized("tree", "\n" * 400) == []
    assert oversized("tree", "\n" * 401) == ["tree has 401 lines"]
    body = "    pass\n"
    assert oversized("tree", "def f():\n" + body * 59) == []
    assert oversized("tree", "def f():\n" + body * 60) == ["tree.f has 61 lines"]
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(15)) + "    def _private(self): ...\n"
    assert oversized("tree", "class C:\n" + methods) == []
    setter = "    @m1.setter\n    def m1(self, value): ...\n"
    assert oversized("tree", "class C:\n" + methods + setter) == []
    extra = "    def one_more(self): ...\n"
    assert oversized("tree", "class C:\n" + methods + extra) == ["tree.C has 16 public methods"]


def test_missing_docstrings_and_vague_names_are_found():
    assert undocumented("tree", "import os") == ["tree has no docstring"]
    assert undocumented("tree", '"""Trees."""') == []
    assert vague("tensor_utils") == ["tensor_utils says nothing"]
    assert vague("tree") == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from .tree import scatter", "__init__ has no __all__"),
        ("from .tree import a, b\n__all__ = ['b', 'a']", "__all__ is not sorted"),
        ("from .tree import a\n__all__ = ['a', 'a']", "__all__ is not sorted"),
        ("from .tree import a\n__all__ = ['a', 'b']", "__all__ names b, which is not imported"),
        ("from .tree import a, b\n__all__ = ['a']", "b is imported but not in __all__"),
    ],
)
def test_faulty_public_names_are_found(source: str, fault: str):
    assert public_names(source) == [fault]


def test_too_many_public_names_are_found():
    names = [f"n{i:02d}" for i in range(31)]
    source = f"from .tree import {', '.join(names)}\n__all__ = {names!r}"
    assert public_names(source) == ["__all__ has 31 names"]
