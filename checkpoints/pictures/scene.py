"""Pictures of a few things: what there is to see, and how it is drawn."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle", "star")
DIGITS = tuple("0123456789")
# between these two paints lies what has the name
COLOURS = {
    "red": ((190, 30, 40), (255, 0, 0)),
    "green": ((30, 130, 60), (0, 255, 0)),
    "blue": ((60, 90, 220), (0, 0, 255)),
    "yellow": ((235, 205, 60), (255, 255, 0)),
    "purple": ((150, 70, 190), (128, 0, 128)),
    "orange": ((245, 150, 60), (255, 140, 0)),
}
MOST = 5  # things in a picture
_COUNTS = (2, 3, 4, 4, 4)  # how often a picture has 1, 2, ... things
_RADII = (0.10, 0.15)
_DIGIT_RADII = (0.13, 0.17)
_APART = 1.08  # centres, in sums of two radii
_FINE = 4  # a mask is drawn so many times larger
_NOISE = 4.0  # standard deviation of a pixel's value
# corners of shapes on a circle around the centre: angles in degrees with shares of the radius
_CORNERS = {
    "square": [(angle, 1.1) for angle in (45, 135, 225, 315)],
    "triangle": [(angle, 1.0) for angle in (-90, 30, 150)],
    "star": [(36 * i - 90, 0.42 if i % 2 else 1.0) for i in range(10)],
}

Paint = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Thing:
    """One thing of a picture; lengths are shares of its side, from the top left corner.

    Attributes:
        shape: one of `SHAPES` or `DIGITS`.
        colour: one of `COLOURS`.
        x, y: the centre.
        radius: half the side of the box that it fills.
        turn: in degrees, against the clock.
        paint: red, green and blue, 0 to 255.
    """

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    turn: int
    paint: Paint

    @property
    def is_digit(self) -> bool:
        """Whether it is a digit."""
        return self.shape in DIGITS


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows; `grain` is the seed of its noise."""

    things: tuple[Thing, ...]
    background: Paint
    grain: int


def random_scene(rng: Random) -> Scene:
    """One to `MOST` things that do not overlap; two pictures in five have a digit."""
    count = rng.choices(range(1, MOST + 1), _COUNTS)[0]
    shapes, colours = [*SHAPES], [*COLOURS]
    if rng.random() < 0.5:  # few kinds, so that there is something to count
        shapes, colours = rng.sample(shapes, 2), rng.sample(colours, 2)
    kinds = [(rng.choice(shapes), rng.choice(colours)) for _ in range(count)]
    if rng.random() < 0.4:
        kinds[0] = (rng.choice(DIGITS), kinds[0][1])
    radii = [rng.uniform(*(_DIGIT_RADII if shape in DIGITS else _RADII)) for shape, _ in kinds]
    while (centres := _centres(rng, radii)) is None:
        pass
    things = tuple(
        Thing(shape, colour, *centre, radius, 3 * rng.randint(-4, 4), _paint(rng, colour))
        for (shape, colour), radius, centre in zip(kinds, radii, centres)
    )
    grey = rng.uniform(190, 255) if rng.random() < 0.75 else rng.uniform(0, 50)
    red, green, blue = (round(min(255.0, max(0.0, grey + rng.gauss(0, 6)))) for _ in range(3))
    return Scene(things, (red, green, blue), rng.getrandbits(32))


def _centres(rng: Random, radii: Sequence[float]) -> list[tuple[float, float]] | None:
    """Places for boxes of these radii, or None: there was no room left."""
    found: list[tuple[float, float]] = []
    for radius in radii:
        for _ in range(20):
            x, y = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
            placed = zip(found, radii)
            if all(math.dist((x, y), at) > _APART * (radius + other) for at, other in placed):
                found.append((x, y))
                break
        else:
            return None
    return found


def _paint(rng: Random, colour: str) -> Paint:
    share = rng.random()
    red, green, blue = (
        round(min(255.0, max(0.0, one + share * (other - one) + rng.uniform(-12, 12))))
        for one, other in zip(*COLOURS[colour])
    )
    return red, green, blue


def draw(scene: Scene, side: int) -> np.ndarray:
    """The picture, uint8[side, side, 3]."""
    canvas = np.empty((side, side, 3), np.float32)
    canvas[:] = scene.background
    for thing in scene.things:
        size = round(2 * thing.radius * side)
        top, left = (
            min(max(round(centre * side - size / 2), 0), side - size)
            for centre in (thing.y, thing.x)
        )
        part = canvas[top : top + size, left : left + size]
        covered = mask(thing.shape, size, thing.turn)[..., None]
        part += covered * (np.array(thing.paint, np.float32) - part)
    noise = np.random.default_rng(scene.grain).standard_normal(canvas.shape, np.float32)
    return (canvas + _NOISE * noise).clip(0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=4096)
def mask(shape: str, size: int, turn: int) -> np.ndarray:
    """How much of each pixel of its box a shape covers: float32[size, size], 0 to 1."""
    wide = _FINE * size
    image = Image.new("L", (wide, wide))
    pen = ImageDraw.Draw(image)
    middle = wide / 2
    if shape in DIGITS:
        font, stroke = ImageFont.load_default(1.15 * wide), wide // 40
        left, top, right, bottom = font.getbbox(shape, stroke_width=stroke)
        corner = (middle - (left + right) / 2, middle - (top + bottom) / 2)
        pen.text(corner, shape, 255, font, stroke_width=stroke)
    elif shape == "circle":
        pen.ellipse((0, 0, wide - 1, wide - 1), 255)
    else:
        corners = [
            (middle + middle * share * math.cos(angle), middle + middle * share * math.sin(angle))
            for angle, share in ((math.radians(a), s) for a, s in _CORNERS[shape])
        ]
        pen.polygon(corners, 255)
    turned = image.rotate(turn, Image.Resampling.BILINEAR)
    made = np.asarray(turned.resize((size, size), Image.Resampling.BOX), np.float32)
    return made / 255
