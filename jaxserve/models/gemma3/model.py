"""Gemma 3 (Gemma Team, "Gemma 3 Technical Report", 2025), the language model."""

from __future__ import annotations

from jaxserve.models.gemma2.model import GemmaDecoder
from jaxserve.models.gemma3.config import Gemma3Config
from jaxserve.models.protocol import Angles, TokenRows
from jaxserve.models.rope import rope_tables


class Gemma3(GemmaDecoder):
    """Gemma 3."""

    config: Gemma3Config

    def angles(self, rows: TokenRows) -> list[Angles]:
        """Rotary angles of each layer."""
        whole, local = (
            Angles(*rope_tables(rope, self.config.head_dim, rows.positions[0], rows.rope_lengths))
            for rope in (self.config.rope, self.config.local_rope)
        )
        return [whole if window is None else local for window in self.config.windows]
