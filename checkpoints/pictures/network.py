"""The picture model over rows of questions: what training and evaluation run."""

from __future__ import annotations

import torch
from transformers import LlavaForConditionalGeneration

from checkpoints.pictures.batches import FIRST, Batch
from checkpoints.pictures.tokenizer import PATCHES


def features(model: LlavaForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """What the tower makes of the patches: float32[B, patches, tower's size]."""
    pixels = torch.from_numpy(batch.pixels)
    return model.model.vision_tower(pixel_values=pixels).last_hidden_state[:, 1:]


def answer_scores(
    model: LlavaForConditionalGeneration, batch: Batch, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits float32[N, V] of all tokens of answers, row by row, and these tokens int64[N].

    Args:
        seen: of `features`.
    """
    tokens, learnt = torch.from_numpy(batch.tokens), torch.from_numpy(batch.learnt)
    rows = model.get_input_embeddings()(tokens)
    image = model.model.multi_modal_projector(seen)
    rows = torch.cat([rows[:, :FIRST], image, rows[:, FIRST + PATCHES :]], 1)
    hidden = model.model.language_model(
        inputs_embeds=rows,
        attention_mask=_mask(batch),
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
    ).last_hidden_state
    wanted = learnt[:, 1:]
    return model.lm_head(hidden[:, :-1][wanted]), tokens[:, 1:][wanted]


def _mask(batch: Batch) -> torch.Tensor:
    """Additive attention mask float32[B, 1, L, L].

    A token sees the picture and the tokens of its own question up to itself; in a conversation all
    that came before.
    """
    turns = torch.from_numpy(batch.turns)
    length = turns.shape[1]
    same = turns[:, :, None] == turns[:, None, :]  # [B, query, key]
    seen = same | (turns == 0)[:, None, :] | torch.from_numpy(batch.is_chat)[:, None, None]
    seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill(~seen, -1e9)[:, None]
