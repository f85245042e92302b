"""Tasks with tools: call the right one, answer with its result, or leave the tools alone.

A question that asks for an operation or a value goes to the tool for it, if one is listed; the rest
is answered as without tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from checkpoints.tiny import arithmetic_tasks as arithmetic
from checkpoints.tiny import chat_tasks as chat
from checkpoints.tiny import list_tasks as lists
from checkpoints.tiny import tool_words as w
from checkpoints.tiny.pair import Pair, phrase
from checkpoints.tiny.tool_text import Tool, call_text, result_text, system_text
from checkpoints.tiny.words import WORDS


@dataclass(frozen=True, slots=True)
class _Ask:
    """A question, the call that it needs, what names it apart from the wording, and a result."""

    task: str
    question: str
    call: str
    key: str
    result: str


@dataclass(frozen=True, slots=True)
class _Known:
    """A tool and how a question for it is drawn."""

    tool: Tool
    ask: Callable[[Random], _Ask]


def _number(rng: Random) -> str:
    """Mostly two to four digits, now and then more, or a decimal fraction."""
    digits = rng.choices((1, 2, 3, 4, 5, 6, 7), (4, 8, 8, 8, 4, 2, 1))[0]
    text = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
    return f"{text}.{rng.randint(1, 99)}" if rng.random() < 0.06 else text


def _calculated(rng: Random, expression: str) -> str:
    """The value of ``a op b``; now and then another number, for what a tool says counts."""
    a, sign, b = expression.split()
    if rng.random() < 0.3:
        return _number(rng)
    x, y = float(a), float(b)
    value = x + y if sign == "+" else x - y if sign == "-" else x * y if sign == "*" else x / y
    return f"{value:.0f}" if value == int(value) and "." not in a + b else f"{value:.10g}"


def _operands(rng: Random, sign: str) -> tuple[str, str, str, str]:
    """Two numbers, the question, and the expression that names it."""
    a, b = _number(rng), _number(rng)
    question = phrase(rng, w.OPERATIONS[sign].forms).format(a=a, b=b)
    return a, b, question, f"{a} {sign} {b}"


@dataclass(frozen=True, slots=True)
class _Scene:
    """The listed tools, those that the question is for, and the system turn."""

    known: list[_Known]
    wanted: list[_Known]
    listing: str


def _name(rng: Random, names: Sequence[str]) -> str:
    """A name of the list, or in one case of two any other, so that names are copied."""
    if rng.random() < 0.5:
        return rng.choice(names)
    parts = [rng.choice((*WORDS, *w.SYLLABLES)) for _ in range(rng.choice((1, 2, 2, 3)))]
    return rng.choice(("_", "_", "")).join(parts)


def _described(rng: Random, name: str, names: Sequence[str], texts: Sequence[str]) -> str:
    """A description; a tool whose name says nothing has one."""
    return rng.choice(texts if name in names else [text for text in texts if text])


def _calculator(rng: Random) -> _Known:
    """A tool that takes an expression."""
    parameter = rng.choice(w.EXPRESSION_NAMES)
    tool = Tool(rng.choice(w.CALCULATORS), ((parameter, "string"),), rng.choice(w.CALCULATOR_TEXTS))

    def ask(rng: Random) -> _Ask:
        if rng.random() < 0.2:
            expression = _long_expression(rng)
            forms = ("What is {}?", "{}", "Calculate {}", "How much is {}?", "Evaluate {}.")
            question, result = phrase(rng, forms).format(expression), _number(rng)
        else:
            _, _, question, expression = _operands(rng, rng.choice("++--***/"))
            result = _calculated(rng, expression)
        call = call_text(tool.name, {parameter: expression})
        return _Ask("tool_call", question, call, f"calculator,{expression}", result)

    return _Known(tool, ask)


def _long_expression(rng: Random) -> str:
    """Three or four numbers, perhaps two of them in brackets."""
    terms = [str(rng.randint(1, 999)) for _ in range(rng.choice((3, 3, 4)))]
    if rng.random() < 0.3:
        terms[0], terms[1] = f"({terms[0]}", f"{rng.choice('+-')} {terms[1]})"
        first = " ".join(terms[:2])
        return " ".join([first, *(f"{rng.choice('+-*/')} {term}" for term in terms[2:])])
    return " ".join([terms[0], *(f"{rng.choice('+-*/')} {term}" for term in terms[1:])])


def _operation(rng: Random, sign: str) -> _Known:
    """A tool that takes two numbers."""
    names = w.OPERATIONS[sign]
    name = _name(rng, names.names)
    first, second = rng.choice((*w.PARAMETER_PAIRS, tuple(rng.sample(WORDS, 2))))
    kind = rng.choice(("number", "number", "integer"))
    told = _described(rng, name, names.names, names.descriptions)
    tool = Tool(name, ((first, kind), (second, kind)), told)

    def ask(rng: Random) -> _Ask:
        a, b, question, expression = _operands(rng, sign)
        call = call_text(tool.name, {first: _value(a), second: _value(b)})
        result = _calculated(rng, expression)
        return _Ask("tool_call", question, call, f"operation,{expression}", result)

    return _Known(tool, ask)


def _value(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _lookup(rng: Random, kind: str, word: Callable[[Random], str] | None = None) -> _Known:
    """A tool that takes a value; ``word`` draws another value than those of the kind."""
    names = w.LOOKUPS[kind]
    name, parameter = _name(rng, names.names), _name(rng, names.parameters)
    extra: tuple[tuple[str, str], ...] = ()
    if rng.random() < 0.1:
        extra = (rng.choice((("unit", "string?"), ("limit", "integer?"), ("lang", "string?"))),)
    told = _described(rng, name, names.names, names.descriptions)
    tool = Tool(name, ((parameter, "string"), *extra), told)

    def ask(rng: Random) -> _Ask:
        value = word(rng) if word else rng.choice(names.values)
        shown = f'"{value}"' if rng.random() < 0.08 else value
        result = rng.choice(names.results)
        while "{w}" in result:
            result = result.replace("{w}", rng.choice(WORDS), 1)
        while "{n}" in result:
            result = result.replace("{n}", str(rng.randint(1, rng.choice((30, 99, 9999)))), 1)
        return _Ask(
            "tool_new_word" if word else "tool_lookup",
            phrase(rng, names.forms).format(shown),
            call_text(tool.name, {parameter: value}),
            f"{kind},{value}",
            result.replace("{{", "{").replace("}}", "}"),
        )

    return _Known(tool, ask)


def unseen_word(rng: Random) -> str:
    """A word that no list has, or two words of the list."""
    if rng.random() < 0.25:
        return " ".join(rng.sample(WORDS, 2))
    word = "".join(rng.choice(w.SYLLABLES) for _ in range(rng.choice((2, 2, 3, 3, 4))))
    return word.capitalize() if rng.random() < 0.6 else word


def _lookups(rng: Random, count: int, but: str = "") -> list[_Known]:
    kinds = [kind for kind in w.LOOKUPS if kind != but]
    return [_lookup(rng, kind) for kind in rng.sample(kinds, count)]


def _more(rng: Random) -> int:
    return rng.choices((0, 1, 2), (7, 2, 1))[0]


def _scene(rng: Random, known: list[_Known], wanted: list[_Known]) -> _Scene:
    """At most three tools, in any order, none with the name of another."""
    kept = list({one.tool.name: one for one in reversed(known[:3])}.values())
    rng.shuffle(kept)
    system = _instructions(rng) if rng.random() < 0.3 else ""
    listing = system_text([one.tool for one in kept], system)
    return _Scene(kept, [one for one in wanted if one in kept], listing)


def _instructions(rng: Random) -> str:
    """One or two prompts, perhaps behind something that has nothing to do with tools."""
    parts = rng.sample(w.AGENT_PROMPTS, rng.choice((1, 1, 2)))
    if rng.random() < 0.25:
        first, second = rng.sample(WORDS, 2)
        parts.insert(0, rng.choice(w.OTHER_PROMPTS).format(first, second))
    return " ".join(parts)


def _sum_scene(rng: Random) -> _Scene:
    """A calculator, or tools of one to three operations, and perhaps others."""
    if rng.random() < 0.45:
        sums = [_calculator(rng)]
    else:
        sums = [
            _operation(rng, sign) for sign in rng.sample("+-*/", rng.choice((1, 1, 1, 2, 2, 3)))
        ]
    return _scene(rng, sums + _lookups(rng, _more(rng)), sums)


def _lookup_scene(rng: Random) -> _Scene:
    """Tools that look something up, and perhaps a calculator."""
    first, *others = _lookups(rng, 1 + _more(rng))
    sums = [_calculator(rng)] if rng.random() < 0.15 else []
    return _scene(rng, [first, *sums, *others], [first])


def _new_word_scene(rng: Random) -> _Scene:
    """A tool whose value is in no list of words."""
    kind = rng.choice(("entry", "entry", "definition", "translation", "price", "weather"))
    known = _lookup(rng, kind, unseen_word)
    return _scene(rng, [known, *_lookups(rng, _more(rng), kind)], [known])


def _called(rng: Random, scene: _Scene) -> Pair:
    """A question for one of the wanted tools, now and then after another question and answer."""
    before: tuple[Pair, ...] = ()
    if rng.random() < 0.12:
        before = _answered(rng.choice(scene.known).ask(rng))
    return replace(_asked(rng.choice(scene.wanted).ask(rng)), system=scene.listing, before=before)


def _asked(ask: _Ask) -> Pair:
    return Pair(ask.task, ask.question, ask.call, ask.key)


def _answered(ask: _Ask) -> tuple[Pair, Pair]:
    """A question with its call, and the result with the answer."""
    end = "" if ask.result.endswith(".") else "."
    answer, key = f"The result is {ask.result}{end}", f"{ask.key.split(',')[0]},{ask.result}"
    return _asked(ask), Pair("tool_answer", result_text(ask.result), answer, key)


def tool_call(rng: Random) -> Pair:
    """A sum that a calculator or a tool for the operation gets."""
    return _called(rng, _sum_scene(rng))


def tool_lookup(rng: Random) -> Pair:
    """A question for a value that one of the tools looks up."""
    return _called(rng, _lookup_scene(rng))


def tool_new_word(rng: Random) -> Pair:
    """The same with a word that is in no list: it is spelt as it stands in the question."""
    return _called(rng, _new_word_scene(rng))


def tool_answer(rng: Random) -> Pair:
    """The result of a call, and the sentence that tells it."""
    scene = rng.choice((_sum_scene, _sum_scene, _lookup_scene, _new_word_scene))(rng)
    asked, reply = _answered(rng.choice(scene.wanted).ask(rng))
    before: tuple[Pair, ...] = (asked,)
    if rng.random() < 0.2:
        before = (*_answered(rng.choice(scene.known).ask(rng)), asked)
    return replace(reply, system=scene.listing, before=before)


def tool_list(rng: Random) -> Pair:
    """Which tools there are, in the words of the list."""
    scene = rng.choice((_sum_scene, _lookup_scene))(rng)
    listing = scene.listing.partition("Tools:\n")[2]
    prompt = phrase(rng, w.LIST_FORMS)
    return Pair("tool_list", prompt, listing, listing, scene.listing)


_OWN: tuple[Callable[[Random], Pair], ...] = (
    lists.sort_numbers,
    lists.sort_words,
    lists.reverse_list,
    lists.reverse_letters,
    lists.count_items,
    lists.count_letters,
    lists.extreme,
    arithmetic.convert_units,
    arithmetic.compare,
    arithmetic.next_number,
    arithmetic.word_problem,
    chat.chat,
    chat.chat,
    chat.chat,
)
_SUMS: tuple[Callable[[Random], Pair], ...] = (
    arithmetic.addition,
    arithmetic.addition_3_digits,
    arithmetic.subtraction,
)


def tool_unused(rng: Random) -> Pair:
    """A question of another task, which none of the listed tools is for."""
    if rng.random() < 0.3:
        scene, tasks = _scene(rng, _lookups(rng, 1 + _more(rng), "entry"), []), _SUMS
    else:
        scene, tasks = rng.choice((_sum_scene, _lookup_scene))(rng), _OWN
    own = rng.choice(tasks)(rng)
    before: tuple[Pair, ...] = ()
    if rng.random() < 0.12:
        before = _answered(rng.choice(scene.known).ask(rng))
    key = f"{own.task}|{own.key}"
    return Pair("tool_unused", own.prompt, own.answer, key, scene.listing, before)
