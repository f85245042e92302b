#!/usr/bin/env python3
"""The kernels next to the device's ceilings and to what others offer for the same operation.

    python benchmarks/kernels.py --budget-seconds 540

Decode attention is held against the bytes it must read at the copy bandwidth of this run, JAX's own
paged attention, cuDNN's, FlashInfer and torch's scaled_dot_product_attention; prefill attention
against the dense bf16 matrix rate of this run; products with quantised weights against bf16. What
is not installed, does not compile or does not fit is a row with the reason. The most telling cases
come first and the results are written after every case, so a run may be cut short at any time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.isolated import Inline, WorkerError
from benchmarks.kernel_bench import plots, report
from benchmarks.kernel_bench.cases import KINDS, all_cases, dry_cases
from benchmarks.kernel_bench.run import Build, device_worker, failures_of, run_cases

EXIT_FAILED = 1


def main(arguments: list[str] | None = None) -> int:
    """0 when every case ran; a target that is missed is printed, not failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-seconds", type=float, default=540, help="no case is begun later")
    parser.add_argument("--only", action="append", choices=KINDS, default=[], help="repeatable")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each candidate")
    parser.add_argument("--no-torch", action="store_true", help="leave FlashInfer and SDPA out")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: finds errors only")
    parser.add_argument("--output", type=Path, help="folder for JSON, Markdown and plots")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    folder = options.output or Path(tempfile.mkdtemp(prefix="kernels-"))
    cases = dry_cases() if options.dry_run else all_cases(options.page_size)
    cases = [case for case in cases if case.operation in (options.only or KINDS)]
    if options.dry_run:
        from benchmarks.kernel_bench.worker import Answers

        answers = Answers()
        worker = Inline(answers)
    else:
        answers = None
        worker = device_worker(with_torch=not options.no_torch)
    build = None if options.dry_run or options.no_torch else Build()
    try:
        rows, device, notes = run_cases(
            worker,
            cases,
            {
                "dry_run": options.dry_run,
                "torch": not options.no_torch,
                "rounds": options.rounds,
            },
            deadline=begin + options.budget_seconds,
            progress=lambda *found: report.write(folder, "kernels", *found),
            build=build,
        )
    except WorkerError as error:
        print(f"the device could not be used: {error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        worker.close()
        if build is not None:
            build.close()
        if answers is not None:
            answers.close()
    plots.kernels(rows, device, folder)
    print(report.markdown(rows, device, notes))
    print(f"written to {folder}")
    failed = failures_of(rows)
    for failure in failed:
        print(f"FAILED: {failure}", file=sys.stderr)
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
