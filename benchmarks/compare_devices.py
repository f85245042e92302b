#!/usr/bin/env python3
"""The same workloads on every device that is here (CPU, GPU, TPU), one table and one plot.

    python benchmarks/compare_devices.py --output cpu
    python benchmarks/compare_devices.py --include-results cpu/devices.json
    python benchmarks/compare_devices.py --estimate v5e

The engine end to end with random weights, and the kernels. Results that were measured on another
machine are put beside this one's by --include-results. --estimate adds a TPU that is not here: its
values come from the compiled executable and are marked as estimates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.devices import compare
from benchmarks.isolated import Inline, WorkerError
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from jaxserve.models.known_shapes import SHAPES

ABSENT_TPUS = ("v5e", "v5p", "v6e")


def main(arguments: list[str] | None = None) -> int:
    """0 when there is a device or a result to show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", action="append", choices=compare.PLATFORMS, default=[])
    parser.add_argument("--shape", choices=SHAPES, default="llama-125m", help="of the engine")
    parser.add_argument(
        "--include-results", type=Path, action="append", default=[], help="a devices.json"
    )
    parser.add_argument(
        "--estimate", action="append", choices=ABSENT_TPUS, default=[], help="an absent TPU"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: finds errors only")
    parser.add_argument("--output", type=Path, help="folder for devices.json, .md and .png")
    options = parser.parse_args(arguments)
    if options.estimate:
        from benchmarks.verify.prove.tpu_targets import require_compiler  # for estimates alone

        try:
            require_compiler()
        except CompilerMissingError as error:
            print(f"compare_devices.py: --estimate {options.estimate[0]}: {error}", file=sys.stderr)
            return 1
    results = []
    for path in options.include_results:
        results += json.loads(path.read_text())["devices"]
    absent: dict[str, str] = {}
    for platform in options.platform or compare.PLATFORMS:
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
                compare.measure_device(worker, options.shape, page_size, dry_run=options.dry_run)
            )
        except WorkerError as error:
            absent[platform] = str(error)
        finally:
            worker.close()
    results += [compare.estimate_device(kind, options.dry_run) for kind in options.estimate]
    if not results:
        print(compare.markdown(results, absent), file=sys.stderr)
        return 1
    folder = options.output or Path(tempfile.mkdtemp(prefix="devices-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "devices.json").write_text(json.dumps({"devices": results}, indent=1))
    text = compare.markdown(results, absent)
    (folder / "devices.md").write_text(text)
    compare.plot(results, folder)
    print(text)
    print(f"written to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
