"""The path of the bundled model."""

from __future__ import annotations

from pathlib import Path

import checkpoints.tiny

FOLDER = Path(checkpoints.tiny.__file__).parent
