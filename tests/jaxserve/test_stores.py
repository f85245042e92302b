"""Models in stores: the same weights on any mesh, whole or not at all, and judged when read."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import CheckpointError, TensorMismatchError
from checkpoints.store import RECORD_FILE, is_store, read_record
from checkpoints.store.orbax import array_file
from checkpoints.store.publish import partial_folder
from checkpoints.store.reader import restore_store
from checkpoints.store.writer import write_store
from jaxserve.errors import ValidationError
from jaxserve.jobs.convert import convert
from tests.command_line import output_of

ROOT = Path(__file__).parents[2]
ARRAYS = {
    "a": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b.values": np.arange(256, dtype=np.uint8).reshape(16, 16),
    "b.scale": np.linspace(0, 1, 16, dtype=np.float32),
}


def wanted(**changes: Any) -> dict[str, Any]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    made = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for n, a in ARRAYS.items()}
    for name, shape in changes.items():
        made[name] = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    out = tmp_path / "store"
    write_store(out, ARRAYS, about={"x": 1}, small_files={"config.json": b"{}"})
    return out


def test_arrays_come_back_and_the_record_says_what_they_are(store: Path) -> None:
    found = restore_store(store, wanted())
    assert all((np.asarray(found[name]) == array).all() for name, array in ARRAYS.items())
    record = read_record(store)
    assert is_store(store) and record.about == {"x": 1} and not record.source
    assert record.leaves()["a"].shape == (20, 30)
    assert not partial_folder(store).exists()


def test_arrays_are_mapped_from_their_files(store: Path) -> None:
    found = restore_store(store, wanted(), mapped=True)
    assert all((found[name] == array).all() for name, array in ARRAYS.items())
    assert not any(array.flags.writeable or array.flags.owndata for array in found.values())
    other = wanted()
    other["a"] = jax.ShapeDtypeStruct((20, 30), np.int32, sharding=other["a"].sharding)
    with pytest.raises(CheckpointError, match=r"a.*of float32, not int32: convert again"):
        restore_store(store, other, mapped=True)


def test_what_is_cut_for_several_devices_is_not_mapped(store: Path) -> None:
    (place,) = store.rglob("a/zarr.json")
    about = json.loads(place.read_text())
    about["chunk_grid"]["configuration"]["chunk_shape"] = [10, 30]
    place.write_text(json.dumps(about))
    assert array_file(place.parents[1], "a") is None
    assert array_file(place.parents[1], "b.values") is not None


def largest(store: Path) -> Path:
    files = [file for file in (store / "weights").rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def test_damage_is_one_clear_error(store: Path) -> None:
    file = largest(store)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        restore_store(store, wanted())
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointError, match="checksum"):
        restore_store(store, wanted())
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        restore_store(store, wanted())
    file.write_bytes(content)
    with pytest.raises(TensorMismatchError, match=r"1 unexpected: a"):
        restore_store(store, {k: v for k, v in wanted().items() if k != "a"})
    with pytest.raises(TensorMismatchError, match=r"1 missing: c"):
        restore_store(store, wanted(c=(2, 2)))
    with pytest.raises(TensorMismatchError, match="1 of wrong shape"):
        restore_store(store, wanted(a=(30, 20)))
    restore_store(store, wanted())
    (store / "config.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"config\.json.*checksum"):
        restore_store(store, wanted())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text[: len(text) // 2], "not valid JSON"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version=2"),
        (lambda text: text.replace("jaxserve-orbax", "other"), "not a record"),
        (lambda text: text.replace('"files"', '"fils"'), "damaged"),
        (lambda text: text.replace('"_METADATA"', '"../../_METADATA"'), "leaves the folder"),
    ],
)
def test_a_bad_record_is_refused(store: Path, change: Any, problem: str) -> None:
    file = store / RECORD_FILE
    file.write_text(change(file.read_text()))
    with pytest.raises(CheckpointError, match=problem):
        restore_store(store, wanted())


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not overwritten"):
        write_store(tmp_path / "mine", ARRAYS, about={}, small_files={})
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]


def test_a_store_that_is_there_is_replaced_and_a_run_that_was_ended_goes_on(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoints.store.writer.PART_BYTES", 1)
    written: list[str] = []
    from checkpoints.store import writer

    save = writer.save_arrays

    def ends_at_the_last(folder: Path, arrays: Any) -> None:
        written.append(folder.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        save(folder, arrays)

    monkeypatch.setattr(writer, "save_arrays", ends_at_the_last)
    again = {"about": {"x": 2}, "small_files": {"config.json": b"{}"}, "source": "s"}
    with pytest.raises(KeyboardInterrupt):
        write_store(store, ARRAYS, **again)  # type: ignore[arg-type]
    assert read_record(store).about == {"x": 1}
    write_store(store, ARRAYS, **again)  # type: ignore[arg-type]
    assert written == ["00000", "00001", "00002", "00002"]
    assert read_record(store).about == {"x": 2} and len(read_record(store).parts) == 3
    restore_store(store, wanted())


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from checkpoints import CheckpointError
from checkpoints.store.writer import write_store
from checkpoints.folder_writer import write_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
arrays = {"a": np.zeros((1000, 1000), np.float32)}
for write in (
    lambda out: write_store(out, arrays, about={}, small_files={}),
    lambda out: write_folder(out, arrays.items(), {}),
):
    try:
        write(Path(sys.argv[1]) / "out")
    except CheckpointError as error:
        print(str(error).count("\\n"), "cannot be written" in str(error))
"""


@pytest.mark.slow
def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    said = output_of("-c", FULL_DISK, str(tmp_path))
    assert said.split("\n")[:2] == ["0 True", "0 True"]
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from checkpoints.store import writer
writer.PART_BYTES = 1
out, number = Path(sys.argv[1]), int(sys.argv[2])
if sys.argv[3:] == ["unpublished"]:
    writer.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
arrays = {f"a{i}": np.full((200, 100), number, np.float32) for i in range(6)}
print("begun", flush=True)
writer.write_store(out, arrays, about={"n": number}, small_files={"config.json": b"{}"},
    source=str(number))
"""


def conversion(out: Path, number: int, *words: str) -> subprocess.Popen[str]:
    """A process that writes a store of `number`, its imports behind it."""
    command = [sys.executable, "-c", KILLED, str(out), str(number), *words]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    return child


def stored_number(out: Path) -> int:
    """The number of a store, of which every array holds it alone."""
    number: int = read_record(out).about["n"]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.ShapeDtypeStruct((200, 100), np.float32, sharding=sharding)
    arrays = restore_store(out, {f"a{i}": like for i in range(6)})
    assert all((np.asarray(array) == number).all() for array in arrays.values())
    return number


@pytest.mark.slow
def test_a_killed_conversion_leaves_the_old_store_or_the_new_one(tmp_path: Path) -> None:
    out, rng = tmp_path / "store", random.Random(0)
    with conversion(out, 1) as child:
        start = time.monotonic()
    whole = time.monotonic() - start
    assert child.returncode == 0 and stored_number(out) == 1
    with conversion(out, 2, "unpublished") as child:
        pass
    assert child.returncode == -signal.SIGKILL and stored_number(out) == 1
    kept = 1
    for number in range(3, 9):
        with conversion(out, number) as child:
            time.sleep(rng.uniform(0, 1.02) * whole)
            child.send_signal(signal.SIGKILL)
        found = stored_number(out)
        assert found in (kept, number)
        kept = found


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_engine_of_a_store_says_the_same(
    quantization: str | None, model_folder: Any, make_llm: Any, tmp_path: Path
) -> None:
    from jaxserve import SamplingParams

    folder = model_folder("llama_gqa")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    prompts = [[5, 6, 7, 8, 9], [11, 12]]

    def says(llm: Any) -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    first = make_llm(folder, quantization=quantization)
    first.save(tmp_path / "saved")
    convert(str(folder), tmp_path / "converted", quantization=quantization, use_tqdm=False)
    expected = says(first)
    for name in ("saved", "converted"):
        llm = make_llm(tmp_path / name)
        assert (llm.config.model.quantization or None) == quantization
        assert says(llm) == expected
    with pytest.raises(ValidationError, match="quantization"):
        other = {None: "int8", "int8": "int8"}[quantization]
        if quantization is not None:
            record = tmp_path / "saved" / RECORD_FILE
            record.write_text(
                record.read_text().replace('"quantization": "int8"', '"quantization": null')
            )
        make_llm(tmp_path / "saved", quantization=other)


@pytest.mark.slow
def test_made_up_weights_are_kept_without_a_file_of_weights(
    model_folder: Any, make_llm: Any, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(model_folder("llama_gqa") / "config.json", config)
    made = make_llm(config, load_format="dummy")
    made.save(tmp_path / "saved")
    assert is_store(tmp_path / "saved")
    assert read_record(tmp_path / "saved").about["kv_scales"] is None


@pytest.mark.parametrize("case", ["llama_gqa", "phi3", "qwen3_moe", "gemma2"])
def test_there_and_back_are_the_same_tensors(case: str, model_folder: Any, tmp_path: Path) -> None:
    folder = model_folder(case)
    convert(str(folder), tmp_path / "store", use_tqdm=False)
    assert convert(str(tmp_path / "store"), tmp_path / "back", use_tqdm=False) == tmp_path / "back"
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    before = {name: value for name, value in before.items() if name in after}
    assert before.keys() == after.keys()
    assert all((before[n] == after[n]).all() and before[n].shape == after[n].shape for n in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


MESHES = """
import sys
from pathlib import Path
import jax, numpy as np
from jaxserve.config.engine_config import EngineConfig
from jaxserve.jobs.convert import convert
from jaxserve.loading.engine_build import load_bare
from jaxserve.models.store import named_leaves
folder, out, quantization = sys.argv[1], sys.argv[2], sys.argv[3] or None
convert(folder, out, tensor_parallel_size=8, quantization=quantization, use_tqdm=False)
def values(model):
    # of the two forms of 8-bit integers, the one without 128 added
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}
    return {n: (v ^ 128).view(np.int8) if v.dtype == np.uint8 else v for n, v in leaves.items()}
plain = values(load_bare(EngineConfig(model=folder, quantization=quantization))[0])
for size in (8, 2, 1):
    model, _ = load_bare(EngineConfig(model=out, tensor_parallel_size=size))
    found = values(model)
    assert found.keys() == plain.keys()
    assert all((found[n] == plain[n]).all() for n in plain)
    leaf = next(leaf for name, leaf in named_leaves(model).items() if "mlp.down" in name)
    assert len(leaf.sharding.device_set) == size, leaf.sharding
    print(size, "same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_a_store_of_eight_devices_restores_to_two_and_to_one(
    quantization: str, model_folder: Any, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 128}
    folder = model_folder("llama_gqa", **sizes)
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    words = "-c", MESHES, str(folder), str(tmp_path / "out"), quantization
    said = output_of(*words, env=os.environ | {"XLA_FLAGS": flags})
    assert said.splitlines()[-3:] == ["8 same", "2 same", "1 same"]


@pytest.mark.slow
def test_one_cpu_cuts_the_parts_for_two_devices(model_folder: Any, tmp_path: Path) -> None:
    words = ["convert", str(model_folder("llama_gqa")), str(tmp_path / "out"), "-tp", "2"]
    alone = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-m", "jaxserve", *words], cwd=ROOT, env=alone, check=True)
    (array,) = (tmp_path / "out").rglob("blocks.0.mlp.down.weight/zarr.json")
    told = json.loads(array.read_text())
    cut = told["chunk_grid"]["configuration"]["chunk_shape"]
    assert told["shape"][0] * told["shape"][1] == 2 * cut[0] * cut[1]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4-dynamic", "fp8"])
def test_a_quantised_checkpoint_is_kept_as_it_is_loaded(scheme: str, tmp_path: Path) -> None:
    from checkpoints import bundled_model_path
    from checkpoints.quantize.layer_schemes import uniform_policy
    from jaxserve.config.engine_config import EngineConfig
    from jaxserve.jobs.quantize import quantize
    from jaxserve.loading.engine_build import load_bare
    from jaxserve.models.store import named_leaves, save_model

    source, out = tmp_path / "quantised", tmp_path / "store"
    model = str(bundled_model_path())
    quantize(model, source, uniform_policy(scheme), group=32, use_tqdm=False)
    first, files = load_bare(EngineConfig(model=str(source)))
    save_model(first, out, dtype="float32", model_folder=files.model)
    second, _ = load_bare(EngineConfig(model=str(out)))
    before, after = named_leaves(first), named_leaves(second)
    assert before.keys() == after.keys()
    assert any(leaf.dtype.itemsize < 4 for leaf in before.values())
    for name, leaf in before.items():
        assert leaf.dtype == after[name].dtype
        assert (np.asarray(leaf) == np.asarray(after[name])).all()


def test_output_that_holds_a_model_is_not_overwritten(model_folder: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama_gqa"), tmp_path / "model")
    with pytest.raises(CheckpointError, match="not overwritten"):
        convert(str(model_folder("llama_gqa")), folder, use_tqdm=False)
