"""Names, wordings and values of the tasks with tools."""

# ruff: noqa: SIM905
# Word lists are easier to read and to change as text than as list literals.

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.tiny.words import NAMES, WORDS

CITIES = (
    "Amsterdam,Athens,Auckland,Baghdad,Bangkok,Barcelona,Beijing,Belgrade,Berlin,Bogota,Boston,"
    "Brussels,Budapest,Cairo,Calgary,Chicago,Copenhagen,Dakar,Dallas,Delhi,Denver,Dubai,Dublin,"
    "Geneva,Hamburg,Hanoi,Havana,Helsinki,Houston,Istanbul,Jakarta,Karachi,Kyoto,Lagos,Lima,"
    "Lisbon,London,Lyon,Madrid,Manila,Melbourne,Miami,Milan,Montreal,Moscow,Mumbai,Munich,"
    "Nairobi,Naples,Osaka,Oslo,Ottawa,Paris,Prague,Quito,Rio,Riga,Rome,Santiago,Seattle,Seoul,"
    "Shanghai,Singapore,Sofia,Stockholm,Sydney,Taipei,Tallinn,Tehran,Tokyo,Toronto,Tunis,Turin,"
    "Vancouver,Venice,Vienna,Vilnius,Warsaw,Washington,Zagreb,Zurich,New York,San Francisco,"
    "Los Angeles,Hong Kong,Cape Town,Mexico City,Buenos Aires,Tel Aviv,Las Vegas"
).split(",")
COUNTRIES = (
    "Argentina,Australia,Austria,Belgium,Brazil,Canada,Chile,China,Colombia,Croatia,Cuba,Denmark,"
    "Egypt,England,Estonia,Ethiopia,Finland,France,Germany,Ghana,Greece,Hungary,Iceland,India,"
    "Indonesia,Iran,Iraq,Ireland,Israel,Italy,Japan,Kenya,Korea,Latvia,Malta,Mexico,Morocco,Nepal,"
    "Nigeria,Norway,Pakistan,Peru,Poland,Portugal,Romania,Russia,Scotland,Serbia,Spain,Sudan,"
    "Sweden,Switzerland,Syria,Thailand,Tunisia,Turkey,Ukraine,Uruguay,Vietnam,Zambia"
).split(",")

AGENT_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful agent. Use the tools.",
    "You do maths. Use the tools.",
    "Use the calculator for sums.",
    "You are a helpful assistant with access to tools.",
    "Answer briefly.",
    "You are an agent. Always use the tools, then answer.",
    "You help with questions.",
    "Be concise.",
    "Call a tool if you need one.",
    "You are a calculator agent.",
    "You answer questions about the weather.",
    "You are jaxserve's demo model.",
)

OTHER_PROMPTS = (
    "You know about the {} and the {}.",
    "You are a {} that likes every {}.",
    "Talk like a {} in a {}.",
    "Users ask about their {} and {}.",
    "Be kind to the {} and the {}.",
)

LIST_FORMS = (
    "Which tools do you have?",
    "List the tools.",
    "What tools are there?",
    "Show me your tools.",
    "Tools",
)

CALCULATORS = (
    "calculator calculate calc evaluate compute math do_math eval_expression evaluate_expression "
    "run_calculator calculate_expression solve"
).split()
EXPRESSION_NAMES = "expression expression expr input formula query text problem equation".split()
CALCULATOR_TEXTS = (
    "",
    "Evaluate an expression.",
    "A calculator.",
    "Calculate the value of an expression.",
    "Evaluates an arithmetic expression.",
    "Computes the result of a calculation and returns it.",
    "Do math.",
    "Useful for sums and products.",
)
PARAMETER_PAIRS = (
    ("a", "b"),
    ("a", "b"),
    ("a", "b"),
    ("x", "y"),
    ("x", "y"),
    ("first", "second"),
    ("left", "right"),
    ("n", "m"),
    ("p", "q"),
    ("num1", "num2"),
    ("number1", "number2"),
    ("value_a", "value_b"),
    ("lhs", "rhs"),
    ("one", "two"),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on two numbers: what its tools are called and how it is asked for."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    forms: tuple[str, ...]


def _forms(sign: str, word: str, *others: str) -> tuple[str, ...]:
    common = (
        "What is {a} %s {b}?",
        "What is {a} %s {b}?",
        "What is {a}%s{b}?",
        "{a} %s {b}",
        "{a} %s {b} =",
        "{a}%s{b}",
        "Calculate {a} %s {b}.",
        "Compute {a} %s {b}",
        "How much is {a} %s {b}?",
        "What's {a} %s {b}?",
        "Please calculate {a} %s {b}.",
        "Can you tell me what {a} %s {b} is?",
    )
    words = ("What is {a} %s {b}?", "How much is {a} %s {b}?", "Calculate {a} %s {b}.")
    return (*(f % sign for f in common), *(f % word for f in words), *others)


OPERATIONS = {
    "+": Operation(
        ("add", "add", "sum", "plus", "add_numbers", "addNumbers", "add_two_numbers", "addition"),
        ("", "Add two numbers.", "Returns the sum.", "Sum of two numbers", "Adds b to a."),
        _forms("+", "plus", "Add {a} and {b}.", "Sum of {a} and {b}", "Add {a} to {b}"),
    ),
    "-": Operation(
        ("subtract", "subtract", "minus", "sub", "difference", "subtract_numbers", "subtraction"),
        ("", "Subtract two numbers.", "Returns the difference.", "Takes b from a."),
        _forms("-", "minus", "Subtract {b} from {a}.", "Difference of {a} and {b}"),
    ),
    "*": Operation(
        ("multiply", "multiply", "times", "mul", "product", "multiply_numbers", "multiplication"),
        ("", "Multiply two numbers.", "Returns the product.", "Product of two numbers"),
        (
            *_forms("*", "times", "Multiply {a} by {b}.", "Multiply {a} and {b}"),
            "{a} x {b}",
            "What is {a} multiplied by {b}?",
            "Product of {a} and {b}",
        ),
    ),
    "/": Operation(
        ("divide", "divide", "div", "quotient", "divide_numbers", "division"),
        ("", "Divide two numbers.", "Returns the quotient.", "Divides a by b."),
        _forms("/", "divided by", "Divide {a} by {b}."),
    ),
}


@dataclass(frozen=True, slots=True)
class Lookup:
    """A tool that takes one value: its names, how it is asked, the values and its results.

    ``{n}`` in a result is a number, ``{w}`` a word.
    """

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    descriptions: tuple[str, ...]
    forms: tuple[str, ...]
    values: tuple[str, ...]
    results: tuple[str, ...]


LOOKUPS = {
    "weather": Lookup(
        ("get_weather", "get_weather", "weather", "get_current_weather", "fetch_weather"),
        ("city", "city", "location", "place", "town"),
        ("", "Get the weather of a city.", "Weather in a city", "The weather at a place."),
        (
            "What is the weather in {}?",
            "weather in {}",
            "What's the weather like in {}?",
            "How is the weather in {}?",
            "Tell me the weather in {}.",
            "Is it raining in {}?",
        ),
        tuple(CITIES),
        ("sunny, {n} degrees", "sunny", "cloudy", "rain and {n} C", "{n} C", "snow", "Sunny, {n}C"),
    ),
    "time": Lookup(
        ("get_time", "current_time", "time_in", "get_current_time", "clock"),
        ("city", "location", "place", "zone"),
        ("", "Get the time in a city.", "Current time at a place"),
        ("What time is it in {}?", "time in {}", "What is the time in {}?", "Get the time in {}."),
        tuple(CITIES),
        ("{n}:{n}", "{n}:{n} in the morning", "{n} o'clock"),
    ),
    "population": Lookup(
        ("get_population", "population", "population_of", "count_people"),
        ("city", "country", "place", "name"),
        ("", "How many people live in a place.", "Population of a place."),
        ("How many people live in {}?", "Population of {}", "What is the population of {}?"),
        (*CITIES, *COUNTRIES),
        ("{n}{n}{n}", "{n} million", "{n}{n}{n}{n}"),
    ),
    "capital": Lookup(
        ("get_capital", "capital", "capital_of", "find_capital"),
        ("country", "country", "name", "nation"),
        ("", "The capital of a country.", "Find a capital city."),
        ("What is the capital of {}?", "Capital of {}", "Find the capital of {}."),
        tuple(COUNTRIES),
        ("{w}",),
    ),
    "price": Lookup(
        ("get_price", "price", "price_of", "product_price", "check_price"),
        ("item", "product", "name", "article"),
        ("", "The price of a product.", "Get what an item costs."),
        (
            "What is the price of {}?",
            "How much does {} cost?",
            "price of {}",
            "Get the price of {}",
        ),
        tuple(WORDS),
        ("{n}.{n}", "{n} dollars", "${n}", "{n}"),
    ),
    "definition": Lookup(
        ("define", "dictionary", "get_definition", "define_word", "meaning"),
        ("word", "word", "term", "text"),
        ("", "Define a word.", "What a word means."),
        ("Define {}.", "What does {} mean?", "Meaning of {}", "Define the word {}."),
        tuple(WORDS),
        ("a {w} of the {w}", "a kind of {w}", "A {w} with a {w}."),
    ),
    "translation": Lookup(
        ("translate", "translate_word", "to_french", "translator"),
        ("word", "text", "text", "phrase"),
        ("", "Translate a word.", "Translates text."),
        ("Translate {}.", "translate {}", "Translate the word {}", "How do you translate {}?"),
        tuple(WORDS),
        ("{w}",),
    ),
    "person": Lookup(
        ("get_phone", "phone_number", "find_phone", "get_contact"),
        ("name", "person", "user", "who"),
        ("", "The phone number of a person.", "Find a person's phone number."),
        ("What is the phone number of {}?", "Phone number of {}", "How can I call {}?"),
        tuple(NAMES),
        ("{n}{n}{n}", "{n}-{n}-{n}"),
    ),
    "entry": Lookup(
        ("lookup", "lookup", "look_up", "search", "find", "fetch", "search_database", "get_entry"),
        ("key", "key", "name", "term", "query", "topic", "id"),
        ("", "Look up a key.", "Find an entry.", "Search the database.", "Looks up a value."),
        ("Look up {}", "Look up {}.", "Find {}.", "Search for {}.", "look up {}", "Lookup {}"),
        (*CITIES, *COUNTRIES, *WORDS, *NAMES),
        ("{n}", "{w}", "{w} {w}", "a {w} and a {w}", '{{"id": {n}}}', "{w}: {n}", "The {w}."),
    ),
}

SYLLABLES = (
    "ab al an ar ba be bo ca co da de di do el en er fa fi ga go ha he in is ja ka ki la le li lo "
    "ma me mi mo na ne no on or pa pe po qu ra re ri ro sa se si so st ta te ti to tr un ur va ve "
    "vi wa wi xa ya yo za ze zo ch sh th ck ng rd st nt"
).split()
