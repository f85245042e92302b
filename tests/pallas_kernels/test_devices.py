"""The choice of backends: explicit for every known device, refused for the others."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels import (
    AttentionShape,
    KernelError,
    choose_backends,
    choose_matmul_backend,
    require_backend,
    storage_dtype,
)
from pallas_kernels.backends import mosaic_tpu
from pallas_kernels.native import Availability
from pallas_kernels.quantized_matmul.coverage import MatmulShape

HOPPER = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H800", "NVIDIA H20"]
HOPPER += ["NVIDIA GH200 480GB", "NVIDIA H100-SXM5-80GB"]
AMPERE_ADA_BLACKWELL = ["NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA GeForce RTX 4090"]
AMPERE_ADA_BLACKWELL += ["NVIDIA B200", "NVIDIA RTX PRO 6000 Blackwell Server Edition"]
OTHER = ["Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080 Ti"]


@pytest.mark.parametrize("kind", HOPPER)
def test_hopper_runs_mosaic_gpu(kind):
    for platform in ("gpu", "cuda"):
        backends = choose_backends(kind, platform)
        assert (backends.decode, backends.prefill, backends.write_kv) == (
            "mosaic_gpu",
            "mosaic_gpu",
            "xla",
        )


@pytest.mark.parametrize("kind", AMPERE_ADA_BLACKWELL)
def test_ampere_ada_and_blackwell_run_triton(kind):
    backends = choose_backends(kind, "gpu")
    assert (backends.decode, backends.prefill, backends.write_kv) == ("triton", "triton", "xla")
    assert "Ampere, Ada or Blackwell" in backends.reason
    small = kind not in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200")
    assert backends.tuning.decode.block_tokens == (32 if small else 64)


@pytest.mark.parametrize(
    ("kind", "platform"),
    [(kind, "gpu") for kind in OTHER],
)
def test_everything_else_runs_xla_and_says_why(kind, platform):
    backends = choose_backends(kind, platform)
    assert (backends.decode, backends.prefill, backends.write_kv) == ("xla", "xla", "xla")
    assert backends.reason


@pytest.mark.parametrize(
    ("kind", "capability", "decode", "block_tokens"),
    [
        ("NVIDIA H300", "9.0", "mosaic_gpu", None),
        ("NVIDIA GB10", "12.1", "triton", 32),
        ("NVIDIA Thor", "11.0", "triton", 64),
        ("NVIDIA GeForce RTX 3050", "8.6", "triton", 32),
        ("NVIDIA A900", "8.0", "triton", 64),
        ("NVIDIA GeForce RTX 2060", "7.5", "xla", None),
    ],
)
def test_gpus_of_unknown_names_are_chosen_by_compute_capability(
    kind, capability, decode, block_tokens
):
    backends = choose_backends(kind, "gpu", capability=capability)
    assert backends.decode == decode
    assert getattr(backends.tuning.decode, "block_tokens", None) == block_tokens
    shape = AttentionShape(head_dim=128)
    require_backend("decode", decode, kind, "gpu", shape, capability)
    if decode != "xla":
        with pytest.raises(KernelError, match=decode):
            require_backend("decode", decode, kind, "gpu", shape)


@pytest.mark.parametrize("available", [True, False])
def test_the_cpu_runs_native_kernels_where_they_can_be_built(available, monkeypatch):
    state = Availability(available, "AVX512" if available else "no C++ compiler is on PATH")
    monkeypatch.setattr("pallas_kernels.backends.native.availability", lambda: state)
    monkeypatch.setattr("pallas_kernels.native.availability", lambda: state)
    monkeypatch.setattr("pallas_kernels.native.drawback", lambda widens: None)
    backends = choose_backends("cpu", "cpu")
    name = "native" if available else "xla"
    assert (backends.decode, backends.prefill, backends.linear) == (name, name, name)
    assert backends.write_kv == name
    assert state.reason in backends.reason


def test_a_cpu_with_avx2_alone_widens_by_xla(monkeypatch):
    """Quantised weights that are not multiplied as integers."""
    state = Availability(True, "native code for AVX2")
    features = frozenset({"avx2", "fma"})
    monkeypatch.setattr("pallas_kernels.backends.native.availability", lambda: state)
    monkeypatch.setattr("pallas_kernels.native.build.cpu_features", lambda: features)
    for dtype in ("bfloat16", "float32"):
        shape = AttentionShape(query_dtype=jnp.dtype(dtype))
        backends = choose_backends("cpu", "cpu", shape)
        assert (backends.decode, backends.prefill, backends.linear) == ("native",) * 3
        assert choose_backends("cpu", "cpu", shape, integers=True).linear == "native"
    backends = choose_backends("cpu", "cpu", integers=False)
    assert backends.linear == "xla"
    assert "without AVX512" in backends.reason
    require_backend("linear", "native", "cpu", "cpu", shape)


def test_a_cpu_without_avx2_runs_xla_unless_told_otherwise(monkeypatch):
    state = Availability(True, "native code for this CPU")
    monkeypatch.setattr("pallas_kernels.backends.native.availability", lambda: state)
    monkeypatch.setattr("pallas_kernels.native.build.cpu_features", lambda: frozenset({"sse2"}))
    backends = choose_backends("cpu", "cpu", integers=True)
    assert (backends.decode, backends.prefill, backends.linear) == ("xla", "xla", "xla")
    assert "without AVX2" in backends.reason
    for operation in ("decode", "prefill", "linear"):
        require_backend(operation, "native", "cpu", "cpu", AttentionShape())


def test_native_linear_layers_refuse_float16_by_name():
    shape = AttentionShape(query_dtype=jnp.dtype("float16"))
    backends = choose_backends("cpu", "cpu", shape)
    assert backends.linear == "xla"
    assert "float16" in backends.reason


def test_tpus_run_mosaic_tpu_where_it_covers_the_model():
    covered = AttentionShape(128, 16, 4, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), kv_heads=8)
    for kind, cores in (("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1)):
        backends = choose_backends(kind, "tpu", covered)
        assert (backends.decode, backends.prefill, backends.write_kv) == ("mosaic_tpu",) * 3
        assert backends.decode_and_write == "mosaic_tpu"
        assert backends.tuning.decode.cores == backends.tuning.prefill.cores == cores
    small = replace(covered, head_dim=64)  # stored with 128 elements a head
    assert choose_backends("TPU v6 lite", "tpu", small).decode == "mosaic_tpu"
    require_backend("decode", "mosaic_tpu", "TPU v6 lite", "tpu", small)
    backends = choose_backends("TPU v6 lite", "tpu", replace(covered, head_dim=320))
    assert (backends.decode, backends.prefill, backends.write_kv) == ("xla",) * 3
    assert backends.decode_and_write is None
    assert "head_dim=384" in backends.reason
    backends = choose_backends(
        "TPU v6 lite", "tpu", replace(covered, kv_heads=1, pool_dtype=jnp.dtype("int8"))
    )
    assert (backends.decode, backends.write_kv) == ("mosaic_tpu", "xla_pages")
    assert backends.decode_and_write is None


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"pool_dtype": jnp.dtype("float32")}, "kv_pages.dtype=float32"),
        ({"head_dim": 72}, "head_dim=72"),
        ({"page_size": 8}, "page_size=8"),
        ({"pool_dtype": jnp.dtype("uint8")}, "kv_pages.dtype=uint8"),
    ],
)
def test_shapes_that_the_hopper_kernel_lacks_go_to_the_next_with_a_reason(shape, named):
    covered = AttentionShape(128, 16, 8, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))
    assert choose_backends("NVIDIA H200", "gpu", covered).decode == "mosaic_gpu"
    backends = choose_backends("NVIDIA H200", "gpu", replace(covered, **shape))
    assert backends.decode == "triton"
    assert named in backends.reason


@pytest.mark.parametrize("pool", ["int8", "float8_e4m3fn"])
def test_the_hopper_kernels_read_8_bit_pages(pool):
    shape = AttentionShape(128, 16, 8, jnp.dtype(pool), jnp.dtype("bfloat16"))
    backends = choose_backends("NVIDIA H200", "gpu", shape)
    assert (backends.decode, backends.prefill) == ("mosaic_gpu", "mosaic_gpu")


@pytest.mark.parametrize("kind", [*HOPPER[:1], *AMPERE_ADA_BLACKWELL])
def test_gpus_with_triton_run_the_fused_kernels_of_a_layer(kind):
    covered = AttentionShape(128, 16, 8, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))
    backends = choose_backends(kind, "gpu", covered)
    assert (backends.rotate_and_write, backends.residual_norm) == ("triton", "triton")
    assert backends.linear == "gpu" and backends.divides_products
    # 8-bit pages need scales: rotation and write are two operations there
    backends = choose_backends(kind, "gpu", replace(covered, pool_dtype=jnp.dtype("int8")))
    assert (backends.rotate_and_write, backends.residual_norm) == (None, "triton")
    backends = choose_backends(kind, "gpu", covered)
    assert backends.sharded(whole_blocks=False) == backends


def test_several_cpus_keep_native_linear_layers_where_parts_are_whole_blocks():
    chosen = choose_backends("cpu", "cpu")
    assert chosen.sharded(whole_blocks=True) == chosen
    native = replace(chosen, linear="native")
    sharded = native.sharded(whole_blocks=False)
    assert (sharded.linear, sharded.experts, sharded.matmul) == ("xla", "xla", ("xla",))
    assert "are no whole blocks" in sharded.reason


def test_other_devices_have_no_fused_kernels():
    for kind, platform in (("cpu", "cpu"), ("TPU v5 lite", "tpu"), ("Tesla V100-SXM2-16GB", "gpu")):
        backends = choose_backends(kind, platform)
        assert (backends.rotate_and_write, backends.residual_norm) == (None, None)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_shapes_that_no_gpu_kernel_covers_run_xla(kind):
    backends = choose_backends(kind, "gpu", AttentionShape(head_dim=512))
    assert (backends.decode, backends.prefill) == ("xla", "xla")
    assert "the triton prefill kernel does not cover head_dim=512" in backends.reason


@pytest.mark.parametrize(
    ("kind", "platform"), [("AMD Instinct MI300X", "rocm"), ("Apple M4", "METAL"), ("gpu", "gpu")]
)
def test_unknown_devices_are_refused(kind, platform):
    with pytest.raises(KernelError, match=kind):
        choose_backends(kind, platform)


def test_the_best_backend_that_covers_a_product_is_chosen():
    bfloat16 = jnp.dtype("bfloat16")
    shape = MatmulShape(4096, 4096, "int4", 128, bfloat16, "float")
    assert choose_matmul_backend("NVIDIA H200", "gpu", shape) == "mosaic_gpu"
    assert choose_matmul_backend("NVIDIA A100-SXM4-80GB", "gpu", shape) == "triton"
    assert choose_matmul_backend("TPU v6 lite", "tpu", shape) == "mosaic_tpu"
    assert choose_matmul_backend("cpu", "cpu", shape) == "xla"
    odd = replace(shape, inputs=4096 + 128)
    assert choose_matmul_backend("NVIDIA H200", "gpu", odd) == "mosaic_gpu"
    assert choose_matmul_backend("TPU v6 lite", "tpu", odd) == "xla"
    assert choose_matmul_backend("NVIDIA H200", "gpu", replace(shape, inputs=128)) == "triton"


def test_heads_are_padded_where_the_device_wants_them_so():
    bfloat16 = jnp.dtype("bfloat16")
    shape = AttentionShape(64, 128, 8, bfloat16, bfloat16, kv_heads=8)
    on_tpu = choose_backends("TPU v5 lite", "tpu", shape)
    assert (on_tpu.decode, on_tpu.stored_head_dim(64)) == ("mosaic_tpu", 128)
    assert on_tpu.stored_head_dim(128) == 128
    assert choose_backends("NVIDIA H200", "gpu", shape).stored_head_dim(80) == 80


def test_storage_dtype():
    assert storage_dtype("bfloat16", "cpu") == jnp.uint16
    assert storage_dtype(jnp.bfloat16, "gpu") == jnp.bfloat16
    assert storage_dtype("float16", "cpu") == jnp.float16
    assert storage_dtype(jnp.float32, "tpu") == jnp.float32
    assert storage_dtype("int8", "cpu") == jnp.int8
    assert storage_dtype("float8_e4m3fn", "cpu") == jnp.uint8
    assert storage_dtype("float8_e4m3fn", "gpu") == jnp.float8_e4m3fn
    with pytest.raises(KernelError, match="int4"):
        storage_dtype("int4", "cpu")


@pytest.mark.parametrize(
    ("kv_heads", "pool", "token_scales", "decode", "head_rows"),
    [
        (1, "bfloat16", False, "mosaic_tpu", 2),
        (4, "bfloat16", False, "mosaic_tpu", 2),
        (8, "bfloat16", False, "mosaic_tpu", 1),
        (4, "float8_e4m3fn", False, "mosaic_tpu", 2),
        (8, "int8", True, "mosaic_tpu", 1),
        (4, "int8", True, "xla", 1),
    ],
)
def test_heads_of_256_are_two_rows_on_a_tpu_where_they_fill_no_tile(
    kv_heads, pool, token_scales, decode, head_rows
):
    shape = AttentionShape(
        head_dim=256,
        page_size=128,
        group=2,
        pool_dtype=jnp.dtype(pool),
        query_dtype=jnp.dtype("bfloat16"),
        kv_heads=kv_heads,
        token_scales=token_scales,
    )
    backends = choose_backends("TPU v6 lite", "tpu", shape)
    assert (backends.decode, backends.prefill, backends.head_rows) == (decode, decode, head_rows)
    assert choose_backends("NVIDIA L4", "gpu", shape).head_rows == 1
    refusal = mosaic_tpu.covers(replace(shape, kv_heads=4, head_rows=1, token_scales=False))
    assert refusal is not None and "two rows" in refusal.allowed
