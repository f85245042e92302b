"""The engine: one loop that plans, dispatches, commits and answers."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # vLLM has `config.engine_args`: jaxserve/vllm_paths
