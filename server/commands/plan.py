"""`jaxserve plan --qps 5 --input 1000 --output 300`: devices, settings, latency and cost."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.flags import add_flag
from jaxserve.errors import ValidationError
from jaxserve.simulation.devices import DEVICES, device_of
from jaxserve.simulation.prices import EXAMPLE, EXAMPLE_NAME, read_prices, unpriced

# settings that a plan may be given
SETTINGS = (
    "revision",
    "hf_token",
    "download_dir",
    "hf_overrides",
    "dtype",
    "max_model_len",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk",
    "preset",
)
FORMS = ("none", "int8", "fp8", "int4", "awq", "gptq")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "plan", help="how many devices a load needs, with which latency, at which cost"
    )
    add = parser.add_argument_group("model").add_argument
    add("model_path", nargs="?", metavar="MODEL", help="the same as --model")
    add(
        "--model",
        metavar="MODEL",
        help="folder, config.json, id on the hub, or the name of a well-known shape: config.json "
        "alone is read",
    )
    add(
        "--quantization",
        nargs="+",
        choices=FORMS,
        default=["none", "int8", "awq"],
        help="forms of the weights to look at (default: none int8 awq)",
    )
    add = parser.add_argument_group("load").add_argument
    add("--qps", type=float, required=True, help="requests a second")
    add("--input", type=int, required=True, metavar="TOKENS", help="prompt tokens of a request")
    add("--output", type=int, required=True, metavar="TOKENS", help="output tokens of a request")
    add("--ttft-p99", type=duration, default=1.0, metavar="1s", help="limit (default: 1s)")
    add("--tpot-p99", type=duration, default=0.05, metavar="50ms", help="limit (default: 50ms)")
    add = parser.add_argument_group("machines").add_argument
    add("--device", nargs="+", metavar="NAME", help=f"of {', '.join(rentable())}")
    add(
        "--prices",
        metavar="FILE",
        help="JSON lines with offer, device, devices, memory_gb and per_hour; "
        f"{EXAMPLE_NAME}: three offers that come along, to show the form (default: no prices)",
    )
    add = parser.add_argument_group("results").add_argument
    add("--json", action="store_true", help="print JSON")
    add(
        "--scaling",
        action="store_true",
        help="beside the plan what more devices, on up to 4 hosts, bring to a decode step",
    )
    settings = parser.add_argument_group("settings of the engine")
    for name in SETTINGS:
        add_flag(settings, EngineConfig, name)
    parser.set_defaults(func=run)


def rentable() -> list[str]:
    """Devices of which a data sheet is known."""
    return [name for name, device in DEVICES.items() if device.memory]


def duration(text: str) -> float:
    """Seconds of a text such as 1s or 50ms.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    match = _DURATION.fullmatch(text)
    if match is None or not float(match[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 1s or 50ms")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def run(args: argparse.Namespace) -> int:
    """Plan; 1 when nothing serves the load."""
    for name in ("qps", "input", "output"):
        if not getattr(args, name) > 0:
            raise ValidationError(f"--{name}", getattr(args, name), "above 0")
    named = args.model_path or args.model
    if named is None or None not in (args.model_path, args.model):
        raise ValidationError("--model", args.model, "one model")
    kinds = args.device or rentable()
    for kind in kinds:
        if not device_of(kind).memory:
            allowed = "one with a data sheet: `jaxserve simulate` is for a CPU"
            raise ValidationError("--device", kind, allowed)
    prices = unpriced(kinds)
    if args.prices is not None:
        prices = read_prices(EXAMPLE if args.prices == EXAMPLE_NAME else Path(args.prices))
    offers = [offer for offer in prices.offers if offer.kind in kinds]
    if not offers:
        raise ValidationError("--device", kinds, "a device of which the price file has an offer")
    from jaxserve.simulation.plan_text import json_of, text_of
    from jaxserve.simulation.planner import Load, candidates
    from jaxserve.simulation.scaling import CONTEXT, ROWS, as_json, estimates, heading, rows
    from jaxserve.simulation.setting import find_model

    given = {name: getattr(args, name) for name in SETTINGS}
    asked = EngineConfig(model=named, **given)
    model, stored = find_model(asked)
    forms = ["" if form == "none" else form for form in args.quantization]
    if stored:  # it is quantised already
        forms = [stored]
    load = Load(args.qps, args.input, args.output, args.ttft_p99, args.tpot_p99)
    shows = sys.stderr.isatty()

    def told(text: str) -> None:
        if shows:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    found = sorted(candidates(asked, model, load, offers, forms, told), key=lambda one: one.order)
    told("")
    scaled = {}
    if args.scaling:
        scaled = {form: estimates(asked, model, kinds, quantization=form) for form in forms}
    if args.json:
        written = json_of(named, found, load, prices, forms)
        if scaled:
            written["scaling"] = [
                one | {"quantization": form or "none"}
                for form, of in scaled.items()
                for one in as_json(of)
            ]
        print(json.dumps(written, indent=2))
    else:
        print(text_of(named, found, load, prices, forms))
        for form, of in scaled.items():
            weights = f"weights in {form}" if form else "weights as they are"
            step = f"A decode step of {ROWS} rows with {CONTEXT} tokens each, {weights}"
            print(f"\n{step}, by data sheets:\n")
            fits = rows(named, of)
            print("\n".join([*heading(), *fits]) if fits else "no number of these devices holds it")
    return 0 if any(one.reason is None for one in found) else 1
