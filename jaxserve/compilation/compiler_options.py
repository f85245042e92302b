"""Options of XLA for the engine's programs: where it must not follow its defaults, and why.

All names are those of XLA in JAX 0.10.2, 0.11.2 and 0.12.0.1; `accepted` leaves out, with a
warning, what another version does not know: a rename costs speed and never a start.

**CUDA graphs** (XLA: command buffers). A step is one graph where every launch in it is of a kind
that may be captured: the host then starts one thing, not some hundreds of kernels. XLA records a
graph when a program first runs, which is before serving (`Runner.warm_up`), and drops the graphs of
ALL programs whenever one is compiled, to record them again at their next run. On a GPU nothing is
therefore compiled while requests are served (`defaults.py`). A graph holds the addresses of its
operands: the state is donated and stays where it is, and what does move (the blob, the result) is
set anew in the graph. While a profiler listens XLA launches kernel by kernel.

**Autotuning.** Where the device is there, XLA times several kernels for each matrix product,
Triton's and cuBLAS's, and takes the fastest. The results lie beside the compilation cache, by JAX's
option `jax_persistent_cache_enable_xla_caches`: a product is timed once, not once a program.

**One program** (`Backends.one_program`). What is timed may end otherwise at the next start, so
nothing is: all products have one tiling, with the device as without it, and K is not divided in a
kernel. Libraries, whose kernels may divide tiles of one product in several ways, are not called.
That no kernel adds by atomics is read in what was compiled (`prove_step --deterministic`): with
XLA's option against them, `xla_gpu_exclude_nondeterministic_ops`, its own kernels are refused.

**Overlap of sums over devices.** XLA starts a sum and goes on until its result is needed. Here that
is at once: the norm behind attention or MLP reads it, and a step has no other work meanwhile. So
the latency-hiding scheduler, which would move work between start and end of a sum, has none to
move. It is off: its other orders hold buffers for longer. A TPU's compiler has its own. It is on
where a step brings weights from the host's memory (`streams`): without it XLA begins most of these
copies where their product waits for them.
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

logger = logging.getLogger(__name__)

Options = dict[str, str | bool]  # numbers as text, which XLA parses

# What may be in a graph: kernels that XLA generates and Triton's (FUSION), Mosaic's (CUSTOM_CALL)
# and the libraries' products. Not loops and branches: steps of greedy and filtered requests have
# none (`prove_step` counts them), and a loop of a rarer program (logprobs of a prompt) ends one
# graph and begins another. The collectives of tensor parallelism are in a graph where that is asked
# for (`graph_collectives`): no machine with several GPUs has run them in one.
GRAPH_COMMANDS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION")
COLLECTIVES = "COLLECTIVES"
# launches; XLA's default of 5 would start most of what is between two collectives one by one
LEAST_GRAPH = "2"
# the highest: candidates get operands of the same numbers, and one with another result is not taken
AUTOTUNE_LEVEL = "4"
# This pass counts each in-place write as a new KV pool, so with a pool of a third of the device it
# finds the memory exceeded, and computes matrix products and gathers twice to save memory that the
# program never uses.
REMATERIALIZATION = "rematerialization"
# This pass divides K where a product has few tiles, and adds the parts in a kernel of its own where
# none of XLA's follows. `pallas_kernels.linear` divides for the kernels that follow here.
SPLIT_K = "splitk-rewriter"
# 72 KiB of shared memory: every GPU since Ampere has them
TILES = "block_m:64 block_n:128 block_k:64 split_k:1 num_stages:3 num_warps:4 num_ctas:1"
PINNED: Options = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_cublas_fallback": False,
    "xla_gpu_override_gemm_autotuner": TILES,
    # what other programs have timed is not taken either
    "xla_gpu_per_fusion_autotune_cache_dir": "",
}
UNKNOWN = ("No such compile option", "is not a valid enum value")


def compiler_options(
    platform: str,
    *,
    divides_products: bool = False,
    graph_collectives: bool = False,
    one_program: bool = False,
    streams: bool = False,
) -> Options:
    """What differs from XLA's defaults on a platform, or must not differ from them.

    Args:
        platform: JAX platform name: "cpu", "gpu", "cuda" or "tpu".
        divides_products: whether the linear layers choose the parts of their products themselves.
        graph_collectives: whether collectives of several GPUs may be in a CUDA graph.
        one_program: whether a program has to sum each row in one order, at every start.
        streams: whether a step brings weights from the host's memory.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    commands = (*GRAPH_COMMANDS, COLLECTIVES) if graph_collectives else GRAPH_COMMANDS
    disabled = [REMATERIALIZATION, SPLIT_K] if divides_products else [REMATERIALIZATION]
    return {
        "xla_disable_hlo_passes": ",".join(disabled),
        "xla_gpu_enable_command_buffer": ",".join(commands),
        "xla_gpu_graph_min_graph_size": LEAST_GRAPH,
        "xla_gpu_autotune_level": AUTOTUNE_LEVEL,
        "xla_gpu_enable_latency_hiding_scheduler": streams,
        **(PINNED if one_program else {}),
    }


def accepted(options: Options) -> Options:
    """The options that the XLA of this process knows; the others are named in a warning."""
    program = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), jnp.int32))
    known: Options = {}
    for name, value in options.items():
        try:
            program.compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if not any(text in str(error) for text in UNKNOWN):
                raise
            logger.warning(
                "jax %s does not know the compiler option %s=%s, which is left out: %s",
                jax.__version__,
                name,
                value,
                error,
            )
        else:
            known[name] = value
    return known
