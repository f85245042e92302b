#!/usr/bin/env python3
"""Weights in memory beside weights that stay in their files (`cpu_offload_gb`), on a CPU.

    python -m benchmarks.mapped_weights --shape llama-1b --data-limit 3.5

Makes a store of dummy weights, then serves the same prompts from it in new processes: with the
weights in memory, mapped, and mapped where the process may have less memory than the weights take
(`ulimit -d`, which counts what is in no file). Prints for each the most memory in no file
(`RssAnon`), what is in files and may be dropped (`RssFile`), tokens and processor seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.store_load import write_models
from jaxserve import LLM, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.models.known_shapes import SHAPES

GIB = 1 << 30
SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "compile_ahead": 2,
    "compile_in_background": False,
    "use_tqdm_on_load": False,
}
EVERY = 0.05  # seconds between two looks at the memory


def resident() -> dict[str, int]:
    """Bytes of this process that are in memory, in no file and of files; Linux only."""
    text = Path("/proc/self/status").read_text()
    found = dict(re.findall(r"(Rss\w+):\s+(\d+) kB", text))
    return {name: 1024 * int(found[name]) for name in ("RssAnon", "RssFile")}


def serve(store: str, offload: float, limit: float, tokens: int) -> dict[str, Any]:
    """Serve two prompts from a store, in a process of its own.

    Args:
        store: the folder.
        offload: GiB of `cpu_offload_gb`.
        limit: GiB that `ulimit -d` allows; 0: no limit.
        tokens: of each answer.
    """
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit * GIB),) * 2)
    most: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(EVERY):
            for name, size in resident().items():
                most[name] = max(size, most.get(name, 0))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        llm = LLM(store, cpu_offload_gb=offload, **SIZES)
        prompts = [[*range(5, 45)], [*range(100, 110)]]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begin, processor = time.monotonic(), time.process_time()
        said = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - processor
        weights = llm.client.engine.runner.weights.device_bytes
    except ValidationError as error:
        return {"refused": str(error)}
    finally:
        done.set()
        watcher.join()
    return {
        "weights_gb": weights / 1e9,
        "anonymous_gb": most["RssAnon"] / 1e9,
        "of_files_gb": most["RssFile"] / 1e9,
        "tokens_a_second": len(prompts) * tokens / seconds,
        "cpu_ms_a_token": 1e3 * cpu_seconds / (len(prompts) * tokens),
        "tokens": hashlib.sha256(repr(said).encode()).hexdigest()[:12],
    }


def in_new_process(*words: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.mapped_weights", "--serve", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-300:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-125m")
    add("--quantization", choices=["int8", "int4"])
    add("--folder", type=Path, help="an empty one for the model, which stays; none: it is removed")
    add("--data-limit", type=float, default=0.0, help="GiB of the limited process; 0: none runs")
    add("--tokens", type=int, default=16, help="of each of two answers")
    add("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.serve:
        store, offload, limit, tokens = options.serve
        print(json.dumps(serve(store, float(offload), float(limit), int(tokens))))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        store = folder / "orbax"
        if not store.is_dir():
            write_models(options.shape, "bfloat16", options.quantization, folder)
        ways = {"in memory": (0, 0), "mapped": (1000, 0)}
        if options.data_limit:
            limited = f"of {options.data_limit:g} GiB"
            ways |= {f"in memory {limited}": (0, options.data_limit)}
            ways |= {f"mapped {limited}": (1000, options.data_limit)}
        said = set()
        for way, (offload, limit) in ways.items():
            found = in_new_process(store, offload, limit, options.tokens)
            print(f"{way}: {json.dumps(found)}", flush=True)
            said.add(found.get("tokens"))
    return 0 if len(said - {None}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
