"""Images of requests are opened within bounds."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import time
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.boundary.image_facts import ImageFacts, Pixels
from jaxserve.client.images import MAX_PIXELS, as_image, least_places, opened, placed
from jaxserve.errors import ValidationError


def encoded(image: Image.Image, kind: str, **how: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with nothing behind it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


SMALL = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind: str) -> None:
    found = opened(encoded(SMALL, kind))
    assert found.mode == "RGB" and found.size == (4, 4)


@pytest.mark.parametrize(
    ("mode", "kind", "colour", "wanted"),
    [
        ("L", "PNG", 200, (200, 200, 200)),
        ("1", "PNG", 1, (255, 255, 255)),
        ("P", "GIF", 5, None),
        ("LA", "PNG", (9, 0), (9, 9, 9)),
        ("RGBA", "WEBP", (250, 0, 0, 255), None),
        ("CMYK", "JPEG", (0, 255, 255, 0), (255, 0, 0)),
        ("I;16", "PNG", 0x8123, (0x81, 0x81, 0x81)),
    ],
)
def test_modes(mode: str, kind: str, colour: Any, wanted: tuple[int, ...] | None) -> None:
    image = Image.new(mode, (8, 8), colour)
    found = opened(encoded(image, kind))
    assert found.mode == "RGB"
    wanted = wanted or image.convert("RGB").getpixel((0, 0))
    assert np.abs(np.subtract(found.getpixel((0, 0)), wanted)).max() <= 4
    assert as_image(image).getpixel((0, 0)) == pytest.approx(wanted, abs=4)


def test_what_a_camera_held_sideways_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert opened(encoded(SMALL.resize((8, 4)), "JPEG", exif=exif)).size == (4, 8)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "whole image"),
        (b"GIF89a", "whole image"),
        (b"%PDF-1.4", "whole image"),
        (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "whole image"),
        (encoded(SMALL, "PNG")[:-30], "whole image"),
        (encoded(SMALL, "JPEG")[:-200], "whole image"),
        (encoded(SMALL, "TIFF"), "whole image"),
        (encoded(SMALL, "GIF", save_all=True, append_images=[SMALL.rotate(90)]), "no animations"),
        (bomb(60_000, 60_000), f"too many pixels.*{MAX_PIXELS}"),
        (bomb(8000, 8000), f"8000 x 8000 pixels.*{MAX_PIXELS}"),
        (bomb(1, 100_000), "1 x 100000 pixels.*factor"),
        (bomb(3000, 3000), "whole image"),
    ],
)
def test_what_is_refused_in_little_time(data: bytes, told: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ValidationError, match=f"(?s)multi_modal_data.image=.*{told}"):
        opened(data)
    assert time.monotonic() - begin < 1.0


def test_arrays() -> None:
    assert as_image(np.zeros((3, 5), np.uint8)).size == (5, 3)
    assert as_image(Image.new("RGBA", (5, 3))).mode == "RGB"
    for wrong in (np.zeros((3, 5, 4), np.uint8), np.zeros((3, 5)), [[1]], b"abc", "a.png"):
        with pytest.raises(ValidationError, match="PIL image"):
            as_image(wrong)


def test_places() -> None:
    facts = ImageFacts(9, (3, 4, 4), 5)
    one, other = np.zeros((3, 4, 4), np.float32), np.ones((3, 4, 4), np.float32)
    made, pairs = placed([1, 9, 2, 9], facts, [Pixels(one), Pixels(other)])
    assert made == [1, *[9] * 5, 2, *[9] * 5]
    assert [start for start, _ in pairs] == [1, 7] and pairs[1][1].array is other
    with pytest.raises(ValidationError, match=r"1 images.*: 2"):
        placed([9, 9], facts, [Pixels(one)])
    own = ImageFacts(9, (0, 0, 4, 6), 1, row_axes=3)
    made, pairs = placed(
        [9, 1, 9], own, [Pixels(np.zeros((2, 3, 4, 6))), Pixels(np.zeros((1, 1, 4, 6)))]
    )
    assert (made, [start for start, _ in pairs]) == ([*[9] * 6, 1, 9], [0, 7])
    assert (own.row, own.rows_per_cell, least_places(own)) == ((6,), 4, 1)


@pytest.mark.slow
def test_no_torch_is_needed(tmp_path: object) -> None:
    from tests.tiny_models import save_image_processor

    save_image_processor(tmp_path, 28)
    code = f"""
import sys
sys.modules["torch"] = None  # as where it is not installed
import numpy as np
from PIL import Image
from jaxserve.client.images import image_processor
made = image_processor({str(tmp_path)!r})
pixels = made(images=Image.new("RGB", (40, 30)), return_tensors="np")["pixel_values"]
print(type(made).__name__, pixels.shape, pixels.dtype, sys.modules["torch"], "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = "CLIPImageProcessorPil (1, 3, 28, 28) float32 None False"
    assert done.stdout.strip() == told, done.stderr
