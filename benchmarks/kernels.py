#!/usr/bin/env python3
"""The kernels next to the device's ceilings and to what others offer for the same operation.

    python benchmarks/kernels.py --budget-seconds 540

Decode attention is held against the bytes it must read at the copy bandwidth of this run, cuDNN's
paged attention, FlashInfer and torch's scaled_dot_product_attention; prefill attention
against the dense bf16 matrix rate of this run; products with quantised weights against bf16. What
is not installed, does not compile or does not fit is a row with the reason. The most telling cases
come first and the results are written after every case, so a run may be cut short at any time.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.device_run import EXIT_FAILED, command_line, deadline, results_folder, told
from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench import plots, report
from benchmarks.kernel_bench.cases import KINDS, all_cases, dry_cases
from benchmarks.kernel_bench.run import Build, failures_of, kernel_process, run_cases


def main(arguments: list[str] | None = None) -> int:
    """0 when every case ran; a target that is missed is printed, not failed."""
    parser = command_line(__doc__, KINDS, 540)
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each candidate")
    parser.add_argument("--no-torch", action="store_true", help="leave FlashInfer and SDPA out")
    options = parser.parse_args(arguments)
    end = deadline(options.budget_seconds)
    folder = results_folder(options.output, "kernels")
    cases = dry_cases() if options.dry_run else all_cases(options.page_size)
    torch = not options.no_torch
    worker = kernel_process(with_torch=torch, dry_run=options.dry_run)
    build = Build() if torch and not options.dry_run else None
    try:
        rows, device, notes = run_cases(
            worker,
            [case for case in cases if case.operation in (options.only or KINDS)],
            {"dry_run": options.dry_run, "torch": torch, "rounds": options.rounds},
            deadline=end,
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
    plots.kernels(rows, device, folder)
    return told(report.markdown(rows, device, notes), folder, failures_of(rows))


if __name__ == "__main__":
    sys.exit(main())
