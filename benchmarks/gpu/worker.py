"""The process that owns the GPU while sections run: one request a section or a case of one."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import jax

from benchmarks.gpu.sections import SECTIONS, Several, Single
from benchmarks.gpu.setting import Setting, dry_setting, gpu_setting
from benchmarks.isolated import serve
from jaxserve.compilation import compilation_cache


class NoGpuError(RuntimeError):
    """This machine has no GPU that JAX sees."""


def setting_of(request: dict[str, Any]) -> Setting:
    """The setting that the request's section is given.

    Raises:
        NoGpuError: there is no GPU, and it is no dry run.
    """
    make = dry_setting if request["dry_run"] else gpu_setting
    setting = make(request["shared"], request["seconds"])
    if setting is None:
        raise NoGpuError(f"JAX sees {jax.devices()}")
    return setting


class Answers:
    """Answers requests; holds what the cases of one section share, until another one is asked."""

    def __init__(self) -> None:
        self._section = ""
        self._held: dict[str, Any] = {}

    def __call__(self, request: dict[str, Any]) -> Any:
        """The device's kind, the cases of a section, or what one of them found."""
        setting = setting_of(request)
        if request["do"] == "device":
            return setting.device_kind
        if request["section"] != self._section:
            self.drop()
            self._section = request["section"]
        setting.held = self._held
        return answer_section(setting, request)

    def drop(self) -> None:
        """Gives back what is held: the next section wants the memory."""
        for held in self._held.values():
            held.close()
        self._held = {}
        gc.collect()


def answer_section(setting: Setting, request: dict[str, Any]) -> Any:
    """The cases of a section, nothing for its preparation, or what one of the cases found."""
    section = SECTIONS[request["section"]]
    if request["do"] == "cases":
        return section.cases(setting) if isinstance(section, Several) else None
    if request["do"] == "prepare":
        assert isinstance(section, Several) and section.prepare is not None
        return section.prepare(setting)
    if isinstance(section, Several):
        found = section.run(setting, request["case"])
    else:
        assert isinstance(section, Single)
        found = section.run(setting)
    return {"section": asdict(found), "shared": setting.shared}


if __name__ == "__main__":
    compilation_cache.use("auto")  # a process that follows a crash, or another run, begins warm
    serve(Answers(), poisonous=(jax.errors.JaxRuntimeError,))
