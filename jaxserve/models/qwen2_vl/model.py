"""Qwen2 whose tokens have a time, a row and a column (M-RoPE)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.models.llama import Llama
from jaxserve.models.protocol import Angles, TokenRows
from jaxserve.models.qwen2_vl.config import AXES, Qwen2VLConfig
from jaxserve.models.rope import rope_tables


class Qwen2VL(Llama):
    """Each pair of a head's dimensions is rotated by one of three positions (Wang et al.,
    "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution", 2024).
    """

    config: Qwen2VLConfig

    def angles(self, rows: TokenRows) -> list[Angles]:
        config = self.config
        positions = jnp.broadcast_to(rows.positions, (AXES, rows.positions.shape[1]))
        tables = [rope_tables(config.rope, config.head_dim, axis) for axis in positions]
        sections = config.sections
        of_pair = np.repeat(np.arange(len(sections)) % AXES, sections)
        cos, sin = (
            jnp.choose(of_pair, [table[part] for table in tables], mode="clip") for part in (0, 1)
        )
        return [Angles(cos, sin)] * config.num_layers
