#!/usr/bin/env python3
"""The same workloads on every device that is here (CPU, GPU, TPU): one report.

    python -m benchmarks.compare_devices --output cpu
    python -m benchmarks.compare_devices --include-results cpu/devices.json
    python -m benchmarks.compare_devices --estimate h200 --estimate v5e --price h200=4

The engine end to end with random weights, and the kernels. Results that were measured on another
machine are put beside this one's by --include-results. --estimate adds a device that is not here:
its values come from the simulator's cost model, its kernels' from the compiled executable, and are
marked as estimates.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.devices import compare
from benchmarks.devices.report import Report, markdown, notes, write
from benchmarks.isolated import Inline, WorkerError
from jaxserve.errors import ValidationError
from jaxserve.models.known_shapes import SHAPES
from jaxserve.simulation.devices import device_of
from jaxserve.simulation.prices import read_prices

GIVEN = "given on the command line"


def price(text: str) -> tuple[str, float]:
    """KIND=PRICE as the key of a device and the price of its hour.

    Raises:
        ValidationError: it is none.
    """
    kind, _, value = text.partition("=")
    kind = compare.ABSENT.get(kind, kind)
    device_of(kind, "--price")
    try:
        found = float(value)
    except ValueError as error:
        raise ValidationError("--price", text, "KIND=PRICE, a number above 0") from error
    if not 0 < found < math.inf:
        raise ValidationError("--price", text, "KIND=PRICE, a number above 0")
    return kind, found


def priced(given: list[str], file: Path | None) -> tuple[dict[str, float], str, str]:
    """Prices of an hour of each kind of device, the cheapest of a file; currency and source.

    Raises:
        ValidationError: a file or a price that is none.
    """
    prices: dict[str, float] = {}
    currency, sources = "USD", []
    if file is not None:
        offers = read_prices(file)
        currency = offers.currency
        sources.append(f"{file.name}, {offers.date or 'without a date'}")
        for offer in offers.offers:
            if offer.per_hour is not None:
                one = offer.per_hour / offer.devices
                prices[offer.kind] = min(one, prices.get(offer.kind, one))
    if given:
        prices |= dict(price(text) for text in given)
        sources.append(GIVEN)
    return prices, currency, "; ".join(sources)


def main(arguments: list[str] | None = None) -> int:
    """0 when there is a device or a result to show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", action="append", choices=compare.PLATFORMS, default=[])
    parser.add_argument("--shape", choices=SHAPES, default="llama-125m", help="of the engine")
    parser.add_argument("--no-kernels", action="store_true", help="the engine alone")
    parser.add_argument("--no-measure", action="store_true", help="saved results and estimates")
    parser.add_argument(
        "--include-results", type=Path, action="append", default=[], help="a devices.json"
    )
    parser.add_argument(
        "--estimate", action="append", choices=compare.ABSENT, default=[], help="an absent device"
    )
    parser.add_argument(
        "--price", action="append", default=[], metavar="KIND=PRICE", help="of an hour of a device"
    )
    parser.add_argument("--prices", type=Path, help="a file of offers, as jaxserve plan takes it")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: finds errors only")
    parser.add_argument("--output", type=Path, help="folder for devices.json, .md, .html and .png")
    options = parser.parse_args(arguments)
    try:
        prices, currency, source = priced(options.price, options.prices)
        results = [device for path in options.include_results for device in saved(path)]
    except ValidationError as error:
        print(f"compare_devices.py: {error}", file=sys.stderr)
        return 1
    kernels, absent = not options.no_kernels, dict[str, str]()
    for platform in () if options.no_measure else options.platform or compare.PLATFORMS:
        if not compare.installed(platform):
            absent[platform] = "JAX's plugin for it is not installed"
            continue
        if options.dry_run and platform == "cpu":
            from benchmarks.devices.worker import answer

            worker = Inline(answer)
        else:
            worker = compare.platform_worker(platform)
        print(f"{platform} ...", file=sys.stderr, flush=True)
        page_size = compare.PLATFORMS[platform][1]
        try:
            results.append(
                compare.measure_device(
                    worker, options.shape, page_size, dry_run=options.dry_run, kernels=kernels
                )
            )
        except WorkerError as error:
            absent[platform] = str(error)
        finally:
            worker.close()
    results += [
        compare.estimate_device(kind, options.shape, options.dry_run, kernels)
        for kind in options.estimate
    ]
    measured = {(one["shape"], one["length"]) for one in results if "shape" in one}
    if len(measured) > 1:
        shapes = ", ".join(f"{shape} with {length} tokens" for shape, length in sorted(measured))
        print(f"compare_devices.py: results are of one shape, not of {shapes}", file=sys.stderr)
        return 1
    report = Report(results, absent, prices, currency, source)
    if not results:
        print("\n".join(notes(report)), file=sys.stderr)
        return 1
    folder = options.output or Path(tempfile.mkdtemp(prefix="devices-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "devices.json").write_text(json.dumps({"devices": results}, indent=1))
    write(report, folder)
    print(markdown(report))
    print(f"written to {folder}")
    return 0


def saved(path: Path) -> list[compare.Results]:
    """The devices of a devices.json.

    Raises:
        ValidationError: the file is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["devices"]
        known = all(isinstance(one["name"], str) and "workloads" in one for one in found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = f"a devices.json of this command ({error!r})"
        raise ValidationError("--include-results", str(path), allowed) from error
    if not known:
        raise ValidationError("--include-results", str(path), "a devices.json of this command")
    devices: list[compare.Results] = found
    return devices


if __name__ == "__main__":
    sys.exit(main())
