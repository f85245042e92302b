"""Documentation strings of the Python standard library, read from the running interpreter.

Sources are parsed, never imported: the modules' own text is all that is needed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = {"antigravity", "this", "idlelib", "lib2to3", "test", "turtledemo", "ensurepip"}
_MAX_CHARS = 1200


@dataclass(frozen=True, slots=True)
class Docstring:
    """One documented object: its dotted name, its signature line and its documentation."""

    name: str
    signature: str
    text: str

    @property
    def summary(self) -> str:
        """The first line of the documentation."""
        return self.text.split("\n", 1)[0].strip()

    @property
    def document(self) -> str:
        """The text that the model reads: signature, then documentation."""
        return f"{self.signature}\n{self.text[:_MAX_CHARS]}"

    @property
    def held_out(self) -> bool:
        """True for one text in thirty; equal texts fall on the same side."""
        return hashlib.sha256(self.text.encode()).digest()[0] % 30 == 0


def _sources() -> list[tuple[str, Path]]:
    """Name and path of every pure-Python public module of the standard library.

    Modules frozen into the interpreter (``os``, ``codecs``, ...) name no file and are left out.
    """
    found = []
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _SKIPPED:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            continue
        path = Path(spec.origin)
        if path.name != "__init__.py":
            found.append((name, path))
            continue
        for child in sorted(path.parent.glob("*.py")):
            if child.stem == "__init__":
                found.append((name, child))
            elif not child.stem.startswith("_"):
                found.append((f"{name}.{child.stem}", child))
    return found


def _walk(node: ast.AST, prefix: str) -> list[Docstring]:
    """Documented public objects below ``node``, in source order."""
    found: list[Docstring] = []
    for child in getattr(node, "body", []):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        text = ast.get_docstring(child)
        if isinstance(child, ast.ClassDef):
            signature = f"class {name}"
        else:
            signature = f"def {name}({ast.unparse(child.args)})"
        if text and len(signature) < 160:
            found.append(Docstring(name, signature, text))
        if isinstance(child, ast.ClassDef):
            found.extend(_walk(child, name))
    return found


def _builtins() -> list[Docstring]:
    """Documented builtin functions, types and methods, which have no Python source."""
    found = []
    for name, value in sorted(vars(__import__("builtins")).items()):
        members = [(name, value)]
        if isinstance(value, type) and not issubclass(value, BaseException):
            members += [(f"{name}.{key}", item) for key, item in sorted(vars(value).items())]
        for dotted, item in members:
            text = inspect.getdoc(item) if callable(item) else None
            if text and not dotted.rsplit(".", 1)[-1].startswith("_"):
                kind = "class" if isinstance(item, type) else "def"
                found.append(Docstring(dotted, f"{kind} {dotted}", text))
    return found


@functools.cache
def load_docstrings() -> tuple[Docstring, ...]:
    """All documentation strings of the standard library, without repeated texts."""
    found = _builtins()
    for name, path in _sources():
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        text = ast.get_docstring(tree)
        if text:
            found.append(Docstring(name, f"module {name}", text))
        found.extend(_walk(tree, name))
    unique: dict[str, Docstring] = {}
    for item in found:
        if len(item.text) >= 20:
            unique.setdefault(item.text, item)
    return tuple(unique.values())
