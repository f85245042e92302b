#!/usr/bin/env python3
"""Proof, without an accelerator, that the engine's whole step compiles for one.

    python -m benchmarks.verify.prove_step --device h200 --shape llama-3-8b
    python -m benchmarks.verify.prove_step --device h200 --shape llama-3-70b --tensor-parallel 8
    python -m benchmarks.verify.prove_step --full --markdown docs/memory.md
    python -m benchmarks.verify.prove_step --device h200 a100 --layers 2 --deterministic
    python -m benchmarks.verify.prove_step --device h200 --layers 9 --streamed 8

Compiles decode and mixed steps of a model shape with the kernels that the engine chooses on each
kind of device, and reports what the executables need: weights, KV pool, temporaries, and whether
the pool stays in place; what they launch: kernels a layer, loops, copies, CUDA graphs; and what
decode steps move and the least time of that, an estimate. With `--deterministic` it compiles the
one program that such an engine has, which fails where it may sum a row in several orders. With
`--streamed` the weights of so many of the last layers are in the host's memory, and a program fails
that does not begin to bring them ahead, or has more than a few of them at once. Exit
codes: 0 all pass, 1 one fails, 3 this machine lacks a compiler.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.launch_table import launch_table
from benchmarks.memory_table import StepProof, memory_document
from benchmarks.time_table import time_table
from benchmarks.verify.image_shapes import IMAGE_SHAPES, with_layers
from benchmarks.verify.prove import (
    KINDS,
    Cost,
    Proof,
    Requirements,
    absent_mesh,
    attempt,
    device_memory,
    device_name,
    ended,
    markdown,
    platform_of,
    prove,
    write_json,
)
from benchmarks.verify.prove.gpu_targets import GPU_TARGETS, CompilerMissingError
from benchmarks.verify.prove.streamed import moved_first
from jaxserve.compilation.compiler_options import compiler_options
from jaxserve.config.device_defaults import device_defaults
from jaxserve.config.engine_config import KV_CACHE_DTYPES, ONLINE_QUANTIZATIONS
from jaxserve.execution.buffers import DeviceBuffers
from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.device_weights import bytes_on_device
from jaxserve.execution.features import FAST, FULL_DECODE, Facts, draws_on, make_features
from jaxserve.execution.features.images import Images
from jaxserve.execution.memory_plan import (
    CacheBudget,
    plan_num_pages,
)
from jaxserve.execution.parameters import split_model
from jaxserve.execution.programs import MOST_SPECIAL, lanes_for, wanted_shapes
from jaxserve.execution.step import StepSpec, run_step
from jaxserve.execution.step_inputs import BlobLayout, ResultLayout
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.models.kv_cache import KVCache, KVFormat
from jaxserve.models.linear import LinearForm
from jaxserve.models.mlp import GATED_IN_PLACE
from jaxserve.models.moe import MoeConfig
from jaxserve.models.quant_array import QuantArray
from jaxserve.models.streamed import HELD
from jaxserve.models.weights import abstract_model
from jaxserve.parallel import ShardingRules
from jaxserve.parallel.mesh import is_divided
from jaxserve.parallel.placement import HOST
from pallas_kernels import Backends, choose_backends
from pallas_kernels.backends import resolve
from pallas_kernels.quantized_matmul.splits import dequantizes
from pallas_kernels.route import RouteShape

MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 256
DTYPE = "bfloat16"
UTILIZATION = 0.9  # of a device's memory: the engine's default
TEMPORARIES = 2**30  # kept free of pages
LEAST_STREAMED = 5  # layers of which a loop makes two turns
MAX_LOGPROBS = 20  # the engine's default
FEATURE_SETTINGS = {Images.setting: 1}  # of those features that an engine has by default
STEPS = {
    "decode[1]": StepShape(1, 0, 0, FAST, 0),
    "decode[64]": StepShape(64, 0, 0, FAST, 0),
    "decode[16]": StepShape(16, 0, 0, FAST, 0),
    "decode[256]": StepShape(256, 0, 0, FAST, 0),
    "full[256]": StepShape(256, 0, 0, FULL_DECODE, MOST_SPECIAL),
    "mixed[256,2048]": StepShape(256, 2048, lanes_for(2048, 256), FAST, 0),
}
# shape, devices that share its heads and weights, kinds: what docs/memory.md shows
FULL = (
    ("llama-3-8b", 1, ("h200", "h100", "a100", "v6e", "v5p")),
    ("llama-3-8b", 4, ("v5e",)),
    ("llama-3-70b", 8, ("h200", "h100", "a100", "v5p")),
)
# kernels of a layer on one GPU: products 4, norms with the residual 2, rotation with the write,
# activation; attention of decode rows, where Triton merges their pieces in a kernel of its own; and
# prefill, for which XLA cuts the queries of both kinds apart and joins the outputs around Triton's
OTHER_KERNELS = 8
# in the place of a dense MLP's two products and activation: the router's product, `route`, two
# grouped products, the sum of a token's experts, and what XLA pads and converts for them
SPARSE_KERNELS = 5
# more where the sort of many tokens is XLA's
SORT_KERNELS = 16
# more where rows are rounded to 8 bits: attention's output; of experts what both products read. The
# norms and the activation round what they write
ROUNDED_KERNELS, ROUNDED_EXPERTS = 1, 2
# more where a kernel of this package reads what attention gave of both kinds of rows; a product of
# XLA's joins them as it reads
JOINED_KERNELS = 1
# more in a step with images: of their embeddings, and of angles by several axes of positions; where
# rows of prefill may look ahead, of what the branch takes and gives as well
IMAGE_KERNELS, AHEAD_KERNELS = 2, 6
# more where each product's 4-bit weight is dequantised before it: that, and the scales' order
DEQUANTIZED_KERNELS = 8
# more over several devices: two sums, and on a GPU what adds the parts of a product before each, on
# a TPU what adds each to the stream
SPREAD_KERNELS = 4
# a sparse layer on one TPU, of tokens that the grouped products gather by themselves:
# `split_rotate`, attention, `route`, two grouped products, four products of XLA's or two layers of
# quantised weights, and what stands around these; and which rows live, once a step, behind the
# first layer's attention: of two layers alone it counts as theirs
TPU_SPARSE_KERNELS, TPU_LIVE_KERNELS = 14, 4
TPU_GATHERED = 256  # of such tokens: Mixtral's fit
# a dense layer of quantised weights: four products, `split_rotate`, attention, and the orders of
# what attention takes and gives; of two layers alone attention's list of work counts as theirs
TPU_QUANTIZED_KERNELS, TPU_LIST_KERNELS = 8, 13
# a layer of 16 bits, whose heads the kernel rotates: four products, `split_rotate`, attention, and
# orders and slices around these; more where norms stand behind attention and the MLP. A sparse
# layer with a prefill region, of which sorts, gathers and what brings results back are XLA's. Of
# two layers alone attention's list of work counts as theirs: these are not limited
TPU_KERNELS, TPU_NORMS_BEHIND, TPU_SORTED_KERNELS = 12, 4, 73
TPU_HEADS = 128  # a multiple of which a head has there
# the one program of a deterministic engine: slots, and tokens of prompts
ONE_PROGRAM = wanted_shapes(64, 256, smallest_bucket=1)[0]
FULL_STEPS = ("decode[256]", "mixed[256,2048]")  # the widest programs


@dataclass(frozen=True, slots=True)
class Setting:
    """The steps of one model that are compiled, and the devices."""

    kind: str
    devices: int
    shape: str
    layers: int | None
    num_pages: int | None
    page_size: int
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    slots: int = MAX_NUM_SEQS
    max_model_len: int = MAX_MODEL_LEN
    graph_collectives: bool = False
    deterministic: bool = False
    streamed: int = 0  # last layers whose weights are in the host's memory

    def config(self) -> ModelConfig:
        """The model, with all of its layers or the first few."""
        settings = with_layers((SHAPES | IMAGE_SHAPES)[self.shape], self.layers)
        return model_config_of(settings).spread_over(self.devices)

    def mesh(self) -> Mesh:
        """A mesh with the engine's axes over devices that are not there."""
        devices = absent_mesh(self.kind, self.devices).devices.reshape(1, self.devices)
        return Mesh(devices, ("data", "model"))

    def backends(self) -> Backends:
        """The kernels that the engine chooses."""
        platform = platform_of(self.kind)
        kv_format = KVFormat.of(self.kv_cache_dtype, DTYPE)
        shape = kv_format.attention_shape(
            self.config(), DTYPE, platform, self.page_size, self.devices
        )
        chosen = choose_backends(device_name(self.kind), platform, shape)
        if self.deterministic:
            return chosen.in_one_order()
        return chosen.sharded(whole_blocks=True) if is_divided(self.devices) else chosen

    def cache(self) -> KVCache:
        """The engine's KV cache, of the pages that are given."""
        cache = KVCache.of(
            self.config(),
            KVFormat.of(self.kv_cache_dtype, DTYPE),
            self.backends(),
            platform=platform_of(self.kind),
            page_size=self.page_size,
        )
        return cache.with_pages(self.num_pages or 0)


def abstract_leaves(
    config: ModelConfig, mesh: Mesh, dtype: str, form: LinearForm, streamed: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """The model's structure and its parameters as ShapeDtypeStructs with their shardings."""
    return split_model(abstract_model(config, mesh, dtype, form, streamed=streamed))


def streamed_leaves(setting: Setting) -> list[bool]:
    """Of each operand that holds parameters, whether it lies in the host's memory.

    An absent GPU has no memory of that kind, so a CPU's operands are asked.
    """
    here = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "model"))
    form = LinearForm.of(setting.backends(), setting.quantization)
    leaves = abstract_leaves(setting.config(), here, DTYPE, form, setting.streamed)[1]
    return [leaf.sharding.memory_kind == HOST for leaf in leaves]


def quantized_sizes(
    config: ModelConfig, mesh: Mesh, dtype: str, form: LinearForm
) -> frozenset[int]:
    """Elements of one device's part of each weight that is quantised, and of one expert."""
    sizes = set()
    rules = ShardingRules.for_model(mesh, config)
    model: Any = abstract_model(config, mesh, dtype, form)
    for _, variable in nnx.to_flat_state(nnx.split(model)[1]):
        value = variable.get_value()
        if isinstance(value, QuantArray):
            divided = any(rules.spec(variable.get_metadata("logical_axes")))
            size = math.prod(value.shape) // (mesh.size if divided else 1)
            experts = value.shape[0] if variable.get_metadata("role") == "experts" else 1
            sizes |= {size, size // experts}
    return frozenset(sizes)


def abstract_state(setting: Setting, mesh: Mesh) -> DeviceState:
    """The engine's device state as ShapeDtypeStructs with their shardings."""
    assert setting.num_pages
    return state_shape(setting).abstract(mesh)


def state_shape(setting: Setting) -> StateShape:
    """The sizes of the device state of an engine without features that keep any."""
    return StateShape(setting.cache(), setting.slots, setting.max_model_len, features={})


def with_pages(setting: Setting, weights: int) -> Setting:
    """The setting with the pages that the engine would plan, where none are given."""
    if setting.num_pages is not None:
        return setting
    tables = state_shape(setting).table_bytes
    share = int(device_memory(setting.kind) * UTILIZATION) - (weights + tables + TEMPORARIES)
    pages = plan_num_pages(
        CacheBudget(share, "gpu_memory_utilization", UTILIZATION),
        setting.cache().page_bytes(setting.devices),
        useful=setting.slots * -(-setting.max_model_len // setting.page_size) + 1,
    )
    return replace(setting, num_pages=pages)


def device_bytes(leaves: Any) -> int:
    """Bytes of one device's share of abstract arrays, those in the host's memory left out."""
    return bytes_on_device(jax.tree.leaves(leaves))


def step_cost(
    setting: Setting, config: ModelConfig, step: StepShape, weights: int, numbers: int
) -> Cost:
    """Weights and the full pool are read once, the embedding table by row; chunks begin at 0.

    `weights` are bytes, `numbers` what they stand for.
    """
    rows, itemsize = step.num_decode + step.num_prefill, jnp.dtype(DTYPE).itemsize
    table = config.vocab_size * config.hidden_size // setting.devices
    head = 0 if config.tie_word_embeddings else table
    layers = numbers - table - head
    products = rows * layers + (step.num_decode + step.num_lanes) * table
    row = config.num_layers * config.num_heads * config.head_dim // setting.devices
    assert setting.num_pages
    pool_tokens = setting.num_pages * setting.page_size
    chunk = step.num_prefill // max(step.num_lanes, 1)
    seen = pool_tokens + step.num_prefill * (chunk + 1) // 2
    token = setting.cache().token_bytes // setting.devices
    moved = weights - head * itemsize + token * (pool_tokens + step.num_prefill)
    return Cost(2 * products + 4 * row * seen, moved, "shapes")


def dequantizes_weights(setting: Setting, backends: Backends, step: StepShape) -> bool:
    """Whether a step has so many rows that its 4-bit weights are dequantised, on purpose."""
    every = resolve("matmul", backends.matmul[0]).converts_every
    rows = step.num_decode + step.num_prefill
    return setting.quantization == "int4" and every is not None and dequantizes(rows, every)


def requirements(
    setting: Setting, config: ModelConfig, backends: Backends, step: StepShape, pool_bytes: int
) -> Requirements:
    """The demands on the step: matrix instructions, few kernels, the pool in place."""
    used: dict[str, Any] = {}
    if not backends.one_program:
        used["paged_decode"] = resolve("decode", backends.decode)
    if step.num_prefill:
        used["paged_prefill"] = resolve("prefill", backends.prefill)
    launches = [one.launches for one in used.values()]
    is_dequantized = dequantizes_weights(setting, backends, step)
    if setting.quantization is not None and not is_dequantized:
        used["quantized_matmul"] = resolve("matmul", backends.matmul[0])
    instructions = {kernel: one.instruction for kernel, one in used.items() if one.instruction}
    a_layer = None
    counts_kernels = backends.rotate_and_write and not backends.one_program
    is_sparse, alone = isinstance(config, MoeConfig), setting.devices == 1
    # a layer of quantised weights, of decode rows alone, that gates in its product
    plain = not is_sparse and config.hidden_act in GATED_IN_PLACE
    plain = plain and setting.quantization is not None and not step.num_prefill
    if (alone or plain) and counts_kernels and None not in launches:
        a_layer = OTHER_KERNELS + sum(filter(None, launches))
        integers = setting.quantization == "int8"
        if integers or (setting.quantization == "fp8" and "mosaic_gpu" in backends.matmul):
            a_layer += ROUNDED_KERNELS
        if integers and is_sparse:
            a_layer += ROUNDED_EXPERTS
        if isinstance(config, MoeConfig):
            covers = resolve("route", backends.route[0]).covers
            shape = RouteShape(step.num_decode + step.num_prefill, config.num_experts)
            a_layer += SPARSE_KERNELS + (0 if covers(shape) is None else SORT_KERNELS)
        if config.images is not None and Images.name in step.features:
            a_layer += IMAGE_KERNELS + (AHEAD_KERNELS if config.images.sees_whole else 0)
        if setting.quantization is not None and step.num_decode and step.num_prefill:
            a_layer += JOINED_KERNELS
        if is_dequantized:
            a_layer += DEQUANTIZED_KERNELS
    is_tpu = platform_of(setting.kind) == "tpu"
    if is_tpu and alone and setting.quantization is None and config.num_layers > 2:
        if is_sparse and step.num_prefill:
            a_layer = TPU_SORTED_KERNELS
        elif not (is_sparse or step.num_prefill or config.head_dim % TPU_HEADS):
            gated = config.hidden_act in GATED_IN_PLACE
            a_layer = TPU_KERNELS + (0 if gated else TPU_NORMS_BEHIND)
    if is_tpu and not step.num_prefill:
        if is_sparse and alone and step.num_decode <= TPU_GATHERED:
            a_layer = TPU_SPARSE_KERNELS + (TPU_LIVE_KERNELS if config.num_layers == 2 else 0)
        elif plain:
            counts_list = alone and config.num_layers == 2
            a_layer = TPU_QUANTIZED_KERNELS + (TPU_LIST_KERNELS if counts_list else 0)
    if a_layer is not None and not alone:
        a_layer += SPREAD_KERNELS
    return Requirements(
        instructions=instructions,
        a_layer=a_layer,
        own_kernel=bool(instructions),
        in_place=pool_bytes,
        max_temporaries=pool_bytes // 2,
        capacity=device_memory(setting.kind),
        # where the engine turns this off; a TPU's compiler may when the device is nearly full
        recomputed=0 if platform_of(setting.kind) == "gpu" else None,
        one_order=setting.deterministic,
    )


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.children_user


def program_of(kind: str, step: StepShape) -> StepShape:
    """The program that an engine runs for a step: none has fewer rows than the device's least."""
    least = device_defaults(platform_of(kind)).smallest_bucket
    return replace(step, num_decode=max(step.num_decode, least))


def prove_step(setting: Setting, step: StepShape) -> StepProof:
    """Compile the engine's program of one step for absent devices and judge it.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
    """
    begin, asked = cpu_seconds(), step
    step = program_of(setting.kind, asked)
    config, mesh, backends = setting.config(), setting.mesh(), setting.backends()
    form = LinearForm.of(backends, setting.quantization)
    structure, leaves = abstract_leaves(config, mesh, DTYPE, form, setting.streamed)
    weights = device_bytes(leaves)
    plain = abstract_leaves(config, mesh, DTYPE, LinearForm.of(backends, None))[1]
    numbers = device_bytes(plain) // jnp.dtype(DTYPE).itemsize
    setting = with_pages(setting, weights)
    assert setting.num_pages
    facts = Facts(
        config.vocab_size,
        MAX_LOGPROBS,
        config.hidden_size,
        step.num_prefill,
        config,
        draws_on(mesh, backends),
    )
    features = make_features(facts, FEATURE_SETTINGS.get)
    layout = BlobLayout(step, features, facts, setting.page_size)
    spec = StepSpec(
        config=config,
        features=features,
        layout=layout,
        result=ResultLayout(step, features, facts),
        cache=setting.cache(),
        max_num_seqs=setting.slots,
        mesh=mesh,
    )
    state = abstract_state(setting, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    pool = device_bytes(state.kv)
    parallel = f", {setting.devices} devices" if setting.devices > 1 else ""
    stored = "" if setting.kv_cache_dtype == "auto" else f", {setting.kv_cache_dtype} KV cache"
    weights_in = "" if setting.quantization is None else f", {setting.quantization} weights"
    one = ", deterministic" if setting.deterministic else ""
    if setting.streamed:
        one += f", {setting.streamed} layers on the host"
    of_model = f"{setting.shape}, {config.num_layers} layers{parallel}{weights_in}{stored}{one}"
    name = f"{of_model}, {asked.name}"
    wanted = requirements(setting, config, backends, step, pool)
    if "quantized_matmul" in wanted.instructions:
        # a kernel multiplies the weights as they are stored: nothing else may write them
        wanted = replace(wanted, quantized=quantized_sizes(config, mesh, DTYPE, form))

    run: Callable[..., Any] = partial(run_step, spec, structure)
    if setting.streamed:
        on_host = streamed_leaves(setting)
        brought = sum(x.size * x.dtype.itemsize for x, there in zip(leaves, on_host) if there)
        wanted = replace(
            wanted,
            a_layer=None,  # loops have the layers
            max_temporaries=HELD * brought // setting.streamed + TEMPORARIES,
            fetches=2 * sum(on_host),  # of two layers a turn
        )
        if platform_of(setting.kind) == "gpu":
            run = moved_first(run, on_host)
            wanted = replace(wanted, capacity=device_memory(setting.kind) + brought)

    def compilation() -> Proof:
        return prove(
            name,
            run,
            leaves,
            DeviceBuffers(features, mesh).arrays,
            state,
            jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=everywhere),
            mesh=mesh,
            kind=setting.kind,
            wanted=wanted,
            cost=step_cost(setting, config, step, weights, numbers),
            layers=config.num_layers,
            compiler_options=compiler_options(
                platform_of(setting.kind),
                divides_products=backends.divides_products,
                graph_collectives=setting.graph_collectives,
                one_program=backends.one_program,
                streams=setting.streamed > 0,
            ),
            donate_argnums=2,
            out_shardings=(jax.tree.map(lambda s: s.sharding, state), everywhere, {}),
        )

    proof = attempt(name, setting.kind, compilation)
    return StepProof(
        shape=setting.shape,
        layers=config.num_layers,
        devices=setting.devices,
        step=asked.name,
        backends=(backends.decode, backends.prefill if step.num_prefill else None),
        pool_tokens=setting.num_pages * setting.page_size,
        weights=weights,
        pool=pool,
        proof=proof,
        cpu_seconds=cpu_seconds() - begin,
        blob=4 * layout.size,
        quantization=setting.quantization,
        rows=None if step.num_prefill else asked.num_decode,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all models and devices of the docs")
    parser.add_argument("--device", nargs="+", choices=KINDS, default=["h200"])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-3-8b"])
    parser.add_argument("--step", nargs="+", choices=STEPS, help="programs; all if not given")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument(
        "--streamed", type=int, default=0, help="last layers whose weights are on the host"
    )
    parser.add_argument("--num-pages", type=int, help="KV pages a layer; what fits if not given")
    parser.add_argument("--page-size", type=int, help="tokens a page; the device's if not given")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument(
        "--quantization", choices=ONLINE_QUANTIZATIONS, help="of the linear layers' weights"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="absent devices")
    parser.add_argument(
        "--graph-collectives", action="store_true", help="sums over GPUs are in the CUDA graphs"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the one program of a deterministic engine"
    )
    parser.add_argument("--markdown", type=Path, help="also write the memory tables to this file")
    parser.add_argument("--json", type=Path, help="also write all that is known to this file")
    options = parser.parse_args(arguments)
    options.step = options.step or list(FULL_STEPS if options.full else STEPS)
    for name in ("layers", "num_pages", "page_size", "tensor_parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, not {value}")
    if options.streamed:
        shapes = [shape for shape, _, _ in FULL] if options.full else options.shape
        counts = [with_layers((SHAPES | IMAGE_SHAPES)[one], options.layers) for one in shapes]
        most = min(model_config_of(one).num_layers for one in counts)
        if not LEAST_STREAMED <= options.streamed <= most:
            parser.error(
                f"--streamed is 0, or {LEAST_STREAMED} (fewer have no loop of two turns) to the "
                f"{most} layers, not {options.streamed}"
            )
    return options


def default_page_size(kind: str) -> int:
    """Tokens of a page where the engine is told none."""
    capability = None
    if kind in GPU_TARGETS:
        capability = "{}.{}".format(*GPU_TARGETS[kind].capability)
    return device_defaults(platform_of(kind), capability).page_size


def settings(options: argparse.Namespace) -> list[Setting]:
    """The plans that the options ask for: every shape on every device, or the list of the docs."""
    models = [(shape, options.tensor_parallel, options.device) for shape in options.shape]
    return [
        Setting(
            kind,
            devices,
            shape,
            options.layers,
            options.num_pages,
            options.page_size or default_page_size(kind),
            options.kv_cache_dtype,
            options.quantization,
            graph_collectives=options.graph_collectives,
            deterministic=options.deterministic,
            streamed=options.streamed,
        )
        for shape, devices, kinds in (FULL if options.full else models)
        for kind in kinds
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the proofs; 0 when all pass, 1 when one fails, 3 when this machine cannot compile."""
    options = parse(arguments)
    # compilation is on the host; without this JAX would look for a driver
    jax.config.update("jax_platforms", "cpu")
    steps: list[StepProof] = []
    missing: list[str] = []
    for setting in settings(options):
        try:
            wanted = [STEPS[name] for name in options.step]
            for step in [ONE_PROGRAM] if setting.deterministic else wanted:
                steps.append(prove_step(setting, step))
                proof = steps[-1].proof
                print(f"{proof.device}: {proof.name}: {proof.seconds:.0f} s", file=sys.stderr)
                if options.markdown:  # after every step: an interrupted run leaves what it has
                    options.markdown.write_text(memory_document(steps))
        except CompilerMissingError as error:
            missing.append(f"cannot prove anything for {setting.kind} here: {error}")
    proofs = [step.proof for step in steps]
    if steps:
        tables = (markdown(proofs), launch_table(steps), time_table(steps), memory_document(steps))
        print("\n".join([f"jax {jax.__version__}\n", *tables]))
    if options.json:
        write_json(options.json, proofs)
    return ended(proofs, missing)


if __name__ == "__main__":
    sys.exit(main())
