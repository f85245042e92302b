"""Images for tests, and transformers as the oracle of what a model says of them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coarse random colours, which a processor's resizing keeps apart."""
    rng = np.random.default_rng([seed, width, height])
    small = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class Oracle:
    """A model of transformers that reads images, in float32."""

    def __init__(self, folder: Path):
        load = AutoModelForImageTextToText.from_pretrained
        self.model = load(folder, dtype=torch.float32).eval()
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.token = self.model.config.image_token_id

    def bound(self, pixels: int) -> None:
        """Have images of more pixels made smaller."""
        self._processor.size["longest_edge"] = pixels

    def change_weights(self, changed: Callable[[np.ndarray], np.ndarray]) -> None:
        """Change the matrices [out, in] of the language model's layers."""
        with torch.no_grad():
            for one in self.model.model.language_model.layers.modules():
                if isinstance(one, torch.nn.Linear):
                    one.weight.copy_(torch.tensor(changed(one.weight.numpy())))

    def places(self, image: Image.Image) -> int:
        """Places that an image takes in a prompt."""
        return len(self.rows(image))

    def rows(self, image: Image.Image) -> np.ndarray:
        """float32[places, E] that take the places of an image."""
        with torch.no_grad():
            (found,) = self.model.get_image_features(**self._processed([image])).pooler_output
        return found.numpy()

    def _processed(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        made = self._processor(images=images, return_tensors="np")
        return {
            name: torch.tensor(np.asarray(value))
            for name, value in made.items()
            if name != "num_crops"
        }

    def _inputs(self, tokens: list[int], images: list[Image.Image]) -> dict[str, Any]:
        places = (self.places(image) for image in images)
        ids = [
            one
            for token in tokens
            for one in [token] * (next(places) if token == self.token else 1)
        ]
        found = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
        if images:
            found |= self._processed(images)
        self._mark(found)
        return found

    def _mark(self, inputs: dict[str, Any]) -> None:
        """Say which tokens are of images, to models that ask."""
        kinds = (inputs["input_ids"] == self.token).int()
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = kinds
        if self.model.config.model_type == "gemma3":
            inputs["token_type_ids"] = kinds

    def logprob(
        self, tokens: list[int], images: list[Image.Image], continuation: list[int]
    ) -> float:
        """Sum of the log-probabilities of what continues a prompt."""
        inputs = self._inputs(tokens, images)
        whole = torch.cat([inputs["input_ids"], torch.tensor([continuation])], 1)
        inputs |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        self._mark(inputs)
        with torch.no_grad():
            logits = self.model(**inputs).logits[0, -len(continuation) - 1 : -1].double()
        scores = torch.log_softmax(logits, dim=-1)
        return float(scores.gather(1, torch.tensor(continuation)[:, None]).sum())

    def greedy(
        self, tokens: list[int], images: list[Image.Image], count: int
    ) -> tuple[list[int], list[float]]:
        """`count` most likely tokens and their log-probabilities, end-of-sequence ignored.

        Each image has one token.
        """
        inputs = self._inputs(tokens, images)
        with torch.no_grad():
            out = self.model.generate(
                **inputs,
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        chosen = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        scores = [torch.log_softmax(step[0].double(), dim=-1) for step in out.logits]
        return chosen, [float(one[token]) for one, token in zip(scores, chosen, strict=True)]
