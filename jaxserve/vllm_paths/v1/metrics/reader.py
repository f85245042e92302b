"""Values of metrics, at the path that vLLM has them."""

from jaxserve.observability.metric_values import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
