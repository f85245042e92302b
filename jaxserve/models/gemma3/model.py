"""Gemma 3 (Gemma Team, "Gemma 3 Technical Report", 2025), the language model."""

from __future__ import annotations

from jaxserve.models.gemma2.model import GemmaBlock, GemmaDecoder
from jaxserve.models.gemma3.config import Gemma3Config
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.models.norms import HeadNorms, OffsetRMSNorm
from jaxserve.models.protocol import Angles, TokenRows
from jaxserve.models.rope import rope_tables


class Gemma3(GemmaDecoder):
    """Gemma 3."""

    config: Gemma3Config

    def __init__(self, config: Gemma3Config, dtype: str, form: LinearForm = PLAIN_LINEAR):
        def norm() -> OffsetRMSNorm:
            return OffsetRMSNorm(config.head_dim, config.rms_norm_eps, dtype, form)

        super().__init__(
            config,
            dtype,
            form,
            lambda layer: GemmaBlock(config, dtype, form, HeadNorms(norm(), norm())),
            OffsetRMSNorm,
        )

    def angles(self, rows: TokenRows) -> list[Angles]:
        """Rotary angles of each layer."""
        whole, local = (
            Angles(*rope_tables(rope, self.config.head_dim, rows.positions[0], rows.rope_lengths))
            for rope in (self.config.rope, self.config.local_rope)
        )
        return [whole if window is None else local for window in self.config.windows]
