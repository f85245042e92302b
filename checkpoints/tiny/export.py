"""The bundled model's shape, and its Hugging Face files."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from checkpoints.tiny.tokenizer import BOS_ID, END_ID, PAD_ID
from checkpoints.training import export


def model_config() -> LlamaConfig:
    """Shape of the bundled model; its context is also the longest row of the training."""
    return llama_config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )


def llama_config(**sizes: int) -> LlamaConfig:
    """A Llama with what the bundled models have in common."""
    return LlamaConfig(
        **sizes,
        num_hidden_layers=4,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the model and its configs, see `checkpoints.training.export`."""
    generation = GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        do_sample=True,
        temperature=0.2,
        top_p=0.9,
    )
    export(model, folder, generation)


def load_model(folder: Path) -> LlamaForCausalLM:
    """The exported model in ``folder``, in float32, for inference."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
