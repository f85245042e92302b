"""GGUF: what a file says comes back, by the definitions that the writer of the tests follows."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from checkpoints import CheckpointError
from checkpoints.gguf import GGUFFile, GGUFReader, gguf_config
from checkpoints.gguf import blocks as ggml
from checkpoints.gguf.names import row_order
from checkpoints.quantized.quantized_matrix import ELEMENTS, INT4_ZERO
from tests.checkpoints.gguf.files import TYPES, interleaved, recorded_blocks, write_gguf
from tests.checkpoints.gguf.record import HALVES

RNG = np.random.default_rng(0)
METADATA = {
    "general.architecture": "qwen2",
    "qwen2.context_length": 64,
    "qwen2.embedding_length": 256,
    "qwen2.block_count": 1,
    "qwen2.feed_forward_length": 512,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "b\udc80"],
    "tokenizer.ggml.add_bos_token": True,
}


def one(kind: str) -> dict[str, tuple[str, np.ndarray]]:
    matrix = RNG.normal(size=(6, 512)).astype(np.float32)
    return {
        "blk.0.ffn_down.weight": (kind, matrix),
        "token_embd.weight": ("F32", np.ones((5, 256), np.float32)),
    }


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(tmp_path: Path, kind: str) -> None:
    wanted = write_gguf(tmp_path / "m.gguf", METADATA, one(kind))["blk.0.ffn_down.weight"]
    with GGUFReader(tmp_path / "m.gguf") as reader:
        name = "model.layers.0.mlp.down_proj.weight"
        assert reader.tensors[name].shape == (6, 512)
        assert (name in reader.matrices) == (kind not in ("F32", "F16"))
        found = np.empty((6, 512), np.float32)
        reader.read_into(name, (), found)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
        # two rows an index, and some columns
        part = np.empty((2, 2, 32), np.float32)
        reader.read_into(name, (slice(1, 5), slice(32, 64)), part)
        np.testing.assert_allclose(part.reshape(4, 32), wanted[1:5, 32:64], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_as_ggufs_own_dequantiser_reads_them(kind: str) -> None:
    type = next(type for type in ggml.TYPES.values() if type.name == kind)
    blocks, wanted = recorded_blocks(kind)
    assert (blocks.shape[1], wanted.shape[1]) == (type.bytes, type.elements)
    stored, rows = type.stored, blocks[:, None]
    assert stored is not None and type.read_elements is not None and type.read_scales is not None
    elements = type.read_elements(rows)
    assert elements.dtype == ELEMENTS[stored.kind]
    found = elements.astype(np.float32)
    if stored.kind == "int4" and stored.zeros == "none":
        found -= INT4_ZERO
    found *= np.repeat(type.read_scales(rows), stored.group or 0, axis=2)
    if type.read_offsets is not None:
        found -= np.repeat(type.read_offsets(rows), stored.group or 0, axis=2)
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("number", "told"), [*ggml.OTHER_TYPES.items(), (99, "of number 99, which is not known,")]
)
def test_types_that_are_not_read_are_named(tmp_path: Path, number: int, told: str) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, METADATA, one("F32"))
    named = b"blk.0.ffn_down.weight" + struct.pack("<IQQI", 2, 512, 6, 0)
    raw = file.read_bytes()
    assert named in raw
    file.write_bytes(raw.replace(named, named[:-4] + struct.pack("<I", number)))
    with pytest.raises(CheckpointError, match=f"ggml's type {told} is not read; these are: F32"):
        GGUFReader(file)


def test_metadata_and_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", METADATA, one("Q8_0"))
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b\udc80"]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    config = gguf_config(file)
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["head_dim"] == 64
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == 5


def test_row_order_undoes_the_converter() -> None:
    weight = np.arange(24).reshape(24, 1)
    np.testing.assert_array_equal(interleaved(weight, 3)[row_order(24, 3)], weight)


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, METADATA, one("Q4_K"))
    whole = file.read_bytes()
    for length in [*range(0, 700, 13), len(whole) // 2, len(whole) - 64]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            GGUFReader(file)


@pytest.mark.parametrize(
    ("at", "raw", "message"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (8, struct.pack("<Q", 1 << 60), "truncated, or damaged"),
        (16, struct.pack("<Q", 1 << 60), "truncated, or damaged"),
        (24, struct.pack("<Q", 1 << 62), "truncated, or damaged"),
    ],
)
def test_damaged_headers(tmp_path: Path, at: int, raw: bytes, message: str) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, METADATA, one("F16"))
    damaged = bytearray(file.read_bytes())
    damaged[at : at + len(raw)] = raw
    file.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError, match=message):
        GGUFReader(file)


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, METADATA, one("Q8_0"))
    container = GGUFFile(file)
    damaged = bytearray(file.read_bytes())
    at = container.tensors["blk.0.ffn_down.weight"].offset
    damaged[at : at + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(bytes(damaged))
    with GGUFReader(file) as reader, pytest.raises(CheckpointError, match="not finite"):
        reader.read_into("model.layers.0.mlp.down_proj.weight", (), np.empty((6, 512), np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture='gpt2'.*one of llama, qwen2"),
        ({"qwen2.block_count": "two"}, "qwen2.block_count='two'"),
        ({"qwen2.expert_count": 8}, "expert_count=8"),
        ({"qwen2.rope.scaling.type": "longrope"}, "rope.scaling.type='longrope'"),
        ({"qwen2.rope.dimension_count": 32}, "rope.dimension_count=32"),
    ],
)
def test_configs_that_are_not_read(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", METADATA | changes, one("F32"))
    with pytest.raises(CheckpointError, match=message):
        gguf_config(GGUFFile(tmp_path / "m.gguf"))


def test_llama3_rope_is_found_by_its_divisors(tmp_path: Path) -> None:
    metadata = {key.replace("qwen2", "llama"): value for key, value in METADATA.items()}
    metadata |= {"general.architecture": "llama", "llama.rope.freq_base": 500000.0}
    inverse = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    wave, factors = 2 * np.pi / inverse, []
    for length in wave:
        if length < 8192 / 4:
            factors.append(1.0)
        elif length > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / length - 1) / 3
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    tensors = one("F32") | {"rope_freqs.weight": ("F32", np.array(factors, np.float32))}
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    scaling = gguf_config(GGUFFile(tmp_path / "m.gguf"))["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert (scaling["factor"], scaling["original_max_position_embeddings"]) == (8.0, 8192)
    tensors["rope_freqs.weight"] = ("F32", np.array(factors, np.float32) * 1.5)
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        gguf_config(GGUFFile(tmp_path / "m.gguf"))
