"""A tiny random LLaVA with a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import VOCAB_SIZE, make_case

IMAGE = VOCAB_SIZE - 1
# as the published ones: images come first, and a content is a list
TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() }}: "
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} "
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def make_image_model(folder: Path, case: str = "llava") -> Path:
    """Saves the model of a case of `tests.tiny_models` with a tokenizer of bytes."""
    make_case(folder, case)
    return save_tokenizer(folder)


def save_tokenizer(folder: Path, *, begins: bool = False) -> Path:
    """Saves a tokenizer of bytes with the token `<image>`.

    With `begins` it has `<begin>` and `<end>` as well, and images are written as Gemma 3's are.
    """
    frame = ["<begin>", "<end>"] if begins else []
    # space and newline, then those of ASCII
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda one: (one not in "ĠĊ", one))
    words = ["<unk>", "<s>", "</s>", *symbols][: IMAGE - len(frame)]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_special_tokens(frame)
    while backend.get_vocab_size() < IMAGE:
        backend.add_tokens([AddedToken(f"<extra {backend.get_vocab_size()}>", special=True)])
    backend.add_special_tokens(["<image>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    if begins:
        config |= {"boi_token": "<begin>", "image_token": "<image>", "eoi_token": "<end>"}
        config["chat_template"] = TEMPLATE.replace("<image>\n", "<begin>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
