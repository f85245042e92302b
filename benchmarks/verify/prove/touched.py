"""Which kernels a change touches: those whose module imports a changed file of the package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from importlib.util import resolve_name
from pathlib import Path

import pallas_kernels
from pallas_kernels.backends import OPERATIONS

PACKAGE = pallas_kernels.__name__
ROOT = Path(pallas_kernels.__file__).parent.parent


def file_of(module: str) -> Path | None:
    """The file of a module of the package; None for what is none."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@functools.cache
def imported(module: str) -> frozenset[str]:
    """The modules of the package that a module names in its imports."""
    file = file_of(module)
    assert file is not None, module
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            parts = {f"{origin}.{alias.name}" for alias in node.names}
            # a name may be a module, or one of the module that it is imported from
            names |= {part for part in parts if part.startswith(PACKAGE) and file_of(part)}
            names |= {origin} if any(not file_of(part) for part in parts) else set()
    return frozenset(name for name in names if name.split(".")[0] == PACKAGE)


@functools.cache
def sources(module: str) -> frozenset[Path]:
    """The files that a module is made of: its own, and those of all that it imports."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += imported(name)
    return frozenset(file for name in seen if (file := file_of(name)) is not None)


def touched(files: Iterable[Path]) -> frozenset[tuple[str, str]]:
    """Operation and backend of the kernels of which a file is a source.

    Args:
        files: by their paths from here or from the repository's root.
    """
    changed = {path.resolve() for file in files for path in (file, ROOT / file)}
    return frozenset(
        (operation, backend)
        for operation, backends in OPERATIONS.items()
        for backend, one in backends.items()
        if sources(one.module) & changed
    )
