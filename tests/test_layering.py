"""Every import points down."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "pallas_kernels", "checkpoints", "server")

# (files, top-level or dotted names that they must not import)
NEVER = [
    ("jaxserve", ("server", "torch", "starlette", "uvicorn", "pydantic", "typer")),
    ("pallas_kernels", ("jaxserve", "server", "checkpoints", "torch")),
    ("checkpoints", ("jaxserve", "server", "pallas_kernels", "torch")),
    ("server", ("torch",)),
    ("jaxserve/scheduling", ("jax", "flax", "jaxserve.execution", "jaxserve.models")),
    ("jaxserve/memory", ("jax", "flax", "jaxserve.execution", "jaxserve.scheduling")),
    ("jaxserve/models", ("jaxserve.execution", "jaxserve.scheduling", "jaxserve.engine")),
    ("jaxserve/execution", ("jaxserve.engine", "jaxserve.loading", "jaxserve.llm")),
    ("jaxserve/engine.py", ("jaxserve.loading", "jaxserve.llm", "jaxserve.async_engine")),
    ("server/routes", ("jaxserve.memory", "jaxserve.scheduling", "jaxserve.execution")),
]
FORBIDDEN_CALLS = ("eval", "exec")
FORBIDDEN_MODULES = ("pickle", "cloudpickle", "dill")


def sources(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(("part", "never"), NEVER, ids=lambda v: v if isinstance(v, str) else "")
def test_imports_point_down(part: str, never: tuple[str, ...]) -> None:
    assert sources(part)
    for path in sources(part):
        for name in imports(path):
            for bad in never:
                assert name != bad and not name.startswith(bad + "."), f"{path} imports {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_untrusted_code_can_run(package: str) -> None:
    for path in sources(package):
        assert not {name.split(".")[0] for name in imports(path)} & set(FORBIDDEN_MODULES), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg != "trust_remote_code", f"{path}:{node.lineno}"
