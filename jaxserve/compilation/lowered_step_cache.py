"""Steps kept as they were lowered, beside JAX's compilation cache: a later start does not trace.

JAX's cache is asked by the program, so that a start has to trace and lower a step before it finds
the executable. A kept step is found by what decides it: sources, versions, settings, shapes. It is
for a process in which nothing but these packages has been loaded: code that replaced a part of them
would not be seen.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.export

from jaxserve.parallel.mesh import is_divided
from pallas_kernels.native import own_folder
from pallas_kernels.native.library import TARGETS

logger = logging.getLogger(__name__)

SOURCES = ("jaxserve", "pallas_kernels", "checkpoints")
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
HASH_BYTES = 32

Step = Callable[..., Any]


def environment() -> str:
    """What decides what a function becomes when it is traced, beside what it is given."""
    # where the cache lies does not change a program
    options = {k: v for k, v in jax.config.values.items() if "cache" not in k}
    versions = [importlib.metadata.version(package) for package in PACKAGES]
    return repr((sys.version, versions, options, source_digest()))


def source_digest() -> str:
    """Of the Python files of all packages whose functions a step may call."""
    found = hashlib.sha256()
    for package in SOURCES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(f"{package}/{path.relative_to(folder)}\0".encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


class LoweredStepCache:
    """The steps of one engine, on a CPU.

    Args:
        folder: of the compilation cache.
        static: text of all that decides the steps beside their own shape, alike in every process.
    """

    def __init__(self, folder: Path, static: str):
        self._folder = folder / "steps"
        own_folder.make(self._folder)
        self._base = environment(), static

    def step(self, shape: str, run: Step, operands: tuple[Any, ...]) -> Step:
        """A function that does what `run` does: found, or traced and kept.

        Args:
            shape: of the step, as text.
            run: `(leaves, buffers, state, blob) -> (state, result, aside)`, a step of this engine.
            operands: their shapes, or arrays of these.
        """
        flat, treedef = jax.tree.flatten(operands)
        state_def: Any = jax.tree.structure(operands[2])
        facts = [(leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))) for leaf in flat]
        text = repr((self._base, shape, facts, str(treedef)))
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.step"

        def leaves_alone(*leaves: Any) -> Any:
            state, result, aside = run(*jax.tree.unflatten(treedef, leaves))
            assert jax.tree.structure(state) == state_def
            return jax.tree.leaves(state), result, aside

        exported = _read(path)
        if exported is None:
            known = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
            try:
                exported = jax.export.export(jax.jit(leaves_alone), disabled_checks=known)(*flat)
                serialized = bytes(exported.serialize())
            except (ValueError, NotImplementedError) as error:  # of calls that export does not know
                logger.warning("a step is not kept, and traced at each start: %s", error)
                return run
            _write(path, serialized)

        def step(*operands: Any) -> Any:
            state, result, aside = exported.call(*jax.tree.leaves(operands))
            return jax.tree.unflatten(state_def, state), result, aside

        return step


def lowered_step_cache(
    folder: Path | None, mesh: jax.sharding.Mesh, static: str, modules: Iterable[str]
) -> LoweredStepCache | None:
    """The cache, where steps can be kept; None, with the reason in the log, where they cannot.

    Args:
        folder, static: see `LoweredStepCache`; None: there is no folder.
        mesh: of the engine.
        modules: that the steps are made of, which may be the operator's own.
    """
    own = sorted(name for name in modules if name.split(".")[0] not in SOURCES)
    if folder is None:
        reason = "there is no compilation cache"
    elif is_divided(mesh.size) or mesh.devices.flat[0].platform != "cpu":
        reason = "only those of one CPU are"
    elif importlib.util.find_spec("flatbuffers") is None:
        reason = "flatbuffers is not installed"
    elif own:
        reason = f"they are made by {', '.join(own)}, whose sources may change"
    else:
        try:
            return LoweredStepCache(folder, static)
        except OSError as error:
            reason = str(error)
    logger.info("steps are traced at each start and not kept: %s", reason)
    return None


def _read(path: Path) -> Any:
    """A step that is there and whole; one that is not, is made anew, which is logged."""
    try:
        held = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("a step cannot be read and is traced anew: %s", error)
        return None
    if hashlib.sha256(held[HASH_BYTES:]).digest() != held[:HASH_BYTES]:
        logger.warning("an unreadable step, %s, is replaced: it is traced anew", path)
        return None
    return jax.export.deserialize(bytearray(held[HASH_BYTES:]))


def _write(path: Path, serialized: bytes) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_bytes(hashlib.sha256(serialized).digest() + serialized)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        logger.warning("a step cannot be kept in %s: %s", path.parent, error)
