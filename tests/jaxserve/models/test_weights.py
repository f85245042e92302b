"""Loading: mismatches, files in parts, dummy weights, memory, and what gets imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import CheckpointError, SafetensorsReader, TensorMismatchError, aligned_empty
from jaxserve.errors import ValidationError
from jaxserve.jobs.convert import convert
from jaxserve.models import Model, load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.registry import FAMILIES
from jaxserve.parallel import make_mesh
from tests.command_line import output_of
from tests.jaxserve.models.dense import empty_cache, run
from tests.tiny_models import make_case

FILE = "model.safetensors"


def load(folder: Path, **options: object) -> Model:
    config = read_model_config(folder)
    return load_model(folder, config, mesh=make_mesh(1), **options)  # type: ignore[arg-type]


def values(model: Model) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {"/".join(map(str, place)): np.asarray(variable[...]) for place, variable in flat}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_case(tmp_path, "llama_biases")


def test_parts_equal_one_file(tmp_path: Path) -> None:
    whole = make_case(tmp_path / "whole", "qwen3")
    parts = make_case(tmp_path / "parts", "qwen3", max_shard_size="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    ours, theirs = values(load(whole)), values(load(parts))
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_fused_layout(folder: Path) -> None:
    """Each KV group holds its query heads, its key and its value; gate and up lie in pairs."""
    saved, model = load_file(folder / FILE), load(folder)
    attention, mlp = model.blocks[1].attention, model.blocks[1].mlp
    prefix = "model.layers.1."
    q = saved[f"{prefix}self_attn.q_proj.weight"].reshape(2, 2, 16, 64)
    k = saved[f"{prefix}self_attn.k_proj.bias"].reshape(2, 16)
    np.testing.assert_array_equal(attention.qkv.weight[...][:, :2], q)
    np.testing.assert_array_equal(attention.qkv.bias[...][:, 2], k)
    np.testing.assert_array_equal(
        mlp.gate_up.weight[...][1::2], saved[f"{prefix}mlp.up_proj.weight"]
    )


def test_a_cpu_keeps_the_memory_that_was_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied: as stored, of several tensors, and in another type."""
    for dtype in ("float32", "bfloat16"):
        read: set[int] = set()

        def recording(*args: object, read: set[int] = read) -> np.ndarray:
            array = aligned_empty(*args)  # type: ignore[arg-type]
            read.add(array.ctypes.data)
            return array

        monkeypatch.setattr("jaxserve.models.sources.aligned_empty", recording)
        leaves = jax.tree.leaves(nnx.state(load(folder, dtype=dtype)))
        assert {leaf.unsafe_buffer_pointer() for leaf in leaves} == read


def test_all_mismatches_at_once(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors["model.norm.weight"], tensors["model.layers.2.self_attn.k_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["lm_head.weight"] = np.zeros((199, 63), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros((4, 16), np.float32)
    save_file(tensors, folder / FILE)
    with pytest.raises(TensorMismatchError) as caught:
        load(folder)
    error = caught.value
    assert set(error.missing) == {
        "model.norm.weight",
        "model.layers.2.self_attn.k_proj.weight",
    }
    assert error.unexpected == ("model.layers.3.mlp.up_proj.weight",)
    assert error.wrong_shape == {
        "lm_head.weight": ((199, 64), (199, 63)),
        "model.layers.0.self_attn.q_proj.bias": ((64,), (4, 16)),
    }
    for name in (*error.missing, *error.unexpected, *error.wrong_shape, "[199, 64]", "[199, 63]"):
        assert name in str(error)


def test_a_long_list_of_mismatches_is_counted(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 99}))
    with pytest.raises(TensorMismatchError) as caught:
        load(folder)
    count = len(caught.value.missing)
    assert count > 800 and len(str(caught.value)) < 1000
    assert f"{count} missing: model.layers.3." in str(caught.value)
    assert str(caught.value).endswith(f" and {count - 5} more")


QUICK = ("LlamaForCausalLM", "Gemma3ForConditionalGeneration", "MixtralForCausalLM")
# a case of each family, by its architecture
ONE_EACH = {
    "LlamaForCausalLM": "llama_biases", "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3_images", "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3MoeForCausalLM": "qwen3_moe", "MixtralForCausalLM": "mixtral",
}  # fmt: skip


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (family.architecture for family in FAMILIES)
        if not name.endswith("ForSequenceClassification")  # in test_classifiers.py
    ],
)
def test_no_tensor_is_dropped_in_silence(
    tmp_path: Path,
    architecture: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every tensor of a file is read, and one that no parameter is made of is an error."""
    folder = make_case(tmp_path, ONE_EACH[architecture])
    tensors, read = load_file(folder / FILE), set()

    def recording(reader: SafetensorsReader, name: str, *place: object) -> None:
        read.add(name)
        read_into(reader, name, *place)  # type: ignore[arg-type]

    read_into = SafetensorsReader.read_into
    monkeypatch.setattr(SafetensorsReader, "read_into", recording)
    with caplog.at_level("INFO"):
        assert load(folder).config.architecture == architecture
    family = next(f for f in FAMILIES if f.architecture == architecture)
    assert read == {name for name in tensors if not name.startswith(family.passed_over)}
    left = len(tensors) - len(read)
    told = f"images are not read: {left} tensors of vision_tower, multi_modal_projector are passed"
    assert (told in caplog.text) == (left > 0 and family.encoding is None)
    layer = next(name for name in tensors if ".layers.0." in name)
    prefix = layer[: layer.index("layers.0.")]
    unknown = {f"{prefix}layers.0.self_attn.sinks", f"{prefix}mtp.weight", "score.weight"}
    save_file(tensors | {name: np.ones(3, np.float32) for name in unknown}, folder / FILE)
    with pytest.raises(TensorMismatchError) as caught:
        load(folder)
    assert len(caught.value.unexpected) == 3 and not caught.value.missing


def test_prefixes_of_a_text_model(tmp_path: Path) -> None:
    """The names of transformers' modules are read as the published ones are; both at once not."""
    folder = make_case(tmp_path, "gemma3_images")
    wanted, tensors = values(load(folder)), load_file(folder / FILE)
    renamed = {name.replace("language_model.model.", "model.language_model."): tensor
               for name, tensor in tensors.items()}  # fmt: skip
    save_file(renamed, folder / FILE)
    found = values(load(folder))
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ValidationError, match="to='safetensors'"):
        convert(folder, tmp_path / "out", to="safetensors", use_tqdm=False)
    save_file(renamed | tensors, folder / FILE)
    with pytest.raises(CheckpointError, match="there twice, by two prefixes"):
        load(folder)


def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    folder = make_case(tmp_path, "llama_tied")
    tensors = load_file(folder / FILE)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / FILE)
    assert load(folder).lm_head is None


def with_head(folder: Path, scale: float) -> None:
    """Adds an lm head to a tied model: the embedding times a factor."""
    tensors = load_file(folder / FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * np.float32(scale)
    save_file(tensors, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize("case", ["llama_tied", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_head_that_the_config_denies_is_taken_as_transformers_does(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_case(tmp_path, case)
    with_head(folder, -0.5)
    model = load(folder)
    assert "lm_head.weight is in the checkpoint and is not model.embed_tokens" in caplog.text
    assert not model.config.tie_word_embeddings
    tokens = np.arange(3, 20)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = oracle(torch.tensor(tokens)[None]).logits[0].numpy()
    found, _ = run(model, tokens, empty_cache(model.config, len(tokens)), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("to", [pytest.param("orbax", marks=pytest.mark.slow), "safetensors"])
def test_a_head_that_the_config_denies_is_converted(tmp_path: Path, to: str) -> None:
    folder = make_case(tmp_path / "from", "llama_tied", num_hidden_layers=1)
    with_head(folder, -0.5)
    head = load(folder).lm_head.weight[...]
    out = convert(folder, tmp_path / "out", to=to, use_tqdm=False)
    found = load(out)
    assert found.lm_head is not None
    np.testing.assert_array_equal(found.lm_head.weight[...], head)


def test_untied_model_needs_its_head(tmp_path: Path) -> None:
    folder = make_case(tmp_path, "llama_tied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(TensorMismatchError, match=r"1 missing: lm_head\.weight"):
        load(folder)


def test_missing_folder(tmp_path: Path, folder: Path) -> None:
    config = read_model_config(folder)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_model(tmp_path / "nowhere", config, mesh=make_mesh(1))


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"load_format": "pickle"}])
def test_unknown_options(folder: Path, options: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        load(folder, **options)


def test_weights_do_not_depend_on_the_file(folder: Path) -> None:
    """Arrays stay as they are when the file is overwritten and removed."""
    model = load(folder)
    before = values(model)
    file = folder / FILE
    file.write_bytes(bytes(file.stat().st_size))
    file.unlink()
    after = values(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert any(np.any(value) for value in after.values())


def test_dummy_weights(tmp_path: Path) -> None:
    folder = make_case(tmp_path, "llama_biases")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    first, again, other = (
        load(folder, load_format="dummy", dtype="bfloat16", seed=seed) for seed in (1, 1, 2)
    )
    one, two, three = values(first), values(again), values(other)
    for name, value in one.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value, two[name])
        if name.endswith("bias"):
            assert not value.any()
        elif "norm" in name:
            assert (value == 1).all()
        else:
            assert not np.array_equal(value, three[name])
            assert float(value.astype(np.float32).std()) == pytest.approx(0.02, rel=0.05)
    # Weights of equal shape are not copies of one another.
    assert not np.array_equal(one["embedding"], one["lm_head/weight"])


def test_module_is_a_small_static_graph(folder: Path) -> None:
    """The graph definition is hashable and equal between loads, so jit compiles once for both."""
    graphs = [nnx.graphdef(load(folder)) for _ in range(2)]
    assert graphs[0] == graphs[1]
    assert hash(graphs[0]) == hash(graphs[1])
    assert len(jax.tree.leaves(nnx.state(load(folder)))) == 3 + 3 * 10


@pytest.mark.slow
def test_loading_imports_neither_torch_nor_the_server(folder: Path) -> None:
    code = """
import sys
from jaxserve.models import load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.registry import FAMILIES
from jaxserve.parallel import make_mesh
config = read_model_config(sys.argv[1])
load_model(sys.argv[1], config, mesh=make_mesh(1))
print([name for name in ("torch", "transformers", "server", "starlette") if name in sys.modules])
"""
    assert output_of("-c", code, str(folder)).strip() == "[]"


MEASURE = """
import json, sys
from benchmarks.load_memory import measure
print(json.dumps(measure(model=sys.argv[1], **json.loads(sys.argv[2]))))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model of 470 MB in many files."""
    return make_case(
        tmp_path_factory.mktemp("large"),
        "llama_mha",
        dtype="bfloat16",
        max_shard_size="40MB",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        vocab_size=16384,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("load_format", "quantization"),
    [("auto", None), ("dummy", "int8"), ("auto", "int4")],
)
def test_peak_host_memory(large: Path, load_format: str, quantization: str | None) -> None:
    """Beyond the parameters themselves, loading needs a few tensors and not a second copy."""
    sizes = [file.stat().st_size for file in large.glob("*.safetensors")]
    assert len(sizes) > 8
    settings = {"load_format": load_format, "quantization": quantization}
    found = json.loads(output_of("-c", MEASURE, str(large), json.dumps(settings)))
    # CPU devices keep their arrays in host memory, so the parameters count once.
    least = 0.25 if quantization == "int4" else 0.5
    assert least * sum(sizes) < found["weights"] <= 1.01 * sum(sizes)
    assert found["loaded"] - found["before"] <= found["weights"] + max(sizes) + (128 << 20)
