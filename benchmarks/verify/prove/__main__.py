"""The command: `python -m benchmarks.verify.prove`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import jax

from benchmarks.verify.prove import (
    KINDS,
    LEGEND,
    Proof,
    attempt,
    cases_for,
    ended,
    markdown,
    prove_case,
    roofline_table,
    versions,
    write_json,
)
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from benchmarks.verify.prove.touched import touched


def _share(text: str) -> tuple[int, int]:
    """K and N of "K/N"."""
    first, _, every = text.partition("/")
    if not (first.isdecimal() and every.isdecimal() and 1 <= int(first) <= int(every)):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is K/N with 1 <= K <= N")
    return int(first), int(every)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verify.prove",
        description="Compile every kernel for devices that are not there, and judge the result. "
        "Exit codes: 0 all pass, 1 one fails, 3 this machine lacks a compiler.",
    )
    parser.add_argument(
        "--device", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of devices"
    )
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="print the least time of some work on each device by its data sheet; compile nothing",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, those of CI")
    parser.add_argument(
        "--touching",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="all cases of the kernels that import these files; with --quick beside its cases",
    )
    parser.add_argument(
        "--share",
        type=_share,
        default=(1, 1),
        metavar="K/N",
        help="of the cases that --quick has not, every N-th from the K-th on",
    )
    parser.add_argument("--backend", help="only the kernels of this backend")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--json", type=Path, help="also write all that is known to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the proofs; 0 when all pass, 1 when one fails, 3 when this machine cannot compile."""
    options = parse(arguments)
    if options.roofline:
        print(roofline_table(), end="")
        return 0
    # compilation is on the host; without this JAX would look for a driver
    jax.config.update("jax_platforms", "cpu")
    kernels = None if options.touching is None else touched(options.touching)
    proofs: list[Proof] = []
    missing: list[str] = []
    for kind in options.device:
        try:
            given = {"quick": options.quick, "backend": options.backend, "kernels": kernels}
            for case in cases_for(kind, share=options.share, **given):
                proofs.append(attempt(case.name, kind, partial(prove_case, case, kind)))
                print(f"{kind}: {case.name}: {proofs[-1].seconds:.1f} s", file=sys.stderr)
        except CompilerMissingError as error:
            missing.append(f"cannot prove anything for {kind} here: {error}")
    text = ", ".join(f"{name} {version}" for name, version in versions().items())
    table = f"{text}\n\n{LEGEND}\n{markdown(proofs)}"
    if proofs:
        print(table)
    if options.markdown:
        options.markdown.write_text(f"# Compiled kernels\n\n{table}")
    if options.json:
        write_json(options.json, proofs)
    return ended(proofs, missing)


if __name__ == "__main__":
    sys.exit(main())
