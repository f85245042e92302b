"""What tells whether several processes have found the same weights, without reading them whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

from checkpoints.safetensors_reader import SINGLE_FILE

SAMPLES, SAMPLE_BYTES = 64, 1 << 12  # of a file, at equal distances
CONFIG = "config.json"


def weights_digest(path: Path) -> str:
    """A digest of the names and sizes of a model's files and of samples of what they hold.

    Samples begin at a file's beginning, where safetensors and GGUF say names, shapes and types.

    Args:
        path: folder with safetensors and config.json, or a GGUF file.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(path.glob(f"*{Path(SINGLE_FILE).suffix}"))
    if not path.is_file():
        digest.update((path / CONFIG).read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name if len(files) > 1 else ''}\0{size}\0".encode())
        with file.open("rb") as stream:
            for place in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                stream.seek(place)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
