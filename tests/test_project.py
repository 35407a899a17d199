"""The house rules, read from the source: layers, budgets, bans, and what the files promise."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "finetune"

MAIN_COMMAND = "pip install . && finetune train recipes/quickstart.yaml"
TEST_COMMAND = 'pip install ".[test]" && python -m pytest'

# Each module, and what of the package it may import: modules or packages further up the list,
# "*" for all of them. A new module is placed here first: where it stands is its design.
LAYERS = {
    "errors": "",
    "files": "errors",
    "data": "",  # finetune/data/__init__.py
    "data.operations": "",
    "data.sentence": "errors data.operations",
    "recipe_yaml": "errors",
    "recipe_types": "errors data.sentence recipe_yaml",
    "recipe_check": "errors recipe_yaml recipe_types",
    "recipe_sections": "recipe_types",
    "recipe": "errors recipe_yaml recipe_check recipe_sections",
    "recipe_help": "errors data.operations recipe",
    "metrics": "errors",
    "readout": "metrics",
    "claims": "errors recipe metrics",
    "licences": "",
    "calibrate": "",
    "mistakes": "",
    "watch": "errors",
    "progress": "errors watch",
    "terminal": "errors",
    "disk_cache": "",
    "host_memory": "",
    "collector": "",
    "feature_cache": "disk_cache files progress",
    "hub": "",  # finetune/hub/__init__.py
    "hub.calls": "errors progress",
    "hub.reads": "errors hub progress",
    "models.posemb": "errors",
    "models.representation": "",
    "models.position": "errors models",
    "models.vit_scratch": "errors models",
    "models.shiftvit": "errors",
    "models.google_hybrid": "",
    "models.transformers_adapter": "errors models",
    "models": "models",  # importing it registers our own networks with timm
    "models.tensors": "errors",
    "models.head": "errors",
    "models.rename": "errors models",
    "models.google": "errors models",
    "models.config": "errors files",
    "models.timm_names": "errors",
    "models.packaged": "errors files models",
    "models.hub_files": "errors hub models",
    "models.transformers_files": "errors models",
    "models.weights": "errors files models",
    "models.cut": "errors models",
    "models.fit": "errors models",
    "models.built": "errors",
    "models.build": "errors models",
    "models.trial": "",
    "models.last_block": "models",
    "models.plain_attention": "models",
    "models.attention": "errors models",
    "models.anatomy": "",
    "inside": "errors models",
    "data.draws": "",
    "data.jpeg": "",
    "data.decode": "errors files data",
    "data.planes": "",
    "data.columns": "errors data",
    "data.items": "errors data",
    "data.hub_sets": "errors data hub",
    "data.ranges": "errors hub",
    "data.hub_shards": "errors data hub",
    "data.shards": "errors data",
    "data.streaming": "errors data",
    "data.tables": "errors data",
    "data.sources": "errors data",
    "data.splits": "errors data",
    "data.lanes": "data",
    "data.prefetch": "errors data",
    "data_of": "data errors recipe",
    "data.workers": "errors data watch",
    "data.slots": "",
    "data.canvas": "data",
    "data.scan": "errors data",
    "data.pixels": "data disk_cache errors",
    "data.resample": "errors data",
    "data.color": "errors data",
    "data.plan": "errors data",
    "data.augment": "errors data",
    "data.upload": "",
    "data.store": "errors data host_memory",
    "data.feed": "errors data",
    "data.rows": "data",
    "optim": "errors",
    "run_files": "errors files",
    "rundir": "errors files run_files",
    "state": "errors",
    "counters": "",
    "echo": "",
    "keeper": "run_files rundir state",
    "kernels": "models",
    "provenance": "errors",
    "drawing": "errors files",
    "figures": "errors metrics drawing",
    "card": "errors recipe claims licences metrics",
    "preprocess": "errors data recipe models",
    "features": "errors data feature_cache models preprocess progress provenance recipe watch",
    "measure": "calibrate data metrics mistakes",
    "job": "*",
    "frozen": "*",
    "live": "*",
    "rehearse": "models optim",
    "sizing": "*",
    "record": "*",
    "evidence": "*",
    "report": "",
    "report.data": "errors recipe run_files",
    "report.sections": "*",
    "report.pictures": "*",
    "report.comparison": "*",
    "report.page": "*",
    "hub.rights": "errors hub",
    "hub.content": "errors evidence hub progress rundir",
    "hub.push": "errors evidence files hub progress rundir",
    "finish": "*",
    "engine": "*",
    "bench": "",  # finetune/bench/__init__.py
    "bench.rates": "",
    "bench.clock": "bench",
    "bench.transforms": "errors data",
    "bench.inputs": "errors data",
    "bench.hosts": "collector errors watch",
    "bench.page": "errors files",
    "bench.subjects": "*",
    "bench.loops": "*",
    "bench.peers": "*",
    "bench.losses": "*",
    "bench.scaling": "*",
    "bench.studies": "*",
    "bench.run": "*",
    "plans": "errors recipe recipe_check recipe_types recipe_yaml",
    "probe": "*",
    "plan_table": "claims probe",
    "measured": "claims errors metrics plans recipe report run_files",
    "recipe_claims": "claims measured metrics plans recipe record report",
    "recipe_page": "*",
    "experiments": "*",
    "predictions": "errors",
    "evaluate": "*",
    "listing": "errors data",
    "sheet": "errors data predictions",
    "predict": "*",
    "info": "*",
    "otherwise": "*",
    "forecast": "*",
    "outlook": "data",
    "show": "*",
    "exporters": "errors",
    "export": "*",
    "demo": "",
    "demo.gate": "",
    "demo.reading": "*",
    "demo.page": "*",
    "demo.about": "*",
    "demo.app": "*",
    "demo.serve": "*",
    "demo.space": "*",
    "cli_results": "*",
    "cli": "*",
    "__main__": "*",
    "": "*",  # finetune/__init__.py: the public names
}
ACCELERATE_ALLOWED = {"engine"}

# Installed by a dependency of ours that cannot do without them.
BROUGHT_ALONG = {
    "numpy": "torchvision",
    "PIL": "torchvision",
    "pyarrow": "datasets",
    "scipy": "scikit-learn",
    "pydantic_core": "pydantic",
    "jinja2": "torch",
}
IMPORT_NAMES = {"PyYAML": "yaml", "scikit-learn": "sklearn"}

MAX_FILE_LINES = 500  # a file is about one subject; a longer one says at its head why
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS = {("engine", "train"): 80}  # it is the story


def module_name(path: Path) -> str:
    """`finetune/data/loader.py` → "data.feed"; `finetune/data/__init__.py` → "data"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def lines_of(module: str) -> list[str]:
    return file_of(module).read_text(encoding="utf-8").splitlines()


@cache
def modules() -> dict[str, ast.Module]:
    names = [module_name(path) for path in sorted(PACKAGE.rglob("*.py"))]
    assert "errors" in names
    return {name: ast.parse("\n".join(lines_of(name))) for name in names}


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(tree: ast.AST, *, at_run_time: bool = False) -> set[str]:
    """The dotted names that the imports under `tree` bring in, `from a import b` as a.b.

    Args:
        tree: a module, or a part of one.
        at_run_time: leave out what stands under `if TYPE_CHECKING`.
    """
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import; write the whole name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_run_time and is_typing_only(node)):
            found |= imported(node, at_run_time=at_run_time)
    return found


def own_imports(module: str) -> set[str]:
    """The modules of the package that a module imports, anywhere in its text."""
    found = set()
    for name in imported(modules()[module]):
        parts = name.split(".")
        if parts[0] != "finetune" or name == "finetune.__version__":  # nothing more than a text
            continue
        while parts[1:] and ".".join(parts[1:]) not in modules():
            parts.pop()  # the last part is a function or a class
        found.add(".".join(parts[1:]))
    return found - {module}


def is_allowed(module: str, target: str) -> bool:
    order = list(LAYERS)
    allowed = LAYERS[module].split()
    named = any(target == name or target.startswith(f"{name}.") for name in allowed)
    is_above = target in order[: order.index(module)]
    return is_above and (named or "*" in allowed)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def project_files() -> list[Path]:
    """Every file that is, or would be, under version control."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    files = [REPOSITORY / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in files if path.is_file()]


def texts() -> dict[Path, str]:
    """The project's text files, by path."""
    found = {}
    for path in project_files():
        try:
            found[path.relative_to(REPOSITORY)] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image or weights
    assert Path("setup.cfg") in found
    return found


@pytest.fixture(scope="module")
def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    return parser


class TestLayers:
    def test_every_module_has_a_place(self) -> None:
        strangers = sorted(set(modules()) - set(LAYERS))
        assert not strangers, f"not in LAYERS: {strangers}; decide what each may import"
        missing = sorted(set(LAYERS) - set(modules()))
        assert not missing, f"in LAYERS, but there is no such module: {missing}"

    def test_imports_only_go_up_the_list(self) -> None:
        wrong, seen = [], 0
        for module in set(LAYERS) & set(modules()):
            for target in own_imports(module):
                seen += 1
                if not is_allowed(module, target):
                    wrong.append(f"{module} imports {target or 'finetune'}")
        assert seen > 20  # the reader of imports works
        assert not wrong

    def test_the_rule_itself_can_fail(self) -> None:
        assert is_allowed("data.feed", "data.augment")
        assert not is_allowed("data.augment", "data.feed")
        assert not is_allowed("models.build", "data.decode")
        assert not is_allowed("data.feed", "")

    def test_only_the_engine_touches_accelerate(self) -> None:
        users = {
            module
            for module, tree in modules().items()
            if any(name.split(".")[0] == "accelerate" for name in imported(tree, at_run_time=True))
        }
        assert users == ACCELERATE_ALLOWED

    def test_the_recipe_side_is_free_of_torch(self) -> None:
        for module in ("errors", "data.sentence", "recipe_yaml", "recipe_sections", "recipe"):
            roots = {name.split(".")[0] for name in imported(modules()[module])}
            assert not roots & {"torch", "timm", "numpy", "accelerate"}, module

    def test_the_command_line_starts_without_the_heavy_libraries(self) -> None:
        heavy = ("torch", "timm", "torchvision", "accelerate", "datasets", "sklearn", "matplotlib")
        code = (
            "import sys, finetune, finetune.cli.main; "
            f"print([name for name in {heavy!r} if name in sys.modules])"
        )
        out = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == "[]"


class TestBudgets:
    def test_a_file_is_a_room(self) -> None:
        sizes = {name: len(lines_of(name)) for name in modules()}
        assert not {name: size for name, size in sizes.items() if size > MAX_FILE_LINES}

    def test_a_function_fits_a_screen(self) -> None:
        long = []
        for module, tree in modules().items():
            for function in functions(tree):
                assert function.end_lineno is not None
                size = function.end_lineno - function.lineno + 1
                if size > LONG_FUNCTIONS.get((module, function.name), MAX_FUNCTION_LINES):
                    long.append(f"{module}.{function.name}: {size} lines")
        assert not long


class TestBans:
    BANNED = (
        r"weights_only\s*=\s*False",
        r"allow_pickle\s*=\s*True",
        r"trust_remote_code\s*=\s*True",
        r"yaml\.(load|full_load|unsafe_load)\(",
        r"\b(TODO|FIXME|XXX)\b",
        r"\bshell\s*=\s*True",
        r"\bos\.system\(",
        r"(?<![\w.])(eval|exec)\(",
        r"^\s*(import|from)\s+(c?[Pp]ickle|dill|marshal|shelve)\b",
        r"raise NotImplementedError\b",
        r"suppress\((Base)?Exception\)",
        r"#\s*type:\s*ignore(?!\[)",
        r"#\s*noqa(?!:)",
    )

    @pytest.mark.parametrize("pattern", BANNED)
    def test_constructs_that_have_no_place_here(self, pattern: str) -> None:
        found = [
            f"{module}:{number}: {line.strip()}"
            for module in modules()
            for number, line in enumerate(
                file_of(module).read_text(encoding="utf-8").splitlines(), 1
            )
            if re.search(pattern, line)
        ]
        assert not found

    def test_no_exception_is_swallowed_whole(self) -> None:
        handlers = [
            (module, node)
            for module, tree in modules().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ExceptHandler)
        ]
        assert handlers
        swallowed = []
        for module, node in handlers:
            name = ast.unparse(node.type) if node.type else "BaseException"
            silent = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
            if (name in ("Exception", "BaseException") and silent) or not node.type:
                swallowed.append(f"{module}:{node.lineno}")
        assert not swallowed

    def test_torch_load_only_reads_tensors(self) -> None:
        for module, tree in modules().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    safe = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
                    assert safe.get("weights_only") == "True", f"{module}:{node.lineno}"

    def test_nothing_speaks_of_where_it_was_made(self) -> None:
        # Brackets keep this file from finding itself.
        words = re.compile(
            r"/wor[k]/|/roo[t]/|/hom[e]/[a-z]|(?<!user-)\b(?:sub)?agen[t]s?\b|\bthis sessio[n]\b"
            r"|\blanguage mode[l]\b|\bissu[e] #?\d",
            re.IGNORECASE,
        )
        found = [
            f"{path}:{number}: {line.strip()[:90]}"
            for path, text in texts().items()
            if path != Path("LICENSE") and words.search(text)
            for number, line in enumerate(text.splitlines(), 1)
            if words.search(line)
        ]
        assert not found


class TestPublicNames:
    @staticmethod
    def listed(tree: ast.Module) -> list[str] | None:
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return [ast.literal_eval(name) for name in node.value.elts]  # type: ignore[attr-defined]
        return None

    @staticmethod
    def is_verb(node: ast.AST) -> bool:
        """A click command is reached through its group, not by its name."""
        decorators = [ast.unparse(item) for item in getattr(node, "decorator_list", [])]
        return any(re.match(r"\w+\.(command|group)\(", text) for text in decorators)

    def test_every_module_lists_them_and_they_exist(self) -> None:
        checked = 0
        for module, tree in modules().items():
            if module == "__main__" or not any(not isinstance(n, ast.Expr) for n in tree.body):
                continue
            names = self.listed(tree)
            assert names is not None, f"{module}: no __all__"
            assert len(names) == len(set(names)), module
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            public = {
                node.name
                for node in tree.body
                if isinstance(node, kinds)
                and not node.name.startswith("_")
                and not (module.startswith("cli") and self.is_verb(node))
            }
            assert public <= set(names), f"{module}: not in __all__: {public - set(names)}"
            checked += 1
        assert checked > 10

    def test_every_public_name_has_a_docstring(self) -> None:
        bare = []
        for module, tree in modules().items():
            assert ast.get_docstring(tree) or not tree.body, f"{module}: no docstring"
            names = self.listed(tree) or []
            for node in tree.body:
                if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                    continue
                if node.name in names and not ast.get_docstring(node):
                    bare.append(f"{module}.{node.name}")
        assert not bare

    def test_star_imports_nothing_that_is_not_there(self) -> None:
        import importlib

        for module in modules():
            if module == "__main__":
                continue
            loaded = importlib.import_module(f"finetune.{module}".rstrip("."))
            for name in getattr(loaded, "__all__", []):
                assert hasattr(loaded, name), f"{module}.{name}"


class TestPromises:
    def test_the_readme_holds_the_two_commands(self) -> None:
        readme = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
        for command in (MAIN_COMMAND, TEST_COMMAND):
            assert sum(line.strip() == command for line in readme) == 1, command

    def test_ci_ends_with_the_readmes_test_command(self) -> None:
        script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()
        assert script[-1] == TEST_COMMAND
        assert "set -euo pipefail" in script
        for check in ("pip check", "ruff check .", "ruff format --check .", "mypy finetune"):
            assert check in script

    def test_ci_runs_the_same_script_and_may_only_read(self) -> None:
        workflow = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
        assert "permissions:\n  contents: read\n" in workflow
        assert "write" not in workflow
        assert "- run: .ci/run" in workflow
        uses = re.findall(r"uses:\s*(\S+)", workflow)
        assert uses
        for action in uses:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action

    def test_pyproject_is_the_build_system_only(self) -> None:
        text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
        assert re.findall(r"^\[.*\]$", text, re.MULTILINE) == ["[build-system]"]

    def test_everything_imported_at_the_top_is_a_dependency(
        self, settings: configparser.ConfigParser
    ) -> None:
        required = re.findall(r"^[\w-]+", settings["options"]["install_requires"].strip(), re.M)
        assert "torch" in required
        known = {IMPORT_NAMES.get(name, name) for name in required}
        known |= {name for name, owner in BROUGHT_ALONG.items() if owner in required}
        known |= {"finetune", *sys.stdlib_module_names}
        for module, tree in modules().items():
            top = ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef)], [])
            roots = {name.split(".")[0] for name in imported(top, at_run_time=True)}
            assert roots <= known, f"{module}: {sorted(roots - known)}"

    def test_every_floor_is_admitted_here(self, settings: configparser.ConfigParser) -> None:
        from importlib.metadata import version

        from packaging.requirements import Requirement

        lines = settings["options"]["install_requires"].split("\n")
        requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
        assert len(requirements) >= 13
        for requirement in requirements:
            assert requirement.specifier, f"{requirement}: no floor"
            assert requirement.specifier.contains(version(requirement.name), prereleases=True)

    def test_the_tests_mirror_the_package(self) -> None:
        here = {path.name for path in (REPOSITORY / "tests").glob("test_*.py")}
        wanted = [
            name for name in modules() if file_of(name).name not in ("__init__.py", "__main__.py")
        ]
        assert wanted
        # with the package's name where two packages have a module of the same name
        without = [
            name
            for name in wanted
            if not here & {f"test_{name.split('.')[-1]}.py", f"test_{name.replace('.', '_')}.py"}
        ]
        assert not without

    def test_the_license_is_whole(self) -> None:
        text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
        assert "Apache License\n                           Version 2.0, January 2004" in text
        assert "END OF TERMS AND CONDITIONS" in text


class TestSuite:
    """The suite's own surroundings."""

    def test_no_test_can_leave_this_machine(self) -> None:
        import socket

        for address in ("93.184.216.34", "huggingface.co"):
            with pytest.raises(ConnectionError, match="without a network"):
                socket.create_connection((address, 443), timeout=1)

    def test_loopback_stays_open(self) -> None:
        import socket

        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5) as client,
        ):
            assert client.getpeername() == server.getsockname()

    def test_sums_are_repeatable(self) -> None:
        import os

        import torch

        assert torch.get_num_threads() == 1
        assert os.environ["HF_HUB_OFFLINE"] == "1"

    def test_image_folder_is_what_it_says(self, image_folder: Path) -> None:
        counts = {
            (path.parent.parent.name, path.parent.name): len(list(path.parent.iterdir()))
            for path in image_folder.rglob("*.png")
        }
        classes = ("red", "green", "blue")
        assert counts == {(s, c): n for s, n in (("train", 8), ("test", 4)) for c in classes}
