"""vLLM's import paths: modules of re-exports, found under `jaxserve.` (`jaxserve/__init__.py`).

`vllm.sampling_params` becomes `jaxserve.sampling_params`.
"""
