"""What a run on this machine was: timing of one workload, and where it was measured."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import jaxserve
from jaxserve.bench.device_limits import Limits
from jaxserve.bench.workloads import WorkItem, bytes_moved, bytes_saved, flops_of_items
from jaxserve.client.prompt_reader import Prompt
from jaxserve.errors import JaxServeError
from jaxserve.llm import LLM
from jaxserve.models.savings import without_savings
from jaxserve.params.beam_search_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a workload.

    Attributes:
        elapsed_time: seconds from the first request queued to the last token.
        num_requests, num_prompt_tokens, num_output_tokens: size of the workload.
        num_steps: engine steps that served it.
        bytes_read: least bytes that these steps read (weights and KV).
        flops: operations of linear layers and attention, of tokens that no cache had.
        bytes_saved, flops_saved: what the same model would read and compute beside these if its
            tokens went to all experts and saw all tokens before them.
        phase_seconds: where the time of the steps went, by the fields of `StepTimes`.
    """

    elapsed_time: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    bytes_read: int
    flops: int
    bytes_saved: int
    flops_saved: int
    phase_seconds: dict[str, float]

    @property
    def device_busy(self) -> float:
        """Share of the time in which the device had work, at least."""
        return max(0.0, 1.0 - self.phase_seconds["device_idle"] / self.elapsed_time)

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.elapsed_time

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes_read / self.elapsed_time / 1e9

    def as_json(self) -> dict[str, Any]:
        """Under the names of `vllm bench throughput`, with ours beside them."""
        total = self.num_prompt_tokens + self.num_output_tokens
        return asdict(self) | {
            "total_num_tokens": total,
            "requests_per_second": self.num_requests / self.elapsed_time,
            "tokens_per_second": total / self.elapsed_time,
            "output_tokens_per_second": self.output_tokens_per_second,
            "gigabytes_per_second": self.gigabytes_per_second,
            "device_busy": self.device_busy,
        }

    def utilisation(self, limits: Limits) -> dict[str, Any]:
        """MFU and the share of the bandwidth: of what the device was measured to do."""
        products, reads = limits.shares(self.elapsed_time, self.flops, self.bytes_read)
        return {"mfu": products, "bandwidth_utilisation": reads, "limits": asdict(limits)}

    def savings(self) -> str:
        """A line that says what experts and windows saved; "" where it is nothing."""
        if not self.flops_saved:
            return ""
        parts = (
            f"{done:.4g} of {done + saved:.4g} {unit} (saved: {saved / (done + saved):.1%})"
            for unit, done, saved in (
                ("GFLOP", self.flops / 1e9, self.flops_saved / 1e9),
                ("GB", self.bytes_read / 1e9, self.bytes_saved / 1e9),
            )
        )
        return f"beside all experts and full attention {' and '.join(parts)}\n"

    def breakdown(self) -> str:
        """A line that says where a step's time goes: host work, and the wait for the device."""
        microseconds = {
            phase: 1e6 * seconds / max(1, self.num_steps)
            for phase, seconds in self.phase_seconds.items()
            if phase not in ("http", "device_idle", "device_busy")
        }
        parts = ", ".join(f"{phase} {value:.0f}" for phase, value in microseconds.items())
        return f"us a step: {parts}; device busy at least {self.device_busy:.1%}"


def run_workload(
    llm: LLM,
    items: list[WorkItem],
    *,
    n: int = 1,
    use_beam_search: bool = False,
    use_tqdm: bool = False,
) -> Measurement:
    """Queue all items at once and wait for the last.

    Args:
        llm: the engine.
        items: the requests.
        n: sequences of each request; more than one are sampled.
        use_beam_search: search for the `n` most likely ones instead; the items are equally long.
        use_tqdm: show a progress bar.

    Raises:
        JaxServeError: a request ended early, so the figure would not mean what it says.
    """
    before = llm.stats()
    start = time.perf_counter()
    prompts: list[Prompt] = [{"prompt_token_ids": item.prompt_token_ids} for item in items]
    if use_beam_search:
        beams = BeamSearchParams(n, items[0].output_len, ignore_eos=True)
        searches = llm.beam_search(prompts, beams, use_tqdm=use_tqdm)
        lengths = [
            [len(sequence.tokens) - len(item.prompt_token_ids) for sequence in output.sequences]
            for item, output in zip(items, searches)
        ]
    else:
        outputs = llm.generate(prompts, [item.params(n=n) for item in items], use_tqdm=use_tqdm)
        lengths = [[len(sequence.token_ids) for sequence in output.outputs] for output in outputs]
    elapsed = time.perf_counter() - start
    for item, given in zip(items, lengths):
        for length in given:
            if length != item.output_len:
                raise JaxServeError(f"a request gave {length} of {item.output_len} tokens")
    after = llm.stats()
    steps = after.num_steps - before.num_steps
    found, model = after.pages.num_found - before.pages.num_found, llm.model_config
    flops = flops_of_items(items, n, model, found)
    read = items, n, steps, model, llm.footprint
    return Measurement(
        elapsed_time=elapsed,
        num_requests=len(items),
        num_prompt_tokens=sum(len(item.prompt_token_ids) for item in items),
        num_output_tokens=n * sum(item.output_len for item in items),
        num_steps=steps,
        bytes_read=bytes_moved(*read),
        flops=flops,
        bytes_saved=bytes_saved(*read),
        flops_saved=flops_of_items(items, n, without_savings(model), found) - flops,
        phase_seconds=after.times.since(before.times).as_dict(),
    )


def environment() -> dict[str, str]:
    """Machine, versions and commit of a measurement."""
    device = jax.devices()[0]
    return {
        "jaxserve": jaxserve.__version__,
        "commit": commit(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": f"{len(jax.devices())} x {device.device_kind} ({device.platform})",
        "cpu": _cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_report(path: Path | None, **report: Any) -> None:
    """A report and its `environment` as JSON; nothing where no file was asked for."""
    if path is not None:
        report["environment"] = environment() | report.get("environment", {})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def describe(facts: Mapping[str, str]) -> str:
    """An `environment` as a line for people."""
    return (
        f"jaxserve {facts['jaxserve']} (commit {facts['commit']}), jax {facts['jax']}, Python "
        f"{facts['python']}, {facts['device']}, {facts['cpu']}, {facts['date']}"
    )


def commit() -> str:
    """The commit of this checkout, and whether it has changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or "unknown"
    lines = info.read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    shown = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{len(names)} x {names[0] if names else 'unknown'} ({', '.join(shown)})"
