"""Values of `format` of a JSON schema, as expressions."""

from __future__ import annotations

_HEX = "[0-9a-fA-F]"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
# without leap seconds, of which a date and a zone must be known
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = f"{_HEX}{{1,4}}"
# `::` stands for the groups that are not there: behind none to seven of them
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        f"(?:{_GROUP}:){{1,7}}:",
        f":(?::{_GROUP}){{1,7}}",
        "::",
        *(f"(?:{_GROUP}:){{1,{7 - n}}}(?::{_GROUP}){{1,{n}}}" for n in range(1, 7)),
    ]
)
_IPV6 = f"(?:{_IPV6})"
_IPV4_PREFIX, _IPV6_PREFIX = (
    "(?:/(?:3[0-2]|[12]?[0-9]))?",
    "(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?",
)
_IN_LABEL, _LETTER = "[a-zA-Z0-9-]", "[a-zA-Z0-9]"
# no `--` in the third place, behind which a name would be in Punycode
_LABEL = (
    f"{_LETTER}(?:{_IN_LABEL}?{_LETTER}|{_IN_LABEL}{{2}}{_LETTER}"
    f"|{_IN_LABEL}(?:{_LETTER}{_IN_LABEL}|-{_LETTER}){_IN_LABEL}{{0,58}}{_LETTER})?"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64, _BASE64URL = "[A-Za-z0-9+/]", "[A-Za-z0-9_-]"


def _base64(letter: str) -> str:
    return f"(?:{letter}{{4}})*(?:{letter}{{2}}==|{letter}{{3}}=)?"


def _uuid(version: int) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


# that llguidance has expressions of
BUILT_IN = frozenset({"duration", "email", "ipv4", "ipv6", "uri", "uuid"})
MAX_HOSTNAME = 253  # characters
# Those of the standard of which llguidance would take too much, or has none, and Pydantic's.
EXPRESSIONS = {
    "date": _DATE,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
    **{f"ipv4{kind}": _IPV4 + _IPV4_PREFIX for kind in ("network", "interface")},
    **{f"ipv6{kind}": _IPV6 + _IPV6_PREFIX for kind in ("network", "interface")},
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    **{
        f"ipvany{kind}": f"{_IPV4}{_IPV4_PREFIX}|{_IPV6}{_IPV6_PREFIX}"
        for kind in ("network", "interface")
    },
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "base64": _base64(_BASE64),
    "base64url": _base64(_BASE64URL),
}
