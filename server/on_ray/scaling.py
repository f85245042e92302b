"""How many replicas there should be: by requests that run or wait, and by prompts that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class WorkPolicy:
    """As many replicas as bring both means of a replica to their targets. Called by Ray.

    Ray applies its bounds, delays and factors (`autoscaling_config`) to what this says.

    Args:
        target_queued_tokens: prompt tokens that may wait in a replica.
    """

    def __init__(self, target_queued_tokens: int):
        self._target_tokens = target_queued_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """How many are wanted, and nothing to remember."""
        if not context.current_num_replicas:
            return context.target_num_replicas, {}
        told = (context.aggregated_metrics or {}).get("queued_tokens", {})
        by_tokens = sum(told.values()) / self._target_tokens
        by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
        return max(by_requests, by_tokens), {}
