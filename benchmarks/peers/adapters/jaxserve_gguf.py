"""jaxserve on the very file that llama.cpp reads; llama.cpp's adapter writes it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers.adapters import Job, Unavailable, jaxserve_llm


def load(job: Job) -> jaxserve_llm.Jaxserve:
    """Settings besides `weights` are those of `jaxserve_llm`."""
    weights = job.settings["weights"]
    file = job.converted / f"{weights}.gguf"
    if not file.is_file():
        raise Unavailable(f"there is no {file}: name llama.cpp-{weights} before it in --peers")
    settings = {name: value for name, value in job.settings.items() if name != "weights"}
    return jaxserve_llm.load(replace(job, model=file, settings=settings))
