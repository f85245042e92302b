"""What machines cost: a file of JSON lines, an offer a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import ValidationError
from jaxserve.simulation.devices import DEVICES, Device, device_of

EXAMPLE = Path(__file__).parent / "prices_example.jsonl"
EXAMPLE_NAME = "example"
HOURS_A_MONTH = 730


class Offer(NamedTuple):
    """One machine that can be rented.

    Attributes:
        name: of the offer.
        kind: a key of `DEVICES`.
        devices: that it has.
        memory: bytes of each.
        per_hour: its price; None: none is known.
        date: when that was so; empty where the file does not say.
    """

    name: str
    kind: str
    devices: int
    memory: int
    per_hour: float | None
    date: str = ""

    @property
    def device(self) -> Device:
        return DEVICES[self.kind]

    @property
    def doubt(self) -> str | None:
        """Why its memory cannot be as the file says."""
        sizes, given = self.device.sizes, self.memory / 1e9
        if not sizes or any(abs(given / size - 1) < 0.1 for size in sizes):
            return None
        sold = " or ".join(map(str, sizes))
        return f"{self.name}: {given:g} GB a device, and {self.kind} is sold with {sold} GB"


@dataclass(frozen=True, slots=True)
class Prices:
    """The offers of a file.

    Attributes:
        offers: in its order.
        currency: of the prices.
        date: when they were so.
        warnings: to be shown with every use.
    """

    offers: tuple[Offer, ...]
    currency: str = "USD"
    date: str = ""
    warnings: tuple[str, ...] = ()


def read_prices(path: Path) -> Prices:
    """The offers of a file.

    Raises:
        ValidationError: names file, line and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(
            "--prices", str(path), f"a file that can be read ({error})"
        ) from error
    offers: list[Offer] = []
    about: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ValidationError(where, line[:80], f"a JSON object ({error})") from error
        if not isinstance(item, dict):
            raise ValidationError(where, line[:80], "a JSON object")
        if "offer" not in item and not offers and not about:
            about = item
            continue
        offers.append(_offer(item, where, str(about.get("date", ""))))
    if not offers:
        raise ValidationError("--prices", str(path), "a file with at least one offer")
    doubts = [offer.doubt for offer in offers if offer.doubt]
    warnings = [str(about["warning"])] if about.get("warning") else []
    date = str(about.get("date", ""))
    return Prices(tuple(offers), str(about.get("currency", "USD")), date, (*warnings, *doubts))


def _offer(item: dict[str, Any], where: str, date: str) -> Offer:
    for name in ("offer", "device"):
        if not isinstance(item.get(name), str) or not item[name]:
            raise ValidationError(f"{where} {name}", item.get(name), "a name")
    for name in ("devices", "memory_gb", "per_hour"):
        value = item.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValidationError(f"{where} {name}", value, "a number above 0")
    if type(item["devices"]) is not int:
        raise ValidationError(f"{where} devices", item["devices"], "a whole number")
    device_of(item["device"], f"{where} device")
    memory = int(item["memory_gb"] * 1e9 / item["devices"])
    when = str(item.get("date", date))
    return Offer(item["offer"], item["device"], item["devices"], memory, item["per_hour"], when)


def unpriced(kinds: list[str]) -> Prices:
    """Machines of one device and of as many as share a model, without prices."""
    return Prices(tuple(Offer(kind, kind, 8, DEVICES[kind].memory, None) for kind in kinds))
