"""Twenty pictures composed by hand, which nothing of the training's drawing has made.

``python -m checkpoints.pictures.by_hand`` prints how many questions about them the bundled model
answers right, by group. They are drawn by Pillow at three times their size, made smaller with
Lanczos's filter and kept as JPEG, in plain paints, some on other grounds and in other proportions.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoProcessor

from checkpoints.pictures.export import load_model

PAINTS = {"green": "forestgreen", "yellow": "gold", "purple": "rebeccapurple"}
_FINE, _QUALITY = 3, 75


class Drawn(NamedTuple):
    """A picture and what is asked of it.

    Attributes:
        group: what sets it apart from the training's pictures.
        size: width and height in pixels.
        ground: a colour, or two of a gradient from the top to the bottom.
        things: shape, colour, centre and radius in hundredths of the width and height.
        asked: questions, each with its right answer behind "? ".
        outline: whether things have a black line around them.
    """

    group: str
    size: tuple[int, int]
    ground: tuple[str, ...]
    things: str
    asked: str
    outline: bool = False


# Groups; of each picture size, kind and ground, then its things, then what is asked.
_COMPOSED = """
# light or dark ground, square
300x300 plain white
    circle red 25 25 12, circle red 75 30 12, circle red 50 75 12
    How many red circles? 3; How many things are there? 3
300x300 plain white
    circle red 25 30 12, circle red 70 70 12, square blue 72 25 12
    How many red circles? 2; What colour is the square? blue
300x300 plain whitesmoke
    star yellow 30 30 14, triangle green 70 68 14
    How many stars? 1; Where is the triangle? bottom right
300x300 plain black
    square orange 28 72 12, circle blue 70 28 12
    What is in the top right? blue circle; What shape is orange? square
300x300 plain white
    7 purple 50 50 17
    What digit is it? 7; How many things are there? 1
300x300 plain white
    triangle red 25 25 13, triangle red 75 25 13, triangle green 25 75 13, triangle green 75 75 13
    How many green triangles? 2; How many triangles? 4
300x300 plain whitesmoke
    star purple 50 30 14, square purple 50 75 12
    How many purple circles? 0; What is below the star? purple square
300x300 plain black
    circle yellow 22 50 12, circle yellow 50 50 12, circle yellow 78 50 12
    How many yellow circles? 3; Is there a red circle? no
# 4:3, 5:7
640x480 plain white
    circle red 25 25 12, circle red 75 30 12, circle red 50 75 12
    How many red circles? 3; How many things are there? 3
640x480 plain white
    square blue 25 50 12, square blue 75 50 12
    How many blue squares? 2; What shape is blue? square
300x420 plain whitesmoke
    star orange 30 25 13, circle green 70 75 13
    Where is the star? top left; What colour is the circle? green
300x420 plain white
    triangle yellow 50 28 14, 3 blue 50 72 16
    What digit is it? 3; What colour is the triangle? yellow
640x480 plain black
    circle orange 20 25 11, square orange 50 70 11, star orange 80 25 13
    How many orange things? 3; How many stars? 1
300x420 plain white
    circle blue 30 20 12, circle blue 70 45 12, circle red 35 75 12
    How many blue circles? 2; Is there a red circle? yes
# coloured ground, outlines
300x300 plain lightblue
    circle red 30 30 12, circle red 70 70 12
    How many red circles? 2; What colour is the circle? red
300x300 plain wheat
    square green 30 70 12, triangle blue 70 30 14
    Where is the square? bottom left; What shape is blue? triangle
300x300 plain white gray
    star red 50 50 16
    What colour is the star? red; How many things are there? 1
300x300 plain gray
    circle yellow 30 50 13, square purple 70 50 12
    How many circles? 1; What colour is the square? purple
300x300 outlined white
    circle red 25 30 12, circle red 70 65 12, square red 72 22 11
    How many red circles? 2; How many squares? 1
300x300 outlined honeydew lightpink
    triangle orange 30 30 14, triangle orange 70 70 14, circle blue 72 25 11
    How many orange triangles? 2; Is there a blue circle? yes
"""


def composed() -> list[Drawn]:
    """All of them."""
    made, group = list[Drawn](), ""
    lines = iter(_COMPOSED.strip().splitlines())
    for line in lines:
        if line.startswith("# "):
            group = line.removeprefix("# ")
            continue
        size, kind, *ground = line.split()
        width, height = map(int, size.split("x"))
        told = next(lines).strip(), next(lines).strip()
        made.append(Drawn(group, (width, height), (*ground,), *told, kind == "outlined"))
    return made


def draw(picture: Drawn) -> Image.Image:
    """The picture as its JPEG has it."""
    width, height = (_FINE * side for side in picture.size)
    image = Image.new("RGB", (width, height), picture.ground[0])
    if len(picture.ground) > 1:
        mask = Image.linear_gradient("L").resize((width, height))
        image.paste(Image.new("RGB", (width, height), picture.ground[1]), mask=mask)
    pen = ImageDraw.Draw(image)
    line: dict[str, Any] = {"outline": "black", "width": 2 * _FINE} if picture.outline else {}
    for thing in picture.things.split(", "):
        shape, colour, *numbers = thing.split()
        across, down, radius = (int(number) / 100 for number in numbers)
        x, y, size = across * width, down * height, radius * min(width, height)
        fill = PAINTS.get(colour, colour)
        if shape.isdigit():
            pen.text((x, y), shape, fill, ImageFont.load_default(2 * size), anchor="mm")
        elif shape == "circle":
            pen.circle((x, y), size, fill, **line)
        elif shape == "star":
            turns = [(math.pi * (i / 5 - 0.5), size * (0.45 if i % 2 else 1)) for i in range(10)]
            corners = [(x + far * math.cos(turn), y + far * math.sin(turn)) for turn, far in turns]
            pen.polygon(corners, fill, **line)
        else:
            sides = {"square": 4, "triangle": 3}[shape]
            pen.regular_polygon((x, y, size * 1.1), sides, 0, fill, line.get("outline"))
    file = io.BytesIO()
    image.resize(picture.size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=_QUALITY)
    return Image.open(file).convert("RGB")


def asked() -> Iterator[tuple[int, str, Image.Image, str, str]]:
    """Number, group and image of each picture, with each of its questions and its answer."""
    for number, picture in enumerate(composed(), start=1):
        image = draw(picture)
        for pair in picture.asked.split("; "):
            question, _, answer = pair.partition("? ")
            yield number, picture.group, image, question + "?", answer


def main() -> None:
    """Print a table, and what is answered wrong."""
    folder = Path(__file__).parent
    processor, model = AutoProcessor.from_pretrained(folder, backend="pil"), load_model(folder)
    right, wrong = dict[str, list[bool]](), []
    for number, group, image, question, answer in asked():
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        given = processor(text=text, images=[image], add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(**given, max_new_tokens=8, do_sample=False)
        rest = made[0, given["input_ids"].shape[1] :]
        said = processor.decode(rest, skip_special_tokens=True)
        for name in (group, "all"):
            right.setdefault(name, []).append(said == answer)
        if said != answer:
            wrong.append(f"{number}. {question} -> {said}, where {answer} is right")
    print("| pictures | questions | right |\n|---|---:|---:|")
    order = sorted(right, key=lambda name: name == "all")
    print("\n".join(f"| {name} | {len(right[name])} | {sum(right[name])} |" for name in order))
    print("\nWrong:\n\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
