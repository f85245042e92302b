"""A Llama checkpoint in Hugging Face format as a GGUF file without a vocabulary.

    python -m benchmarks.peers.adapters.gguf_file --model FOLDER --weights bf16|f32|q8_0|q4_0 OUT

Prompts are token ids, so no tokenizer is written. Norms stay float32, as llama.cpp's own converter
has them. needs: gguf.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gguf
import numpy as np

from benchmarks.peers.adapters.checkpoint import interleave_halves, read_tensors, rope_theta

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def write(folder: Path, weights: str, out: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"models of type {config['model_type']} are not written here: llama")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_file_type(FILE_TYPES[weights])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in read_tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        target = names.get_name(name, try_suffixes=(".weight",))
        if target is None or name.endswith(".bias"):
            raise SystemExit(f"tensor {name} has no place in a Llama GGUF file")
        if name.endswith("q_proj.weight"):
            tensor = interleave_halves(tensor, heads)
        elif name.endswith("k_proj.weight"):
            tensor = interleave_halves(tensor, kv_heads)
        kind = TYPES[weights] if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        tensor = np.ascontiguousarray(tensor)
        if kind != gguf.GGMLQuantizationType.F32:
            tensor = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(target, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--weights", choices=TYPES, required=True)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write(options.model, options.weights, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
