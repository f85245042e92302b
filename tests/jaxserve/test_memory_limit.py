"""`memory_reserve`: what an engine leaves of a limit of its process, which counts pages unused."""

from __future__ import annotations

import json
import sys

import pytest

from jaxserve.execution.host_memory import RESERVE_BYTES
from tests.command_line import output_of

PROGRAM = """
import json, resource
from pathlib import Path

LIMIT = 3_600_000_000
resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams

llm = LLM(str(bundled_model_path()), max_num_seqs=512, max_num_batched_tokens=512, compile_ahead=1)
cache = llm.config.cache
prompts = [[5 + n, *range(5, 1000)] for n in range(4)]
llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
status = Path("/proc/self/status").read_text().splitlines()
peak = next(line for line in status if "VmPeak" in line)
print(json.dumps({"limit": LIMIT, "pages": cache.num_pages, "slots": 512 * 2048 // cache.page_size,
                  "peak": int(peak.split()[1]) * 1024}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits addresses")
def test_a_fifth_of_the_limit_is_left() -> None:
    seen = json.loads(output_of("-c", PROGRAM).splitlines()[-1])
    assert seen["pages"] < seen["slots"], "the limit has bounded the pages"
    # beside the share that is left alone a plan keeps bytes for what it does not count: a part of
    # them is in use
    assert seen["limit"] - seen["peak"] >= 0.2 * seen["limit"] + RESERVE_BYTES / 3, seen
