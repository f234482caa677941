"""The layers of the design, held by walking every import.

Not seen: a module named only in a string (`importlib.import_module`), as the lazy package root does it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandbox_exec

PACKAGE = Path(sandbox_exec.__file__).parent
ROOT = "__init__"

# A module imports from the rows above its own, and from itself where it is a folder; never sideways.
LAYERS: list[set[str]] = [
    {"errors"},
    {"clock", "figures", "units"},
    {"contracts"},
    {"guest"},
    {"artifacts", "experiment"},
    {"containment"},
    {"sandbox"},
    {"images", "trial"},
    {"schedule"},
    {"store"},
    {"backends"},
    {"control", "metrics", "orders"},
    {"graders"},
    {"dispatching"},
    {"ledger"},
    {"coordinator"},
    {"pool", "runs", "doctor", "preflight", "report", "viewer"},
    {"regrade", "submission", "trial_reports"},
    {"benchmark"},
    {ROOT},  # re-exports, for users; above it, a name is imported from where it lives
    {"display", "testing"},
    {"cli_artifacts", "cli_images", "cli_preflight", "cli_queue", "cli_reap", "cli_report", "cli_runs"},
    {"cli"},
    {"__main__"},
]
# A trusted result is made with what made the callable. Inside a function only: no other trial loads it.
GUEST_LATE = {"cloudpickle"}

DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def layer_faults(package: Path) -> list[str]:
    """Return each import that breaks the layers, and each module that has none, as "file:line: what"."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        importer = path.relative_to(package).parts[0].removesuffix(".py")
        where = path.relative_to(package.parent)
        if importer not in DEPTH:
            faults.append(f"{where}: {importer} is in no layer; add it to LAYERS and to the design")
            continue
        late = imports_in_functions(path)
        for line, module in imported_modules(path, package):
            fault = arrow_fault(importer, module, package, late=line in late)
            if fault:
                faults.append(f"{where}:{line}: {fault}")
    return faults


def arrow_fault(importer: str, module: str, package: Path, *, late: bool) -> str | None:
    top, *rest = module.split(".")
    if top != package.name:
        allowed = sys.stdlib_module_names | (GUEST_LATE if late else set())
        if importer == "guest" and top not in allowed:
            return f"guest imports {module}; inside a sandbox there is only the standard library"
        return None
    imported = rest[0] if rest else ROOT
    if imported == importer:
        return None
    if importer == "guest":
        return f"guest imports {module}; it imports nothing of ours but itself"
    if imported not in DEPTH:
        return f"{importer} imports {module}, which is in no layer"
    if DEPTH[imported] >= DEPTH[importer]:
        return f"{importer} imports {module}, which does not stand above it"
    return None


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module) for every import: inside functions and under TYPE_CHECKING too."""
    here = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == package.name:
                # `from package import x`: x is a module of ours, or a name that the root exports.
                names = [alias.name for alias in node.names]
                ours = [n for n in names if (package / n).is_dir() or (package / f"{n}.py").is_file()]
                yield from ((node.lineno, f"{module}.{name}") for name in ours)
                if len(ours) < len(names):
                    yield node.lineno, module
            else:
                yield node.lineno, module


def imports_in_functions(path: Path) -> set[int]:
    functions = [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, ast.FunctionDef)]
    inner = (node for function in functions for node in ast.walk(function))
    return {node.lineno for node in inner if isinstance(node, ast.Import | ast.ImportFrom)}


def test_no_import_points_up() -> None:
    assert layer_faults(PACKAGE) == []


def test_the_walk_reaches_every_kind_of_module() -> None:
    seen = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert {"__init__.py", "errors.py", "contracts/limits.py", "guest/__init__.py"} <= seen
    arrows = {module for _, module in imported_modules(PACKAGE / "contracts" / "limits.py", PACKAGE)}
    assert {"sandbox_exec.errors", "sandbox_exec.contracts.base", "pydantic"} <= arrows


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    package = tmp_path / "sandbox_exec"
    files = {
        "__init__.py": "from sandbox_exec.pool import Pool\n",
        "errors.py": "",
        "units.py": "from sandbox_exec.errors import InvalidValue\n",
        "contracts/__init__.py": "from . import limits\nimport pydantic\n",
        "contracts/limits.py": "from sandbox_exec import errors\nimport sandbox_exec.units\n",
        "guest/__init__.py": "import json\nfrom .wire import frame\n",
        "guest/wire.py": "from sandbox_exec.guest import runner\ndef f():\n    import cloudpickle\n",
        "trial/__init__.py": "",
        "pool.py": "import sandbox_exec.trial\nfrom sandbox_exec.contracts.limits import Limits\n",
        "cli.py": "from sandbox_exec import __version__, pool\n",
    }
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_a_tree_that_holds_the_layers_has_no_faults(planted: Path) -> None:
    assert layer_faults(planted) == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        (
            "errors.py",
            "import sandbox_exec.units",
            "errors.py:1: errors imports sandbox_exec.units, which does not",
        ),
        (
            "trial/executor.py",
            "from sandbox_exec.pool import Pool",
            "trial imports sandbox_exec.pool, which does not",
        ),
        (
            "trial/executor.py",
            "import os, sandbox_exec.pool as p",
            "trial imports sandbox_exec.pool, which does not",
        ),
        (
            "trial/executor.py",
            "from sandbox_exec import pool",
            "trial imports sandbox_exec.pool, which does not",
        ),
        ("trial/executor.py", "from .. import pool", "trial imports sandbox_exec.pool, which does not"),
        ("trial/a/b.py", "from ...pool import Pool", "trial imports sandbox_exec.pool, which does not"),
        ("trial/executor.py", "from sandbox_exec import Pool", "trial imports sandbox_exec, which does not"),
        (
            "trial/executor.py",
            "def f():\n    import sandbox_exec.cli",
            "executor.py:2: trial imports sandbox_exec.cli",
        ),
        (
            "contracts/late.py",
            "import typing\nif typing.TYPE_CHECKING:\n    from sandbox_exec.trial import Executor",
            "late.py:3: contracts imports sandbox_exec.trial, which does not stand above it",
        ),
        (
            "doctor.py",
            "import sandbox_exec.pool",
            "doctor imports sandbox_exec.pool, which does not stand above it",
        ),
        ("pool.py", "import sandbox_exec.stray", "pool imports sandbox_exec.stray, which is in no layer"),
        ("utils.py", "import os", "utils.py: utils is in no layer"),
        (
            "guest/deep.py",
            "from sandbox_exec.errors import InvalidValue",
            "guest imports sandbox_exec.errors; it",
        ),
        ("guest/deep.py", "from ..units import parse_bytes", "guest imports sandbox_exec.units; it"),
        ("guest/deep.py", "import cloudpickle", "guest imports cloudpickle; inside"),
        ("guest/deep.py", "def f():\n    import pydantic", "deep.py:2: guest imports pydantic; inside"),
        ("guest/deep.py", "import sandbox_exec", "guest imports sandbox_exec; it"),
        (
            "guest/deep.py",
            "try:\n    import orjson\nexcept ImportError: pass",
            "deep.py:2: guest imports orjson; inside",
        ),
    ],
)
def test_a_planted_fault_is_found(planted: Path, file: str, text: str, fault: str) -> None:
    path = planted / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (found,) = layer_faults(planted)
    assert fault in found


def third_party_loaded_by(statement: str) -> list[str]:
    script = (
        f"import sys; before = set(sys.modules); {statement}; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return sorted(set(done.stdout.split()) - sys.stdlib_module_names)


def test_importing_the_package_loads_nothing_but_itself() -> None:
    assert third_party_loaded_by("import sandbox_exec") == ["sandbox_exec"]


def test_importing_the_guest_loads_nothing_but_itself() -> None:
    assert third_party_loaded_by("import sandbox_exec.guest") == ["sandbox_exec"]


def test_a_name_is_loaded_when_it_is_used() -> None:
    assert "pydantic" in third_party_loaded_by("import sandbox_exec; sandbox_exec.Limits")


@pytest.mark.parametrize("name", sandbox_exec.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(sandbox_exec, name) is not None
    assert name in dir(sandbox_exec)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Swimming'"):
        sandbox_exec.Swimming  # noqa: B018  # the access is the test


def test_type_checkers_are_shown_what_is_loaded_lazily() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    shown = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert shown == sandbox_exec._MODULE_OF
    assert {*shown, "__version__"} == set(sandbox_exec.__all__)
