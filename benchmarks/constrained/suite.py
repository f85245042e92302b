"""The texts that schemas of the JSON-Schema-Test-Suite allow: no invalid one may pass.

Each schema takes the way of a request's. Where it compiles, every instance of its group is written
as JSON, in every order of its properties. A valid one that is refused is a limit only. With
`--walks` texts are drawn token by token from what the masks allow, and `jsonschema` judges them.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m benchmarks.constrained.suite JSON-Schema-Test-Suite/tests/draft2020-12
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.extras import require
from jaxserve.boundary.grammar_verdicts import GrammarTokens
from jaxserve.errors import ValidationError
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.grammars.matchers import mask_of, new_matcher, token_table
from jaxserve.grammars.notation import in_notation
from jaxserve.params.structured_outputs_params import StructuredOutputsParams

END = 256  # the token behind those of the bytes
MAX_ORDERS = 500  # of the properties of one instance
MAX_TOKENS = 300  # of a walk
ENDING = frozenset(b'"]}')
# Files of the suite for the exceptions of docs/structured_outputs.md: formats that are annotations
# (a file has the format's name), expressions, and content in drafts before 2019.
FORMATS = frozenset(
    ("idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template")
)
NAMED = FORMATS | {"ecmascript-regex", "content"}
COLUMNS = ("refused", "accepted", "valid that pass", "valid that do not", "invalid", "that pass")


class Passed(NamedTuple):
    """A text that should not have been allowed."""

    where: str
    text: str
    schema: dict[str, Any]


@cache
def byte_table() -> Any:
    """llguidance's tokenizer of one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # the characters that stand for bytes in this kind of vocabulary, in the order of the bytes
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return token_table(GrammarTokens(backend.to_str(), END + 1, [END]))


def compiled(**asked: Any) -> Any:
    """A matcher of a constraint; raises ValueError where it is refused."""
    text, _ = in_notation(grammar_text(StructuredOutputsParams(**asked)))
    matcher = new_matcher(byte_table(), text)
    mask_of(matcher)
    return matcher


def allows(matcher: Any, text: str) -> bool:
    """Whether the whole text is one of the grammar's."""
    followed = matcher.deep_copy()
    return all(map(followed.consume_token, text.encode())) and followed.is_accepting()


def texts_of(instance: Any) -> list[str]:
    """An instance as JSON, with properties in any order."""
    orders = itertools.islice(_orders(instance), MAX_ORDERS)
    texts = (json.dumps(one, separators=(",", ":"), ensure_ascii=False) for one in orders)
    return [*dict.fromkeys(texts)]


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for values in itertools.product(*map(_few_orders, value.values())):
            for pairs in itertools.permutations(zip(value, values)):
                yield dict(pairs)
    elif isinstance(value, list):
        yield from map(list, itertools.product(*map(_few_orders, value)))
    else:
        yield value


def _few_orders(value: Any) -> list[Any]:
    return [*itertools.islice(_orders(value), 24)]


def walk(matcher: Any, choose: random.Random) -> str | None:
    """A text that the masks allow, mostly short; None: it was cut."""
    followed, text = matcher.deep_copy(), bytearray()
    for _ in range(MAX_TOKENS):
        if followed.is_accepting() and choose.random() < 0.3:
            return text.decode()
        mask = int.from_bytes(followed.compute_bitmask(), "little")
        tokens = [token for token in range(END) if mask >> token & 1]
        if not tokens:
            return text.decode() if followed.is_accepting() else None
        ending = [token for token in tokens if token in ENDING]
        token = choose.choice(ending if ending and choose.random() < 0.3 else tokens)
        followed.consume_token(token)
        text.append(token)
    return None


def judge(group: dict[str, Any], where: str, counts: Counter[str]) -> list[Passed]:
    """Count what one group of the suite comes to; the invalid texts that pass."""
    schema = group["schema"]
    try:
        matcher = compiled(json=schema)
    except (ValidationError, ValueError):
        counts["refused"] += 1
        return []
    counts["accepted"] += 1
    passed = []
    for test in group["tests"]:
        allowed = [text for text in texts_of(test["data"]) if allows(matcher, text)]
        if test["valid"]:
            counts["valid that pass" if allowed else "valid that do not"] += 1
            continue
        counts["invalid"] += 1
        counts["that pass"] += bool(allowed)
        place = f"{where}: {group['description']}: {test['description']}"
        passed += [Passed(place, allowed[0], schema)] if allowed else []
    return passed


def walked(group: dict[str, Any], where: str, walks: int, counts: Counter[str]) -> list[Passed]:
    """Texts that a schema allows and `jsonschema` finds invalid."""
    import jsonschema  # where it is used: an extra's

    schema = group["schema"]
    try:
        matcher = compiled(json=schema)
    except (ValidationError, ValueError):
        return []
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    # with decimals, since 0.1488 is no multiple of 0.0001 among floats
    checks: Callable[[Any], bool] = kind(_exact(json.dumps(schema))).is_valid
    choose, passed = random.Random(0), []
    for _ in range(walks):
        text = walk(matcher, choose)
        counts["cut" if text is None else "drawn"] += 1
        try:
            with localcontext(prec=MAX_TOKENS):
                is_valid = text is None or checks(_exact(text))
        except re.error:  # an expression that Python cannot read
            return []
        if text is not None and not is_valid:
            passed.append(Passed(f"{where}: {group['description']}", text, schema))
    return passed


def _exact(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def is_named(passed: Passed) -> bool:
    """Whether the documentation names what lets a text pass."""
    return Path(passed.where.partition(":")[0]).stem in NAMED


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "suite", type=Path, help="a folder of the suite, such as tests/draft2020-12"
    )
    parser.add_argument("--walks", type=int, default=0, help="texts to draw of each schema")
    args = parser.parse_args(arguments)
    require(parser, "test", "jsonschema", "llguidance")
    total, drawn = Counter[str](), Counter[str]()
    passed: list[Passed] = []
    print("| file | schemas " + "".join(f"| {name} " for name in COLUMNS) + "|")
    print("|---|" + "---|" * (len(COLUMNS) + 1))
    for path in sorted(args.suite.rglob("*.json")):
        counts, where = Counter[str](), str(path.relative_to(args.suite))
        for group in json.loads(path.read_text()):
            passed += judge(group, where, counts)
            if args.walks:
                passed += walked(group, where, args.walks, drawn)
        total += counts
        print(_line(where, counts))
    print(_line("all", total))
    if args.walks:
        print(f"{drawn['drawn']} texts drawn, {drawn['cut']} more cut at {MAX_TOKENS} bytes")
    unnamed = [one for one in passed if not is_named(one)]
    print(f"invalid texts that pass: {len(passed)}, of which the documentation names all but:")
    for one in unnamed:
        print(f"  {one.where}: {one.text[:200]}  {json.dumps(one.schema)[:300]}")
    return 1 if unnamed or not total["accepted"] else 0


def _line(name: str, counts: Counter[str]) -> str:
    schemas = counts["refused"] + counts["accepted"]
    return f"| {name} | {schemas} " + "".join(f"| {counts[column]} " for column in COLUMNS) + "|"


if __name__ == "__main__":
    sys.exit(main())
