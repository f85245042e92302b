"""The engine: one loop that plans, dispatches, commits and answers."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # vLLM has `engine.arg_utils`: jaxserve/vllm_paths
