"""Takes out of an installation what serving does not need: `python slim.py VENV`.

pip and setuptools, tests of packages, and the bytecode of transformers' models, of which a server
reads the configuration of one. scipy stays, with whose LAPACK jax lowers a kept step again, and so
does tensorstore (Orbax), which stores of models need.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PACKAGES = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
TESTED = ("numpy", "scipy", "jax", "transformers", "orbax", "optax", "flax", "msgpack", "etils")


def slim(venv: Path) -> int:
    """Remove what is not needed; bytes that were freed."""
    (site,) = venv.glob("lib/python3*/site-packages")
    doomed = [path for name in PACKAGES for path in (site / name, site / f"{name}.libs")]
    doomed += [path for name in PACKAGES for path in site.glob(f"{name}-*.dist-info")]
    for name in TESTED:
        doomed += [path for path in (site / name).rglob("tests") if path.is_dir()]
    doomed += (site / "transformers" / "models").rglob("__pycache__")
    freed = 0
    for path in doomed:
        if path.is_dir():
            freed += sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path)
    return freed


if __name__ == "__main__":
    print(f"{slim(Path(sys.argv[1])) / 1e6:.0f} MB taken out")
