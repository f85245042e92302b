"""Every command in README and docs is one that exists, and those that end are run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from checkpoints import bundled_model_path
from server.cli import build_parser
from tests.command_line import output_of, run
from tests.hub_server import serve_hub
from tests.image_models import make_image_model
from tests.load_traces import write_trace

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FEW = {
    "latency": shlex.split("--batch-size 2 --output-len 8 --num-iters 1 --num-iters-warmup 1"),
    "throughput": shlex.split("--num-prompts 4 --max-len 16"),
    "startup": shlex.split("--num-iters-warm 1 -- --compile-ahead 2 --no-compile-in-background"),
}
SMALL = ["--max-num-seqs", "2", "--max-model-len", "128", "--max-num-batched-tokens", "32"]


# these run in tests/server, against a real server
NEED_A_SERVER = ("jaxserve serve", "jaxserve bench serve", "jaxserve bench sweep")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = [line.split("#")[0].strip() for b in blocks(page, "bash") for line in b.splitlines()]
    return [line for line in lines if line]


ALL = [(page.name, command) for page in PAGES for command in commands(page)]
OURS = sorted({command for _, command in ALL if command.startswith("jaxserve ")})


@pytest.mark.parametrize(("page", "command"), ALL)
def test_the_command_exists(page: str, command: str) -> None:
    words = shlex.split(command)
    if words[0] == "jaxserve":
        build_parser(words[1]).parse_args(words[1:])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif words[:2] == ["python", "-m"]:
        found = find_spec(words[2])
        assert found and (not found.submodule_search_locations or find_spec(f"{words[2]}.__main__"))
    else:
        script = ROOT / (words[1] if words[0] == "python" else words[0])
        assert script.is_file() and (words[0] == "python" or os.access(script, os.X_OK))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^):\s]+)\)", page.read_text()):
            file, _, anchor = target.partition("#")
            to = page.parent / file if file else page
            assert to.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(to), f"{page.name}: {target}"


def test_the_files_that_pages_name_exist() -> None:
    folders = "jaxserve|server|pallas_kernels|checkpoints|benchmarks|tests|docs|deploy"
    for page in PAGES:
        for path in re.findall(rf"`((?:{folders})/[a-z0-9_./-]*)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_glossary_names_what_its_files_define() -> None:
    text = (ROOT / "docs" / "design" / "01-glossary.md").read_text()
    words = re.findall(
        r"^\| [^|]+ \| [^|]+ \| `(\w+)` \| `([\w/.]+)` \|$", text, flags=re.MULTILINE
    )
    assert len(words) >= 30 and len(words) == len(re.findall(r"^\| .*`\w+` \|", text, re.MULTILINE))
    for name, file in words:
        defined = rf"^\s*(class {name}\b|def {name}\b|{name}\b.*[:=])"
        assert re.search(defined, (ROOT / file).read_text(), flags=re.MULTILINE), f"{file}: {name}"


def test_every_page_of_the_design_is_listed_and_leads_to_the_next() -> None:
    pages = sorted((ROOT / "docs" / "design").glob("*.md"))
    contents = (ROOT / "docs" / "architecture.md").read_text().partition("## Design")[2]
    assert re.findall(r"\(design/(.*?)\)", contents) == [page.name for page in pages]
    for page, following in itertools.pairwise(pages):
        assert re.search(rf" next: .*\({following.name}\)\n", page.read_text())
        assert re.search(rf" before: [^·]*\({page.name}\)", following.read_text())


@pytest.mark.parametrize(("page", "most"), [("README.md", 120), ("docs/architecture.md", 170)])
def test_what_newcomers_read_is_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


@pytest.mark.slow
def test_the_programs_of_research_run(tmp_path: Path) -> None:
    programs = []
    for block in blocks(ROOT / "docs" / "research.md", "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        if name is None:
            programs.append(block)
        else:
            (tmp_path / name[1]).write_text(block)
    steering, attention = programs
    head = "import numpy\nnumpy.save('vector.npy', numpy.random.default_rng(0).normal(size=256))\n"
    tail = """
plainly = LLM(MODEL).generate(["2 + 2 ="], SamplingParams(temperature=0.0, max_tokens=8))[0]
for one in (plain, steered, output):
    print(one.outputs[0].token_ids == plainly.outputs[0].token_ids)
sizes = [len(one) for step in hidden_states for one in step]
print(len(sizes), plain.outputs[0].reports, sizes[0], len(llm.params))
llm.close()
told = LLM(MODEL, features=["entropy:Entropy"]).generate(
    ["2 + 2 ="] * 2,
    [
        SamplingParams(max_tokens=5, ignore_eos=True, extra_args={"entropy": True}),
        SamplingParams(logprobs=1),
    ],
)
print(len(told[0].outputs[0].reports["entropy"]), told[1].outputs[0].reports)
"""
    script = tmp_path / "script.py"
    text = head + steering + attention + tail
    script.write_text(text.replace("MODEL", repr(str(bundled_model_path()))))
    same, steered, attended, told, entropies = output_of(str(script), cwd=tmp_path).splitlines()
    assert entropies == "5 None"
    assert (same, steered, attended) == ("True", "False", "True")
    count, none, size = told.split()[:3]
    assert int(count) > 8 and (none, size) == ("None", "256"), "of prompt and output"


@pytest.mark.slow
def test_the_program_of_embeddings_runs(tmp_path: Path) -> None:
    program = "\n".join(blocks(ROOT / "docs" / "embeddings.md", "python"))
    script = tmp_path / "script.py"
    script.write_text(program.replace("MODEL", str(bundled_model_path())))
    said = output_of(str(script)).splitlines()
    assert [line.split()[0] for line in said] == ["cosine", "text", "ids", "probs", "probs"]
    assert said[2].endswith("[7, 8, -1, -1, -1, -1, -1, 9]") and said[4].endswith(" 2")


@pytest.mark.slow
def test_the_program_of_images_runs(tmp_path: Path) -> None:
    (program,) = blocks(ROOT / "docs" / "images.md", "python")
    folder = make_image_model(tmp_path / "llava")
    places, found = output_of("-c", program.replace("MODEL", str(folder))).splitlines()[-2:]
    assert places == "places 16" and int(found.removeprefix("found again ")) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in OURS if not c.startswith(NEED_A_SERVER)])
def test_the_command_runs(command: str, tmp_path: Path) -> None:
    turns = [
        {"from": who, "value": "Add 2 and 3, then sort 5, 1 and 4."} for who in ("human", "gpt")
    ]
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": turns}] * 4))
    places = {"MODEL": str(bundled_model_path()), "FILE": str(tmp_path / "chats.json")}
    if "TEXT" in command or "POLICY" in command:
        (tmp_path / "text.txt").write_text("The list is sorted, and the sum of two is five. " * 60)
        policy = {"attention": "int8-dynamic", "mlp": "int8-static"}
        (tmp_path / "policy.json").write_text(json.dumps(policy))
    places["TEXT"], places["POLICY"] = str(tmp_path / "text.txt"), str(tmp_path / "policy.json")
    if "TRACE" in command:
        places["TRACE"] = str(write_trace(tmp_path / "trace.jsonl"))
    if "shortest_first.py" in command:
        (policy,) = blocks(ROOT / "docs" / "planning.md", "python")
        (tmp_path / "shortest_first.py").write_text(policy)
        places["shortest_first.py"] = str(tmp_path / "shortest_first.py")
    places["OUT"], places["IN"] = str(tmp_path / "out"), str(tmp_path / "in")
    (asked,) = blocks(ROOT / "docs" / "apis.md", "json")
    (tmp_path / "in").write_text(asked)
    words = [places.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] == "bench":
        # what follows -- is for the server that is started
        words += SMALL if words[1] != "startup" else []
        words += FEW[words[1]]
    if words[0] == "run-batch":
        words += SMALL
    if words[0] == "tune":
        words += shlex.split("--quick --max-num-seqs 2 --quantization none int8")
        words += ["--output", str(tmp_path / "tuned.yaml"), "--ttft-ms", "1e6", "--itl-ms", "1e6"]
    done = run(*words, input="Hello\n", timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_readme_program_runs(tmp_path: Path) -> None:
    """With the bundled model under the name of the one that it fetches."""
    program = next(b for b in blocks(ROOT / "README.md", "python") if "import LLM" in b)
    with serve_hub() as hub:
        files = [f for f in bundled_model_path().iterdir() if f.suffix in (".json", ".safetensors")]
        hub.repositories["meta-llama/Meta-Llama-3-8B-Instruct"] = {
            file.name: file.read_bytes() for file in files
        }
        env = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        lines = output_of("-c", program, env=env).splitlines()
    assert lines[0].startswith("The capital of France is") and len(lines) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("page", "lines"), [("beam_search.md", 4), ("structured_outputs.md", 1)])
def test_the_program_of_a_page_runs(page: str, lines: int) -> None:
    (program,) = blocks(ROOT / "docs" / page, "python")
    found = output_of("-c", f"model = {str(bundled_model_path())!r}\n{program}").splitlines()
    told = ("What is", '{"sum":')
    assert sum(any(one in line for one in told) for line in found) == lines


@pytest.mark.slow
def test_the_program_of_pictures_runs(tmp_path: Path) -> None:
    (program,) = blocks(ROOT / "docs" / "operating.md", "python")
    program = program.replace("MODEL", str(bundled_model_path()))
    assert "request 20: 68 prompt tokens" in output_of("-c", program, cwd=tmp_path)
    made = {"timeline.png", "pages.png", "latency.png", "out.json"}
    assert {file.name for file in tmp_path.iterdir()} == made


@pytest.mark.slow
def test_the_program_of_the_memory_report_runs() -> None:
    _, program = blocks(ROOT / "docs" / "scheduling.md", "python")  # the first is a policy
    told = output_of("-c", program.replace("MODEL", str(bundled_model_path()))).splitlines()
    assert any(line.startswith("kv_active_ratio ") for line in told)
    assert float(told[-1].split()[0]) > 0
