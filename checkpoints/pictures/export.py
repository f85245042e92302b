"""The picture model's shape, and its Hugging Face files."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from checkpoints.pictures.tokenizer import IMAGE, MAX_LENGTH, PATCH, SIDE
from checkpoints.tiny.export import llama_config
from checkpoints.tiny.tokenizer import BOS_ID, END_ID, PAD_ID
from checkpoints.training import export


def model_config(tokenizer: Tokenizer) -> LlavaConfig:
    """Shape of the picture model: a tower of four layers, and a Llama of four."""
    tower = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        hidden_act="gelu",
        projection_dim=128,
    )
    text = llama_config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
    )
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.token_to_id(IMAGE),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )


def save_model(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write the model and its configs, see `checkpoints.training.export`."""
    generation = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=False
    )
    export(model, folder, generation)


def load_model(folder: Path) -> LlavaForConditionalGeneration:
    """The exported model in ``folder``, in float32, for inference."""
    model = LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
