"""The compiler's flags that put the emulated matrix unit in the place of the processor's."""

from __future__ import annotations

import hashlib
from pathlib import Path

HEADER = Path(__file__).with_name("emulated_tiles.h")
# a built library is known by its flags: the second one changes with the header
FLAGS = (
    f'-DJAXSERVE_TILE_UNIT="{HEADER}"',
    f"-DJAXSERVE_TILE_UNIT_IS={hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]}",
)
