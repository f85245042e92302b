"""Reading a checkpoint for llama.cpp: types, shapes, and the order of rotary pairs."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from benchmarks.peers.adapters.checkpoint import interleave_halves, read_tensors, rope_theta

RNG = np.random.default_rng(0)


def write_safetensors(path, tensors):
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int8": "I8"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        begin, data = len(data), data + array.tobytes()
        kind, shape = names[array.dtype.name], list(array.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_all_types_are_read_as_float32(tmp_path):
    values = RNG.standard_normal((3, 5))
    kinds = (ml_dtypes.bfloat16, np.float16, np.float32)
    tensors = {f"t{number}": values.astype(kind) for number, kind in enumerate(kinds)}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    write_safetensors(tmp_path / "b.safetensors", {"row": values[0].astype(np.float32)})
    read = dict(read_tensors(tmp_path))
    assert set(read) == {*tensors, "row"}
    for name, tensor in tensors.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], tensor.astype(np.float32))


def test_other_types_are_refused(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"t": np.zeros(4, np.int8)})
    with pytest.raises(SystemExit, match="I8"):
        list(read_tensors(tmp_path))


def rotate(x, pairs, angles):
    """Rotary embedding of one head: rows `pairs[i]` turn by `angles[i]`."""
    out = x.copy()
    for (a, b), angle in zip(pairs, angles):
        out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        out[b] = x[b] * np.cos(angle) + x[a] * np.sin(angle)
    return out


def test_neighbours_of_the_new_order_are_the_pairs_of_the_old():
    heads, half, width = 3, 4, 6
    weight, x = RNG.standard_normal((heads * 2 * half, width)), RNG.standard_normal(width)
    angles = RNG.standard_normal(half)
    old = (weight @ x).reshape(heads, -1)
    new = (interleave_halves(weight, heads) @ x).reshape(heads, -1)
    for before, after in zip(old, new):
        expected = rotate(before, [(i, i + half) for i in range(half)], angles)
        turned = rotate(after, [(2 * i, 2 * i + 1) for i in range(half)], angles)
        np.testing.assert_allclose(turned[0::2], expected[:half])
        np.testing.assert_allclose(turned[1::2], expected[half:])


def test_rope_theta_is_found_and_scaling_refused():
    assert rope_theta({"rope_theta": 5e5}) == 5e5
    assert rope_theta({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == 1e6
    assert rope_theta({"rope_scaling": None}) == 10000.0
    with pytest.raises(SystemExit, match="yarn"):
        rope_theta({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}})
