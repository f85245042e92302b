"""Names of a text model's tensors in checkpoints of models that read images as well."""

from __future__ import annotations

# as published, and as transformers names the modules since 4.52
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)


def text_name(name: str) -> str:
    """The name that a tensor of the text model has where there is no other; others as they are."""
    for prefix, own in _PREFIXES:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
