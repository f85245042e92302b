"""Dockerfiles and the compose file: linted where hadolint is, and by rules of our own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each instruction and its arguments."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def stages(file: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(file):
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/compose.yml").read_text())


def test_there_is_one_for_each_device() -> None:
    assert [file.stem for file in FILES] == ["cpu", "cuda", "tpu"]


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint (the extra `lint`)")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, *FILES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_is_small_and_not_roots(file: Path) -> None:
    build, final = stages(file)
    for stage in (build, final):
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm( AS build)?", stage[0][1])
        assert not any(word == "ADD" for word, _ in stage)
    words = dict(final)
    assert "slim.py" in dict(build)["RUN"] and "--no-cache-dir" in dict(build)["RUN"]
    user = words["USER"].partition(":")[0]
    assert user.isdigit() and int(user) > 1000
    assert "healthcheck.py" in words["HEALTHCHECK"] and "--start-period" in words["HEALTHCHECK"]
    assert words["VOLUME"] == "/home/jaxserve/.cache"
    assert words["CMD"] == '["serve", "--host", "0.0.0.0"]'
    assert not re.search(r"(?i)token|password|secret|api.?key", file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_copied_is_there_and_sent_to_the_build(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, rest in instructions(file):
        if word != "COPY" or "--from" in rest:
            continue
        for source in [part for part in rest.split() if not part.startswith("--")][:-1]:
            assert (ROOT / source).exists(), source
            assert any(Path(source).is_relative_to(line[1:]) for line in ignored if line[0] == "!")


def test_the_cpu_image_has_what_its_native_kernels_are_compiled_with() -> None:
    from pallas_kernels.native.build import COMPILERS

    _, final = stages(DOCKER / "cpu.Dockerfile")
    assert ("ARG", "NATIVE=1") in final and "NATIVE" not in str(compose())
    (install,) = re.findall(r"apt-get install -y --no-install-recommends (\S+)", str(final))
    assert install in COMPILERS


def test_the_extras_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    own = {"cpu": set(), "cuda": {"cuda12", "cuda13"}, "tpu": {"tpu"}}
    wanted = {name: {"server", "images"} | extra for name, extra in own.items()}
    for file in FILES:
        (names,) = re.findall(r'"\.\[(.*?)\]"', file.read_text())
        asked = {
            part for cuda in ("12", "13") for part in names.replace("${CUDA}", cuda).split(",")
        }
        assert asked == wanted[file.stem] <= set(extras)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--host", "0.0.0.0"], "jaxserve serve --host 0.0.0.0"),
        (["/bin/echo", "any", "program"], "any program"),
        (["bash", "-c", "echo shell"], "shell"),
    ],
)
def test_the_entrypoint_runs_commands_and_programs(arguments, expected, tmp_path) -> None:
    fake = tmp_path / "jaxserve"
    fake.write_text('#!/bin/sh\necho jaxserve "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [DOCKER / "entrypoint.sh", *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("given", [None, "/elsewhere"])
def test_a_cache_that_is_mounted_in_roots_home_is_used(given: str | None, tmp_path) -> None:
    mounted = "/root/.cache/huggingface"
    script = tmp_path / "entrypoint.sh"
    text = (DOCKER / "entrypoint.sh").read_text()
    script.write_text(text.replace(f"mounted={mounted}\n", f"mounted={tmp_path}/cache\n"))
    variables = {"PATH": "/usr/bin:/bin"} | ({} if given is None else {"HF_HOME": given})

    def home() -> str:
        words = ["sh", script, "sh", "-c", 'echo "${HF_HOME-none}"']
        done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert home() == (given or "none")
    (tmp_path / "cache").mkdir()
    assert home() == (given or f"{tmp_path}/cache")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_user_may_enter_roots_home_for_such_a_mount(file: Path) -> None:
    _, final = stages(file)
    assert any(word == "RUN" and "chmod 711 /root" in rest for word, rest in final)


def test_the_health_check_says_what_the_server_says() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    status = 200

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        variables = {"JAXSERVE_PORT": str(server.server_port)}
        command = [sys.executable, "-S", DOCKER / "healthcheck.py"]
        assert subprocess.run(command, env=variables).returncode == 0
        status = 503
        assert subprocess.run(command, env=variables, stdout=subprocess.DEVNULL).returncode == 1
        server.shutdown()


def test_slimming_takes_what_is_not_needed(tmp_path) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    kept = ["jax/core.py", "numpy/core.py", "tensorstore/a.so", "jaxserve/tests.py"]
    kept += ["scipy/a.py", "scipy.libs/b.so"]
    gone = ["setuptools/a.py", "setuptools-1.0.dist-info/RECORD", "pip/x.py"]
    gone += ["numpy/linalg/tests/test_a.py", "transformers/models/x/__pycache__/x.pyc"]
    for name in kept + gone:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("12345")
    done = subprocess.run(
        [sys.executable, DOCKER / "slim.py", tmp_path], capture_output=True, text=True, check=True
    )
    assert "MB taken out" in done.stdout
    assert all((site / name).exists() for name in kept)
    assert not any((site / name).exists() for name in gone)


def test_the_docs_build_files_that_are_there() -> None:
    text = (ROOT / "docs/operating.md").read_text()
    files = re.findall(r"docker (?:build|compose) -f (\S+)", text)
    assert len(files) == 5 and all((ROOT / file).is_file() for file in files)
    assert set(re.findall(r"promtool .*? (\S+\.yml)", text)) == {
        "deploy/monitoring/prometheus.yml",
        "deploy/monitoring/alerts_test.yml",
    }


@pytest.mark.slow
def test_what_slimming_takes_is_not_used() -> None:
    code = (
        "import sys\n"
        "for name in ('pip', 'setuptools'): sys.modules[name] = None\n"
        "from server.cli import main\n"
        "sys.exit(main(['generate', '--prompt', '2+3=', '--max-tokens', '4']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compose_builds_the_image_and_keeps_what_it_may_do_small() -> None:
    found = compose()
    services = found["services"]
    build = services["jaxserve"]["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).is_file()
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"] and service["restart"] == "unless-stopped"
        assert service["security_opt"] == ["no-new-privileges:true"]
        if name != "jaxserve":
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (ROOT / "deploy" / source).exists(), source
            else:
                assert source in found["volumes"]
    assert all(port.startswith("127.0.0.1:") for port in services["jaxserve"]["ports"])
    assert services["jaxserve"]["environment"]["JAXSERVE_PORT"] == "8080"


def test_compose_starts_the_server_with_flags_that_it_has() -> None:
    from server.cli import build_parser

    words = compose()["services"]["jaxserve"]["command"]
    assert build_parser(words[0]).parse_args(words).port == 8080
