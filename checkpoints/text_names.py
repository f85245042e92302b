"""Names of tensors in checkpoints of models that read images: one, whichever release wrote them."""

from __future__ import annotations

# as published, and as transformers names the modules since 4.52
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.visual.", "visual."),
    ("model.image_newline", "image_newline"),
)


def text_name(name: str) -> str:
    """A text model's tensor by the name that it has where there is no other; those of the encoder
    of images by their modules; others as they are."""
    for prefix, own in _PREFIXES:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
