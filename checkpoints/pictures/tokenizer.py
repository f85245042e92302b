"""The picture model's tokenizer, chat template and image processor."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from checkpoints.pictures.questions import asked_pictures
from checkpoints.tiny.tokenizer import save_tokenizer, train_tokenizer

IMAGE = "<image>"
SIDE = 72  # of a picture, in pixels
PATCH = 12
PATCHES = (SIDE // PATCH) ** 2
MAX_LENGTH = 1024
VOCAB_SIZE = 768  # at most, without the image's token

# images come first, as in the templates of published LLaVAs
_TEMPLATE = """
{{- bos_token -}}
{%- for message in messages -%}
  {%- set role = message['role'] -%}
  {%- if role not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception('the role must be system, user or assistant, not ' ~ role) -}}
  {%- endif -%}
  {{- '<|' ~ role ~ '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] | trim -}}
  {%- else -%}
    {%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image>' -}}{%- endfor -%}
    {%- for part in message['content'] if part['type'] == 'text' -%}
      {{- part['text'] | trim -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
CHAT_TEMPLATE = "".join(line.strip() for line in _TEMPLATE.splitlines())


def make_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE of questions and answers, with the token of an image behind the others."""
    texts = (
        text
        for _, asked in islice(asked_pictures(f"tokenizer {seed}", 8), 2000)
        for question in asked
        for text in (question.prompt, question.answer)
    )
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return tokenizer


def save_processor(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of transformers' AutoProcessor: tokenizer, template, image processor."""
    save_tokenizer(tokenizer, folder, MAX_LENGTH, None)
    # where processors and tokenizers both look for it
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    square = {"height": SIDE, "width": SIDE}
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": square,  # the whole picture, whatever its proportions: corners are asked for
        "resample": 3,  # bicubic
        "do_center_crop": False,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    whole = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,  # the class token, which "default" leaves out
    }
    for name, fields in (("preprocessor_config", pixels), ("processor_config", whole)):
        (folder / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")
