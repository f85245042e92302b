"""Every import points down."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "pallas_kernels", "checkpoints", "server")

# (files, top-level or dotted names that they must not import)
NEVER = [
    ("jaxserve", ("server", "torch", "starlette", "uvicorn", "pydantic", "typer")),
    ("pallas_kernels", ("jaxserve", "server", "checkpoints", "torch")),
    ("checkpoints", ("jaxserve", "server", "pallas_kernels", "torch")),
    ("server", ("torch",)),
    ("jaxserve/boundary", ("jax", "flax")),
    ("jaxserve/request", ("jax", "flax")),
    ("jaxserve/scheduling", ("jax", "flax")),
    ("jaxserve/memory", ("jax", "flax")),
    ("server/routes", ("jaxserve.memory", "jaxserve.scheduling", "jaxserve.execution")),
]
# The rooms of jaxserve from the ground up: each imports only from those before it. `ROOT:x` is a
# file at the root, where only what people import may lie.
FLOORS = (
    "ROOT:errors",
    "liveness",
    "config",
    "params",
    "ROOT:outputs",
    "tokenization",
    "request",
    "boundary",
    "memory",
    "scheduling",
    "observability",
    "parallel",
    "models",
    "sampling",
    "processes",
    "grammars",
    "compilation",
    "execution",
    "engine",
    "loading",
    "client",
    "isolation",
    "ROOT:functional",
    "ROOT:async_engine",
    "ROOT:async_llm_engine",
    "ROOT:llm_engine",
    "ROOT:llm",
    "ROOT:__init__",
    "evaluation",
    "jobs",
    "bench",
    "simulation",
    "vllm_paths",
    "ROOT:ray",
    "ROOT:__main__",
)
# The bundled models are trained and judged by torch, and nothing that serves imports these files.
TORCH_ALLOWED = (
    {f"checkpoints/tiny/{name}.py" for name in ("train", "muon", "evaluate", "export", "average")}
    | {
        f"checkpoints/pictures/{name}.py"
        for name in ("train", "network", "evaluate", "export", "by_hand")
    }
    | {"checkpoints/training.py"}
)
# Programs, which nothing imports.
PROGRAMS = (
    ROOT / "jaxserve" / "vllm_paths" / "entrypoints" / "openai" / "api_server.py",
    ROOT / "jaxserve" / "__main__.py",
    ROOT / "jaxserve" / "ray.py",  # which Ray imports
)
# Who may look at the clock of the wall, which jumps: dates for clients, and ages of files.
WALL_CLOCK = {
    "server/answers.py",
    "server/service.py",
    "server/request_spans.py",
    "server/routes/pooled.py",
    "server/routes/responses.py",
    "jaxserve/compilation/cache_bounds.py",
    "jaxserve/llm_engine.py",  # arrival times of vLLM's scripts
}
TYPE_CHECKING = ast.dump(ast.parse("TYPE_CHECKING", mode="eval").body)
FORBIDDEN_CALLS = ("eval", "exec")
PUBLIC_UNDERSCORES = ("_replace", "_asdict", "_fields", "_make", "_exit")  # named tuples', os._exit
FORBIDDEN_MODULES = ("pickle", "cloudpickle", "dill")


def sources(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file that a test below asks for; lists of all nodes of all files take a gigabyte."""
    kinds = ast.Import, ast.ImportFrom, ast.Call, ast.keyword, ast.Attribute, ast.If
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


@functools.cache
def imports(path: Path, *, at_run_time: bool = False) -> set[str]:
    """What a file imports; `at_run_time`: by its last name, that for annotations left out."""
    left_out: set[ast.AST] = set()
    if at_run_time:
        for node in nodes(path):
            if isinstance(node, ast.If) and ast.dump(node.test) == TYPE_CHECKING:
                left_out.update(node.body)
    found: set[str] = set()
    for node in nodes(path):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names}
            found |= set() if at_run_time else {module}
    return found


@pytest.mark.parametrize(("part", "never"), NEVER, ids=lambda v: v if isinstance(v, str) else "")
def test_imports_point_down(part: str, never: tuple[str, ...]) -> None:
    assert sources(part)
    for path in sources(part):
        if path in PROGRAMS:
            continue
        for name in imports(path):
            for bad in never:
                if bad == "torch" and str(path.relative_to(ROOT)) in TORCH_ALLOWED:
                    continue
                assert name != bad and not name.startswith(bad + "."), f"{path} imports {name}"


def imported_at_run_time(path: Path) -> set[str]:
    """What a file imports from jaxserve, that for annotations alone left out."""
    found = imports(path, at_run_time=True)
    return {name for name in found if name.startswith("jaxserve.")}


def room_of(module: str) -> str:
    first = module.split(".")[1]
    if (ROOT / "jaxserve" / first).is_dir():
        return first
    return f"ROOT:{first if (ROOT / 'jaxserve' / f'{first}.py').is_file() else '__init__'}"


def test_no_import_runs_up() -> None:
    floors = {room: floor for floor, room in enumerate(FLOORS)}
    upward = []
    for path in sources("jaxserve"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        room = room_of(module) if path.parent != ROOT / "jaxserve" else f"ROOT:{path.stem}"
        for name in imported_at_run_time(path):
            if floors[room_of(name)] > floors[room] and room != "ROOT:__init__":
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upward == []


def test_only_what_people_import_lies_at_the_root() -> None:
    root = {path.stem for path in (ROOT / "jaxserve").glob("*.py")}
    assert {f"ROOT:{name}" for name in root} == {x for x in FLOORS if x.startswith("ROOT:")}
    assert len(root) <= 10
    rooms = {path.parent.name for path in (ROOT / "jaxserve").glob("*/__init__.py")}
    assert rooms == {room for room in FLOORS if not room.startswith("ROOT:")}


def test_no_circle_of_imports() -> None:
    """Within a room too, so that each file can be read after those that it imports."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources("jaxserve")
    }
    graph = {}
    for module, path in modules.items():
        names = imported_at_run_time(path)
        graph[module] = {
            target
            for name in names
            for target in [name if name in modules else name.rpartition(".")[0]]
            if target in modules and target != module
        }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_vllms_paths_hold_no_logic() -> None:
    """Imports alone: what has logic lies in the room that its logic is of."""
    for path in sources("jaxserve/vllm_paths"):
        if path in PROGRAMS:
            continue
        for node in ast.parse(path.read_text()).body:
            is_names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert is_names or is_text or isinstance(node, ast.Import | ast.ImportFrom), path


def test_a_family_is_known_to_the_registry_alone() -> None:
    models = ROOT / "jaxserve" / "models"
    families = {path.parent.name for path in models.glob("*/__init__.py")}
    assert "llama" in families
    for package in (*PACKAGES, "benchmarks"):
        for path in sources(package):
            if path == models / "registry.py" or path.parent.parent == models:
                continue
            named = {name.removeprefix("jaxserve.models.").split(".")[0] for name in imports(path)}
            assert not named & families, path


def test_nothing_imports_the_trainer_but_itself() -> None:
    modules = {name.removesuffix(".py").replace("/", ".") for name in TORCH_ALLOWED}
    for package in PACKAGES:
        for path in sources(package):
            if str(path.relative_to(ROOT)) not in TORCH_ALLOWED:
                assert not imports(path) & modules, path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_untrusted_code_can_run(package: str) -> None:
    for path in sources(package):
        assert not {name.split(".")[0] for name in imports(path)} & set(FORBIDDEN_MODULES), path
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg != "trust_remote_code", f"{path}:{node.lineno}"


def test_nothing_is_measured_by_a_clock_that_jumps() -> None:
    clocks = re.compile(r"\btime\.time(_ns)?\b|datetime\.(utc)?now\(")
    for package in PACKAGES:
        for path in sources(package):
            if str(path.relative_to(ROOT)) not in WALL_CLOCK:
                assert not clocks.search(path.read_text()), path


def private_reaches(path: Path) -> list[str]:
    """Attributes with a leading underscore of anything but the object itself."""
    found = []
    for node in nodes(path):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.startswith("__") or node.attr in PUBLIC_UNDERSCORES:
            continue
        if ast.unparse(node.value) not in ("self", "cls", "super()"):
            found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("part", ["server", "benchmarks", "jaxserve"])
def test_nobody_reaches_into_privates(part: str) -> None:
    assert [reach for path in sources(part) for reach in private_reaches(path)] == []


def test_tests_use_the_engine_by_its_public_ways() -> None:
    """What they would otherwise break of the client at every change."""
    names = {"_engine", "_inputs", "_outputs", "_step", "_commands", "_streams", "_processor"}
    may_reach = re.compile(rf"\.({'|'.join(names)})\b")
    paths = [path for path in sources("tests") if may_reach.search(path.read_text())]
    found = [reach for path in paths for reach in private_reaches(path)]
    assert [reach for reach in found if reach.split(".")[-1] in names] == []


def test_the_loop_is_a_page_and_knows_no_feature() -> None:
    """Beam searches alone read what a feature tells: they decide which sequences there are."""
    text = (ROOT / "jaxserve/engine/loop.py").read_text()
    assert len(text.splitlines()) <= 300
    folder = ROOT / "jaxserve/execution/features"
    base = {"__init__", "feature", "own_features", "traced"}
    names = {path.stem for path in folder.glob("*.py")} - base - {"logprobs"}
    assert [name for name in names if re.search(rf"\b{name}\b", text, re.IGNORECASE)] == []
    assert "execution.features" not in text and text.lower().count("logprobs") == 2
