"""The emulated matrix unit against exact arithmetic, and what the native layers ask of it."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from benchmarks.verify.tile_counts import __main__ as command
from benchmarks.verify.tile_counts.counting import Caches, Emulator, Layer, Prompt
from pallas_kernels.native import build

SMALLEST = np.float32(2.0**-126)  # normal number
CACHES = Caches((48 << 10, 2 << 20, 16 << 20), (12, 16, 16))


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler is on PATH")
    return Emulator()


def flushed(x: np.float32) -> np.float32:
    """A subnormal number is zero of its sign."""
    return np.copysign(np.float32(0), x) if abs(x) < SMALLEST else x


def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a b + c, rounded once to nearest even."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    distance = [abs(Fraction(float(x)) - exact) for x in around]
    closest = [x for x, d in zip(around, distance) if d == min(distance)]
    even = [x for x in closest if x.view(np.uint32) % 2 == 0]
    return flushed((even or closest)[0])


def documented(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The first rows of c + a . b: even and odd elements apart, then their sum, then c."""
    out = c.copy()
    for m in range(a.shape[0]):
        for n in range(16):
            sums = [np.float32(0), np.float32(0)]
            for k in range(32):
                x, y = flushed(a[m, k]), flushed(b[k // 2, 2 * n + k % 2])
                sums[k % 2] = fused(x, y, sums[k % 2])
            out[m, n] = flushed(flushed(c[m, n]) + flushed(sums[0] + sums[1]))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0, -66])
def test_a_product_of_floats_is_rounded_as_documented(emulator: Emulator, exponent: int) -> None:
    """Also where products and sums are subnormal, and operands are."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(2, 16, 32)).astype(np.float32) * np.float32(2.0**exponent)
    wide[:, :, 5] = np.float32(2.0**-130)
    stored = wide.astype(ml_dtypes.bfloat16)
    c = rng.normal(size=(16, 16)).astype(np.float32) * np.float32(2.0 ** (2 * exponent))
    found = emulator.multiply(0, stored[0], stored[1], c)
    a, b = stored.astype(np.float32)
    np.testing.assert_array_equal(found[:2], documented(a[:2], b, c[:2]))
    assert exponent == 0 or (found == 0).any()


@pytest.mark.slow
@pytest.mark.parametrize(("product", "of_a", "of_b"), [(1, "uint8", "int8"), (2, "int8", "uint8")])
def test_a_product_of_bytes_is_exact(
    emulator: Emulator, product: int, of_a: str, of_b: str
) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 256, (16, 64)).astype(np.uint8).view(t) for t in (of_a, of_b))
    c = rng.integers(-1000, 1000, (16, 16)).astype(np.int32)
    by_input = b.reshape(16, 16, 4).swapaxes(1, 2).reshape(64, 16)  # 4 inputs a word
    wanted = c + a.astype(np.int64) @ by_input.astype(np.int64)
    np.testing.assert_array_equal(emulator.multiply(product, a, b, c), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_product_costs_one_load_of_a_tile(emulator: Emulator, bits: int) -> None:
    layer = Layer(64, 256, 96, bits, 128 if bits == 4 else 256)
    counts = emulator.count(layer, CACHES)
    assert counts.products == layer.ideal_products
    assert counts.loads == counts.products
    assert counts.memory + counts.ahead_memory < 1.7 * (layer.weight_bytes + layer.row_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_results_leave_as_whole_lines(emulator: Emulator, bits: int, gated: bool) -> None:
    """Nothing is copied but gated results, once, while they wait for the rest of a line, and rows
    that are rounded to integers."""
    layer = Layer(64, 256, 128, bits, 128 if bits == 4 else 256, gated, normed=True)
    counts = emulator.count(layer, CACHES)
    waiting = layer.rows * 64 * 2 if gated and bits > 4 else 0
    rounded = layer.rows * layer.depth * {16: 0, 8: 4 + 1, 4: 4}[bits]
    assert (counts.partial_lines, counts.copied) == (0, waiting + rounded)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8])
def test_weights_are_asked_for_all_along(emulator: Emulator, bits: int) -> None:
    """Not only while the first rows pass a panel."""
    layer = Layer(64, 256, 2048, bits, 256)
    counts = emulator.count(layer, CACHES)
    assert counts.asking_steps > 0.8 * counts.products / 4
    assert counts.memory + counts.ahead_memory < 1.2 * (layer.weight_bytes + layer.row_bytes)


@pytest.mark.slow
def test_lines_that_end_inside_a_row_are_counted(emulator: Emulator) -> None:
    assert emulator.count(Layer(32, 256, 48, 16, 256), CACHES).partial_lines == 64


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "context"), [(512, 0), (128, 384)])
def test_keys_and_values_are_packed_once_a_head(
    emulator: Emulator, tokens: int, context: int
) -> None:
    """However many work items of 64 rows there are; queries are packed too, nothing is copied."""
    heads, kv_heads, head_dim = 12, 4, 64
    counts = emulator.count_prompt(Prompt(tokens, context, heads, kv_heads, head_dim))
    keys_and_values = 2 * (tokens + context) * kv_heads
    assert counts.packed_lines == (keys_and_values + tokens * heads) * head_dim // 32
    assert (counts.partial_lines, counts.copied) == (0, 0)


@pytest.mark.slow
def test_outputs_pass_through_memory_once_in_256_tokens(emulator: Emulator) -> None:
    """64 rows that see 1,024 tokens; scores are stored once, a product costs one load."""
    tokens, rows, head_dim, steps = 1024, 64, 64, 4
    counts = emulator.count_prompt(Prompt(16, tokens - 16, 4, 1, head_dim))
    scores, outputs = tokens // 16 * rows // 16, head_dim // 16 * rows // 16
    assert counts.products == scores * head_dim // 32 + outputs * tokens // 32
    assert counts.stores == scores + steps * outputs
    assert counts.loads == counts.products + (steps - 1) * outputs


@pytest.mark.slow
def test_inputs_in_blocks_come_from_memory_once(emulator: Emulator) -> None:
    """Rows that outgrow the second level: sums wait, weights are still read once."""
    layer = Layer(512, 1600, 64, 16, 1600)
    counts = emulator.count(layer, CACHES)
    assert counts.products == layer.ideal_products and counts.loads > counts.products
    assert counts.memory + counts.ahead_memory < 1.3 * (layer.weight_bytes + layer.row_bytes)


@pytest.mark.slow
def test_a_cache_that_is_too_small_shows(emulator: Emulator) -> None:
    layer = Layer(64, 256, 96, 16, 256)
    small = Caches((12 * 64 * 4, 16 * 64 * 4, 16 * 64 * 4), (12, 16, 16))
    assert emulator.count(layer, small).memory > 2 * emulator.count(layer, CACHES).memory


def test_the_layers_of_a_model() -> None:
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    shape |= {"num_key_value_heads": 4, "vocab_size": 32000}
    found = {layer.name: (layer.depth, layer.outputs) for layer in command.linear_layers(shape)}
    assert found == {
        "qkv": (768, 1280),
        "output": (768, 768),
        "gate and up": (768, 4096),
        "down": (2048, 768),
        "lm head": (768, 32000),
    }


@pytest.mark.slow
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shapes", "llama-125m", "--rows", "16", "--bits", "8"]
    assert command.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(" | ")[0].strip("| ") for line in lines[-5:]]
    assert names == ["qkv", "output", "gate and up", "down", "lm head"]


def test_wrong_caches_are_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["--cache-kib", "50", "2048", "16384"])
