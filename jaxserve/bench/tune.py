"""`jaxserve tune`: the engine's sizes that give the most tokens under a latency limit, here.

Weights of fewer bits want more slots: the first sweep is of both, and is shown as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.bench.percentiles import percentile
from jaxserve.bench.serve_options import at_least, require
from jaxserve.config.engine_config import ONLINE_QUANTIZATIONS, EngineConfig
from jaxserve.errors import ValidationError

AS_STORED = "none"  # of weights: as the checkpoint has them
# what is swept where nothing is typed, and by --quick
SWEEP: dict[str, Any] = {
    "max_num_seqs": [8, 16, 32, 64],
    "max_num_batched_tokens": [256, 512, 1024],
    "prefill_chunks": [128],
    "block_sizes": [32],
    "num_prompts": 64,
    "min_len": 8,
    "max_len": 256,
}
QUICK: dict[str, Any] = {
    "max_num_seqs": [2, 4],
    "max_num_batched_tokens": [32],
    "prefill_chunks": [],
    "block_sizes": [],
    "num_prompts": 8,
    "min_len": 4,
    "max_len": 16,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """One candidate; None leaves a size to the engine's default."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int | None = None
    block_size: int | None = None
    quantization: str | None = None

    def text(self) -> str:
        """The sizes that are not left to the default, in words."""
        names = ("slots", "tokens a step", "prompt tokens a step", "tokens a page", "weights")
        values = asdict(self).values()
        return ", ".join(f"{value} {name}" for name, value in zip(names, values) if value)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a candidate gave.

    Attributes:
        sizes: the candidate.
        tokens_per_second: output tokens a second over the workload.
        p99_ttft_ms: from a request's admission to its first token.
        p99_itl_ms: of the requests' mean times between tokens.
        allowed: within the limits.
    """

    sizes: Sizes
    tokens_per_second: float
    p99_ttft_ms: float
    p99_itl_ms: float
    allowed: bool


def register(subparsers: Any) -> None:
    """Add the command to the parser of `jaxserve`."""
    parser = subparsers.add_parser(
        "tune", help="find batch size, token budget, page size and prefill chunk for this device"
    )
    add = parser.add_argument
    add(
        "model_path",
        nargs="?",
        metavar="MODEL",
        help="folder or hub id (default: the bundled model)",
    )
    add("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    add("--load-format", default="auto", help="auto, safetensors or dummy")
    add(
        "--quantization",
        nargs="+",
        choices=(AS_STORED, *ONLINE_QUANTIZATIONS),
        help="weights to sweep with the slots, and to choose from (default: none, int8 and int4 "
        "are shown, none is chosen; a checkpoint that is quantised already stays as it is)",
    )
    add("--max-model-len", type=int, help="longest prompt plus output")
    add("--ttft-ms", type=float, default=1000.0, help="limit of the p99 time to the first token")
    add("--itl-ms", type=float, default=100.0, help="limit of the p99 time between tokens")
    add("--quick", action="store_true", help="few sizes and short requests, to try the command")
    add("--max-num-seqs", type=int, nargs="+", metavar="N", help=_swept("max_num_seqs"))
    name = "max_num_batched_tokens"
    add("--max-num-batched-tokens", type=int, nargs="+", metavar="N", help=_swept(name))
    add("--prefill-chunks", type=int, nargs="*", metavar="N", help=_swept("prefill_chunks"))
    add("--block-sizes", type=int, nargs="*", metavar="N", help=_swept("block_sizes"))
    add("--num-prompts", type=int, help=f"requests of the workload{_swept('num_prompts')}")
    add("--min-len", type=int, help=f"shortest prompt and output{_swept('min_len')}")
    add("--max-len", type=int, help=f"longest prompt and output{_swept('max_len')}")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("tuned.yaml"), help="file for serve --config")
    parser.set_defaults(func=run, loads_model=True)


def _swept(name: str) -> str:
    values = SWEEP[name] if isinstance(SWEEP[name], list) else [SWEEP[name]]
    return f" (default: {' '.join(map(str, values))})"


def settled(options: argparse.Namespace) -> argparse.Namespace:
    """The options with what was not typed, for the model's checkpoint.

    Sets `model`, `swept`, the weights to measure, and `choice`, those of the file that is written.
    """
    from checkpoints import bundled_model_path
    from checkpoints.quantized_formats import quantization_of
    from jaxserve.loading.hub import locate

    given = vars(options)
    chosen = {
        name: value if given[name] is None else given[name]
        for name, value in (QUICK if options.quick else SWEEP).items()
    }
    typed, model = options.quantization, options.model_path or str(bundled_model_path())
    if typed is None:
        folder = locate(EngineConfig(model=model)).model
        swept = [AS_STORED] if quantization_of(folder) else [AS_STORED, "int8", "int4"]
    else:
        swept = typed
    names = [None if name == AS_STORED else name for name in swept]
    choice = [None] if typed is None else names
    return argparse.Namespace(**given | chosen, model=model, swept=names, choice=choice)


def run(options: argparse.Namespace) -> int:
    """Search, print a line a candidate, write the best; 1 when none is within the limits."""
    full = settled(options)
    _check(full)
    return _finish(search(full), full)


def _check(options: argparse.Namespace) -> None:
    """What would only be noticed after the search."""
    require("matplotlib", "the plot of the frontier")
    if options.output.suffix in (".png", ".json"):
        raise ValidationError("output", str(options.output), "a name that ends in .yaml")
    for name in ("ttft_ms", "itl_ms"):
        if not getattr(options, name) > 0:
            raise ValidationError(name, getattr(options, name), "above 0")
    for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunks", "block_sizes"):
        if any(value < 1 for value in getattr(options, name)):
            raise ValidationError(name, getattr(options, name), "numbers above 0")
    at_least(options, "num_prompts")
    if not 1 <= options.min_len <= options.max_len:
        raise ValidationError("min_len", options.min_len, "from 1 to --max-len")
    from jaxserve.bench.workloads import require_room

    config = EngineConfig(model=options.model, max_model_len=options.max_model_len)
    require_room(2 * options.max_len, config)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.open("a").close()


def _finish(trials: Sequence[Trial], options: argparse.Namespace) -> int:
    _plot(trials, options, options.output.with_suffix(".png"))
    rows = [asdict(trial) for trial in trials]
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")
    best = best_of(trials, options.choice)
    if best is None:
        print(
            f"no candidate is within the limits: raise --ttft-ms ({options.ttft_ms:g}) or "
            f"--itl-ms ({options.itl_ms:g})",
            file=sys.stderr,
        )
        return 1
    options.output.write_text(config_text(best, options))
    print(f"best: {best.tokens_per_second:.1f} tok/s with {best.sizes.text()}")
    faster = best_of(trials)
    if faster is not None and faster.sizes.quantization not in options.choice:
        print(
            f"{faster.tokens_per_second:.1f} tok/s with {faster.sizes.text()}: to choose from "
            "rounded weights too, type --quantization"
        )
    names = (options.output.with_suffix(suffix).name for suffix in (".png", ".json"))
    print(f"written: {options.output}, {', '.join(names)}")
    print(f"jaxserve serve --config {options.output}")
    return 0


def search(options: argparse.Namespace) -> list[Trial]:
    """Coordinate by coordinate: each size is varied with the best of the others."""
    trials: list[Trial] = []
    print("| sizes | tok/s | p99 ttft, ms | p99 itl, ms | within limits |\n|---|---|---|---|---|")
    middle = options.max_num_seqs[len(options.max_num_seqs) // 2]
    budgets = options.max_num_batched_tokens
    budget = max(budgets[len(budgets) // 2], middle)
    start = Sizes(middle, budget, quantization=options.swept[0])
    for step in range(4):
        best = best_of(trials, options.choice)
        for sizes in neighbours(best.sizes if best else start, options, step):
            if sizes in (trial.sizes for trial in trials):
                continue
            trial = measure(sizes, options)
            trials.append(trial)
            print(
                f"| {sizes.text()} | {trial.tokens_per_second:.1f} | {trial.p99_ttft_ms:.1f} "
                f"| {trial.p99_itl_ms:.1f} | {'yes' if trial.allowed else 'no'} |",
                flush=True,
            )
        if step == 0:
            print(f"\n{table(trials, options)}\n")
    return trials


def table(trials: Sequence[Trial], options: argparse.Namespace) -> str:
    """Weights by slots: output tok/s and p99 time between tokens of each, Markdown."""
    slots = sorted({trial.sizes.max_num_seqs for trial in trials})
    lines = [
        f"| tok/s (p99 itl, ms) by slots | {' | '.join(map(str, slots))} |",
        "|---" * (len(slots) + 1) + "|",
    ]
    for weights in options.swept:
        cells = {
            trial.sizes.max_num_seqs: f"{trial.tokens_per_second:.1f} ({trial.p99_itl_ms:.1f})"
            + ("" if trial.allowed else " beyond the limits")
            for trial in trials
            if trial.sizes.quantization == weights
        }
        name = "weights as stored" if weights is None else f"{weights} weights"
        lines.append(f"| {name} | {' | '.join(cells.get(one, '') for one in slots)} |")
    return "\n".join(lines)


def neighbours(sizes: Sizes, options: argparse.Namespace, step: int) -> Iterator[Sizes]:
    """Candidates that differ from `sizes` in the size that a step varies; `sizes` is the first."""
    yield sizes
    if step == 0:
        for weights in options.swept:
            for seqs in options.max_num_seqs:
                budget = max(sizes.max_num_batched_tokens, seqs)
                yield Sizes(seqs, budget, quantization=weights)
    elif step == 1:
        for budget in options.max_num_batched_tokens:
            yield replace(sizes, max_num_batched_tokens=max(budget, sizes.max_num_seqs))
    elif step == 2:
        for chunk in options.prefill_chunks:
            yield replace(sizes, prefill_chunk=chunk)
    else:
        for block in options.block_sizes:
            yield replace(sizes, block_size=block)


def best_of(trials: Sequence[Trial], weights: Sequence[str | None] | None = None) -> Trial | None:
    """The fastest candidate within the limits, of some weights or of all (None)."""
    allowed = [
        trial
        for trial in trials
        if trial.allowed and (weights is None or trial.sizes.quantization in weights)
    ]
    return max(allowed, key=lambda trial: trial.tokens_per_second, default=None)


def frontier(trials: Sequence[Trial], latency: str) -> list[Trial]:
    """The candidates that no other beats in both, by rising latency (a field of `Trial`)."""
    best: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (getattr(t, latency), -t.tokens_per_second)):
        if not best or trial.tokens_per_second > best[-1].tokens_per_second:
            best.append(trial)
    return best


def measure(sizes: Sizes, options: argparse.Namespace) -> Trial:
    """Run the workload, all of it queued at once, on an engine of these sizes."""
    from jaxserve.bench.workloads import fixed, uniform
    from jaxserve.llm import LLM

    llm = LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype=options.dtype,
        load_format=options.load_format,
        max_model_len=options.max_model_len,
        compile_in_background=False,
        compile_ahead=1000,
        **asdict(sizes),
    )
    vocab = llm.model_config.vocab_size
    items = uniform(options.num_prompts, options.min_len, options.max_len, vocab, options.seed)
    for work in (fixed(2, 8, 8, vocab, options.seed), items):  # the first warms up
        prompts = [item.prompt_token_ids for item in work]
        outputs = llm.generate(prompts, [item.params() for item in work], use_tqdm=False)
    times = [output.metrics for output in outputs]
    llm.close()
    ttft, itl, ends = [], [], []
    for item, t in zip(items, times):
        assert t is not None and t.first_scheduled_time is not None
        assert t.first_token_time is not None and t.last_token_time is not None
        ttft.append(1e3 * (t.first_token_time - t.first_scheduled_time))
        if item.output_len > 1:
            decode = t.last_token_time - t.first_token_time
            itl.append(1e3 * decode / (item.output_len - 1))
        ends.append(t.last_token_time)
    begin = min(t.arrival_time for t in times if t is not None)
    worst = percentile(ttft, 99), percentile(itl, 99)
    return Trial(
        sizes,
        sum(item.output_len for item in items) / (max(ends) - begin),
        *worst,
        allowed=worst[0] <= options.ttft_ms and worst[1] <= options.itl_ms,
    )


def config_text(best: Trial, options: argparse.Namespace) -> str:
    """The YAML of `jaxserve serve --config`."""
    lines = [
        f"# jaxserve tune: {best.tokens_per_second:.1f} output tok/s; p99 ttft "
        f"{best.p99_ttft_ms:.1f} ms (limit {options.ttft_ms:g}), p99 itl {best.p99_itl_ms:.1f} ms "
        f"(limit {options.itl_ms:g})"
    ]
    if options.model_path is not None:
        lines.append(f"model: {json.dumps(options.model_path)}")
    for name, value in asdict(best.sizes).items():
        if value is not None:
            lines.append(f"{name.replace('_', '-')}: {value}")
    return "\n".join(lines) + "\n"


def _plot(trials: Sequence[Trial], options: argparse.Namespace, path: Path) -> None:
    """A PNG: each candidate's throughput against its latency, the frontier, and the limits."""
    from jaxserve.observability.figures import new_figure

    figure = new_figure(10, 4)
    panels = (("p99_ttft_ms", options.ttft_ms), ("p99_itl_ms", options.itl_ms))
    for axis, (name, limit) in zip(figure.subplots(1, 2), panels):
        for allowed, marker in ((True, "o"), (False, "x")):
            chosen = [trial for trial in trials if trial.allowed is allowed]
            axis.plot(
                [getattr(trial, name) for trial in chosen],
                [trial.tokens_per_second for trial in chosen],
                marker,
                label="within both limits" if allowed else "beyond one",
            )
        best = frontier(trials, name)
        axis.plot(
            [getattr(trial, name) for trial in best],
            [trial.tokens_per_second for trial in best],
            color="grey",
            zorder=0,
            label="frontier",
        )
        for trial in trials:
            label = "/".join(str(size) for size in asdict(trial.sizes).values() if size)
            axis.annotate(label, (getattr(trial, name), trial.tokens_per_second), fontsize=7)
        if limit <= 2 * max(getattr(trial, name) for trial in trials):
            axis.axvline(limit, color="grey", linestyle="--", label="limit")
        axis.set(xlabel=name.replace("_", " "), ylabel="output tok/s")
        axis.legend(fontsize=7)
    figure.suptitle("candidates as slots/token budget/prefill chunk/page size")
    figure.savefig(path, dpi=120)
