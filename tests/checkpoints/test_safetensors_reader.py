"""The safetensors reader against the safetensors library, and damaged checkpoints."""

from __future__ import annotations

import json
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import CheckpointError, SafetensorsReader, bundled_model_path
from checkpoints import safetensors_reader as module

INDEX = "model.safetensors.index.json"
RNG = np.random.default_rng(0)
TENSORS = {
    "a": RNG.normal(size=(6, 10)).astype(np.float32),
    "b": RNG.normal(size=(4, 3, 5)).astype(np.float16),
    "c": RNG.normal(size=(7,)).astype(ml_dtypes.bfloat16),
    "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def save_raw(file: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def save_sharded(folder: Path) -> Path:
    files = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    for file in set(files.values()):
        save_file({n: TENSORS[n] for n, f in files.items() if f == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def test_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsReader(tmp_path) as reader:
        assert set(reader.tensors) == set(TENSORS)
        read = {name: reader.read(name) for name in TENSORS}
    for name, expected in TENSORS.items():
        assert read[name].dtype == expected.dtype
        np.testing.assert_array_equal(read[name], expected)
        assert read[name].flags.c_contiguous and read[name].flags.writeable


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_slices_equal_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(module, "_PAGE_BYTES", block_bytes)  # 1: parts of rows are read alone
    save_file(TENSORS, tmp_path / "model.safetensors")
    parts = [slice(None), slice(0, 2), slice(1, 4), slice(3, None), slice(2, 2), slice(1, 99)]
    with SafetensorsReader(tmp_path) as reader:
        for name in ("a", "b"):
            for rows in parts:
                np.testing.assert_array_equal(reader.read(name, (rows,)), TENSORS[name][rows])
                for columns in parts:
                    found = reader.read(name, (rows, columns))
                    np.testing.assert_array_equal(found, TENSORS[name][rows, columns])
                    assert found.flags.c_contiguous


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_reads_to_a_given_place_and_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    save_file(TENSORS, tmp_path / "model.safetensors")
    between = np.zeros((3, 5, 10), np.float64)
    with SafetensorsReader(tmp_path) as reader:
        reader.read_into("a", (), between[:, 1:3])  # two rows an index
        np.testing.assert_array_equal(between[:, 1:3], TENSORS["a"].reshape(3, 2, 10))
        assert not between[:, 0].any() and not between[:, 3:].any()
        reader.read_into("a", (slice(2, 5), slice(1, 4)), between[:, 0, :3])
        np.testing.assert_array_equal(between[:, 0, :3], TENSORS["a"][2:5, 1:4])
        with pytest.raises(ValueError, match="do not fill"):
            reader.read_into("a", (), between)


def test_reads_one_slice_and_not_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    asked: list[int] = []
    original = SafetensorsReader._read_bytes

    def counting(self: SafetensorsReader, info: Any, skip: int, out: np.ndarray) -> None:
        asked.append(out.nbytes)
        original(self, info, skip, out)

    monkeypatch.setattr(SafetensorsReader, "_read_bytes", counting)
    monkeypatch.setattr(module, "_PAGE_BYTES", 12)
    with SafetensorsReader(tmp_path) as reader:
        assert not asked
        reader.read("a", (slice(2, 4),))
        reader.read("a", (slice(2, 4), slice(7, 9)))
        reader.read("a", (slice(2, 4), slice(7, 10)))
    assert asked == [2 * 10 * 4] * 2 + [3 * 4] * 2


class SlowFile(FileIO):
    """Lets other threads run between finding a place and reading there."""

    def seek(self, offset: int, whence: int = 0) -> int:
        place = super().seek(offset, whence)
        time.sleep(0.0005)
        return place


def test_threads_read_where_there_is_no_preadv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows and macOS."""
    monkeypatch.delattr(os, "preadv", raising=False)
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    names = ["a", "b"] * 20
    with SafetensorsReader(tmp_path) as reader, ThreadPoolExecutor(4) as threads:
        reader._files[file].close()
        reader._files[file] = SlowFile(file)
        for name, found in zip(names, threads.map(reader.read, names)):
            np.testing.assert_array_equal(found, TENSORS[name])
        with open(file, "r+b") as handle:
            handle.truncate(reader.tensors["a"].offset + 3)
        with pytest.raises(CheckpointError, match="ends inside it"):
            reader.read("a")


def test_unsupported_slices(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        with pytest.raises(ValueError, match="step 2"):
            reader.read("a", (slice(0, 6, 2),))
        with pytest.raises(ValueError, match="first two axes"):
            reader.read("b", (slice(None), slice(None), slice(1, 2)))
        with pytest.raises(CheckpointError, match="no such tensor"):
            reader.read("nothing")


def test_sharded_checkpoint_and_single_file(tmp_path: Path) -> None:
    with SafetensorsReader(save_sharded(tmp_path)) as reader:
        assert sorted(reader.tensors) == ["a", "b", "c"]
        for name in reader.tensors:
            np.testing.assert_array_equal(reader.read(name), TENSORS[name])
    with SafetensorsReader(tmp_path / "two.safetensors") as reader:
        assert sorted(reader.tensors) == ["b", "c"]


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    (save_sharded(tmp_path) / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors: missing") as caught:
        SafetensorsReader(tmp_path)
    assert caught.value.path == tmp_path / "two.safetensors"


def test_index_names_a_missing_tensor(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="says it is in this file") as caught:
        SafetensorsReader(tmp_path)
    assert caught.value.tensor == "c"


def test_a_name_in_two_files(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match="has it too") as caught:
        SafetensorsReader(tmp_path)
    assert caught.value.tensor == "b"


@pytest.mark.parametrize("text", ['{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{}"])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        SafetensorsReader(tmp_path)


def test_index_may_not_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../one.safetensors"}}')
    with pytest.raises(CheckpointError, match="leaves the folder"):
        SafetensorsReader(tmp_path)


def test_folder_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        SafetensorsReader(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        SafetensorsReader(tmp_path / "nowhere")


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsReader(tmp_path)


def test_file_that_shrinks_while_open(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    with SafetensorsReader(tmp_path) as reader:
        with open(file, "r+b") as handle:
            handle.truncate(reader.tensors["a"].offset + 3)
        with pytest.raises(CheckpointError, match="ends inside it") as caught:
            reader.read("a")
        assert caught.value.tensor == "a"


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": ENTRY | {"dtype": "F8_E4M3"}}, "dtype F8_E4M3"),
        ({"x": ENTRY | {"shape": [3]}}, "8 bytes for shape"),
        ({"x": ENTRY | {"shape": [-2]}}, "malformed"),
        ({"x": ENTRY | {"shape": 2}}, "malformed"),
        ({"x": {"dtype": "F32"}}, "malformed"),
        ({"x": 3}, "malformed"),
        ({"x": ENTRY | {"data_offsets": [8, 0]}}, "-8 bytes for shape"),
        ({"x": ENTRY | {"data_offsets": [8, 16]}}, "truncated"),
        ({"x": ENTRY, "y": ENTRY}, "overlap"),
        ({"x": ENTRY | {"dtype": ["F32"]}}, "malformed"),
    ],
)
def test_malformed_header_entries(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    file = save_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsReader(tmp_path)
    assert caught.value.path == file
    assert caught.value.tensor in header


@pytest.mark.parametrize("text", [b"[]", b"not json", b"\xff\xfe"])
def test_unreadable_header(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="unreadable header"):
        SafetensorsReader(tmp_path)


def test_bundled_model_path_is_in_the_package() -> None:
    assert bundled_model_path().parent.name == "checkpoints"
