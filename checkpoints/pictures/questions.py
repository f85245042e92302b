"""Questions about a picture, each with its only right answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from checkpoints.pictures.scene import COLOURS, DIGITS, SHAPES, Scene, Thing, random_scene
from checkpoints.tiny.pair import phrase

PLACES = ("top left", "top right", "bottom left", "bottom right")
# what a question asks for, and the axis and the sign along it
DIRECTIONS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
NOTHING = "nothing"
_CLEAR = 0.05  # of a middle line, in sides of the picture: what is nearer is in no quarter
_BESIDE = 0.08  # between two centres along an axis: what is nearer is on neither side
_TRIES = 60


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a kind in `KINDS`, and its answer."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Noun:
    """What a question speaks of: `shape` is a thing's, or "digit" or "thing"; no colour is any."""

    shape: str
    colour: str = ""

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}".strip()

    @property
    def plural(self) -> str:
        """For more than one."""
        return f"{self}s"

    @property
    def with_article(self) -> str:
        """For any one."""
        return f"{'an' if str(self)[0] in 'aeiou' else 'a'} {self}"

    def of(self, scene: Scene) -> list[Thing]:
        """The things that it names."""
        return [thing for thing in scene.things if self._names(thing)]

    def _names(self, thing: Thing) -> bool:
        is_shape = self.shape in ("thing", thing.shape)
        is_shape = is_shape or (self.shape == "digit" and thing.is_digit)
        return is_shape and self.colour in ("", thing.colour)


def said(thing: Thing) -> str:
    """A thing as answers name it."""
    return f"{thing.colour} {thing.shape}"


def _count(scene: Scene, rng: Random) -> Question:
    thing = rng.choice(scene.things)
    colour, shape = thing.colour, "digit" if thing.is_digit else thing.shape
    if rng.random() < 0.25:
        colour = rng.choice([*COLOURS])
    elif rng.random() < 0.15:
        shape = rng.choice(SHAPES)
    nouns = (Noun(shape, colour), Noun(shape), Noun("thing", colour), Noun("thing"))
    noun = rng.choices(nouns, (6, 3, 2, 1))[0]
    forms = ("How many {}?", "How many {}?", "How many {} are there?", "Count the {}.")
    return Question("count", phrase(rng, forms).format(noun.plural), str(len(noun.of(scene))))


def _colour(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.things)
    noun = Noun("digit" if thing.is_digit and rng.random() < 0.5 else thing.shape)
    if len(noun.of(scene)) != 1:
        return None
    forms = ("What colour is the {}?", "What color is the {}?", "Which colour is the {}?")
    return Question("colour", phrase(rng, forms).format(noun), thing.colour)


def _shape(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.things)
    if thing.is_digit or len(Noun("thing", thing.colour).of(scene)) != 1:
        return None
    forms = ("What shape is {}?", "Which shape is {}?", "What shape is the {} thing?")
    return Question("shape", phrase(rng, forms).format(thing.colour), thing.shape)


def _unique(scene: Scene, rng: Random, thing: Thing) -> Noun | None:
    """A noun that names this thing alone, if there is one."""
    nouns = [Noun(thing.shape, thing.colour), Noun(thing.shape), Noun("thing", thing.colour)]
    if rng.random() < 0.5:
        nouns = nouns[1:] + nouns[:1]
    return next((noun for noun in nouns if len(noun.of(scene)) == 1), None)


def _quarter(thing: Thing) -> str | None:
    """Where a thing is, if it is clear of the middle lines."""
    if min(abs(thing.x - 0.5), abs(thing.y - 0.5)) < _CLEAR:
        return None
    return f"{'top' if thing.y < 0.5 else 'bottom'} {'left' if thing.x < 0.5 else 'right'}"


def _where(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.things)
    noun, place = _unique(scene, rng, thing), _quarter(thing)
    if noun is None or place is None:
        return None
    return Question("where", phrase(rng, ("Where is the {}?",)).format(noun), place)


def _place(scene: Scene, rng: Random) -> Question | None:
    place = rng.choice(PLACES)
    if any(_quarter(thing) is None for thing in scene.things):
        return None
    found = [thing for thing in scene.things if _quarter(thing) == place]
    if len(found) > 1 or (not found and rng.random() < 0.7):
        return None
    asked: list[tuple[tuple[str, ...], str]] = []
    what = ("What is in the {}?", "What is at the {}?")
    if not found:
        asked.append((what, NOTHING))
    for thing in found:
        colours = ("What colour is the thing in the {}?", "What colour is in the {}?")
        asked += [(what, said(thing)), (colours, thing.colour)]
        if not thing.is_digit:
            shapes = ("What shape is in the {}?", "Which shape is in the {}?")
            asked.append((shapes, thing.shape))
    forms, answer = rng.choice(asked)
    return Question("place", phrase(rng, forms).format(place), answer)


def _side(thing: Thing, other: Thing, direction: str) -> bool | None:
    """Whether a thing is on that side of another; None: it is neither there nor opposite."""
    axis, sign = DIRECTIONS[direction]
    far = sign * (thing.x - other.x, thing.y - other.y)[axis]
    return None if abs(far) < _BESIDE else far > 0


def _beside(scene: Scene, rng: Random) -> Question | None:
    thing, direction = rng.choice(scene.things), rng.choice([*DIRECTIONS])
    noun = _unique(scene, rng, thing)
    others = [other for other in scene.things if other is not thing]
    sides = [_side(other, thing, direction) for other in others]
    if noun is None or None in sides or sum(map(bool, sides)) > 1:
        return None
    found = [other for other, is_there in zip(others, sides) if is_there]
    if not found and rng.random() < 0.85:
        return None
    prompt = phrase(rng, ("What is {} the {}?",)).format(direction, noun)
    return Question("beside", prompt, said(found[0]) if found else NOTHING)


def _digit(scene: Scene, rng: Random) -> Question | None:
    digits = Noun("digit").of(scene)
    if len(digits) != 1:
        return None
    forms = ("Which digit is shown?", "What digit is it?", "What number is shown?")
    return Question("digit", phrase(rng, (*forms, "Which digit do you see?")), digits[0].shape)


def _yes_no(scene: Scene, rng: Random) -> Question | None:
    thing = rng.choice(scene.things)
    if len(scene.things) > 1 and rng.random() < 0.5:
        other = rng.choice([one for one in scene.things if one is not thing])
        nouns = _unique(scene, rng, thing), _unique(scene, rng, other)
        direction = rng.choice([*DIRECTIONS])
        is_true = _side(thing, other, direction)
        if None in nouns or is_true is None:
            return None
        prompt = phrase(rng, ("Is the {} {} the {}?",)).format(nouns[0], direction, nouns[1])
        return Question("yes_no", prompt, "yes" if is_true else "no")
    noun = Noun(thing.shape, thing.colour)
    if rng.random() < 0.5:  # half right: as likely there as not
        shapes = DIGITS if thing.is_digit else SHAPES
        wrong = Noun(rng.choice(shapes), thing.colour), Noun(thing.shape, rng.choice([*COLOURS]))
        noun = rng.choice(wrong)
    prompt = phrase(rng, ("Is there {}?",)).format(noun.with_article)
    return Question("yes_no", prompt, "yes" if noun.of(scene) else "no")


# how often each kind is asked, where a picture has an answer
KINDS: dict[str, tuple[Callable[[Scene, Random], Question | None], int]] = {
    "count": (_count, 4),
    "colour": (_colour, 3),
    "shape": (_shape, 2),
    "where": (_where, 4),
    "place": (_place, 4),
    "beside": (_beside, 4),
    "digit": (_digit, 4),
    "yes_no": (_yes_no, 3),
}


def questions(scene: Scene, rng: Random, count: int) -> list[Question]:
    """At most so many different questions about a picture; a few pictures have not as many."""
    makers, weights = zip(*KINDS.values())
    found: dict[str, Question] = {}
    for make in rng.choices(makers, weights, k=_TRIES):
        question = make(scene, rng)
        if question is not None:
            found.setdefault(question.prompt, question)
        if len(found) == count:
            break
    return [*found.values()]


def asked_pictures(seed: str, count: int) -> Iterator[tuple[Scene, list[Question]]]:
    """Endless random pictures with so many questions each; the seed decides them.

    No two seeds share a picture: places, sizes and paints are real numbers drawn at random.
    """
    rng = Random(seed)
    while True:
        scene = random_scene(rng)
        yield scene, questions(scene, rng, count)
