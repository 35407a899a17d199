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

import finetune
from finetune import errors

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "finetune"

MAIN_COMMAND = "pip install . && finetune train recipes/quickstart.yaml"
TEST_COMMAND = 'pip install ".[test]" && python -m pytest'

# The packages and single modules from the ground up; imports go down only.
ORDER = (
    *("errors", "ranks", "process_lifecycle", "log", "formatting", "files", "cache", "progress"),
    *("host_resources", "model_checksums", "precision", "source_kinds"),
    *(
        "web",
        "hub",
        "transforms",
        "recipe",
        "models",
        "data",
        "run",
        "evaluation",
        "report",
        "publish",
    ),
    *("training", "inference", "bench", "commands", "doctor", "demo", "cli", "__main__"),
)
ACCELERATE_ALLOWED = {"training"}  # packages

# Installed by a dependency of ours that cannot do without them.
BROUGHT_ALONG = {
    "numpy": "torchvision",
    "PIL": "torchvision",
    "pyarrow": "datasets",
    "scipy": "scikit-learn",
    "threadpoolctl": "scikit-learn",
    "pydantic_core": "pydantic",
    "typing_extensions": "pydantic",
    "jinja2": "torch",
}
IMPORT_NAMES = {"PyYAML": "yaml", "scikit-learn": "sklearn"}


def module_name(path: Path) -> str:
    """`finetune/data/loader.py` → "data.loader"; `finetune/data/__init__.py` → "data"."""
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


@cache
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


def package_of(module: str) -> str:
    """`data.loader` → "data"; a single module is its own."""
    return module.partition(".")[0]


@cache
def arrows() -> set[tuple[str, str]]:
    """Which package imports which; the public names (finetune/__init__.py) import what they are."""
    found = set()
    for module in modules():
        for target in own_imports(module) - {""}:
            if module and package_of(module) != package_of(target):
                found.add((package_of(module), package_of(target)))
    return found


def goes_up(arrow: tuple[str, str]) -> bool:
    return ORDER.index(arrow[0]) < ORDER.index(arrow[1])


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
    def test_every_package_has_a_place(self) -> None:
        there = {package_of(module) for module in modules()} - {""}
        assert there == set(ORDER)

    def test_imports_go_down_only(self) -> None:
        """So there is no circle either."""
        assert len(arrows()) > 40  # the reader of imports works
        assert not sorted(filter(goes_up, arrows()))

    def test_the_rule_itself_can_fail(self) -> None:
        assert goes_up(("data", "training"))
        assert not goes_up(("training", "data"))

    def test_no_module_imports_the_public_names(self) -> None:
        assert not [module for module in modules() if "" in own_imports(module)]

    def test_training_alone_touches_accelerate(self) -> None:
        users = {
            package_of(module)
            for module, tree in modules().items()
            if any(name.split(".")[0] == "accelerate" for name in imported(tree, at_run_time=True))
        }
        assert users == ACCELERATE_ALLOWED

    def test_the_recipe_side_is_free_of_torch(self) -> None:
        for module in (
            "errors",
            "transforms.spec_parser",
            *(m for m in modules() if m[:6] == "recipe"),
        ):
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


# Private names of other libraries, with the reason why no public name serves.
PRIVATE_NAMES = {
    # ends a process that must not run the exit handlers of the one it was forked from
    "os._exit": "documented by Python",
    # namedtuples: their methods have underscores to leave the names of fields free
    "first_row._replace": "documented by Python",
    "row._replace": "documented by Python",
    # operators, whose names begin with an underscore in the registry
    "torch.ops.mkldnn._linear_pointwise": "half the time of nn.Linear on a 2024 EPYC",
    "torch._softmax_backward_data": "2.8 times as fast as the formula in bf16",
    "_ATEN._scaled_dot_product_flash_attention_for_cpu": "a key of FlopCounterMode",
    "_ATEN._scaled_dot_product_flash_attention_for_cpu_backward": "a key of FlopCounterMode",
    "_ATEN._scaled_dot_product_flash_attention_backward": "a key of FlopCounterMode",
    "_ATEN._scaled_dot_product_efficient_attention_backward": "a key of FlopCounterMode",
    "_ATEN._scaled_dot_product_cudnn_attention_backward": "a key of FlopCounterMode",
    # Accelerate keeps the precision of the first run of a process for all later ones
    "AcceleratorState._reset_state": "no public function clears it",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_private_names(tree: ast.AST) -> set[str]:
    """Return the private names that a module defines: functions, classes, attributes, fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def private_names_used(tree: ast.AST) -> set[str]:
    """Return the private names of other libraries that a module imports or uses."""
    own, used = own_private_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names if "._" in f".{alias.name}"}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in ("__future__", "finetune"):
                continue
            if "._" in f".{node.module}":
                used.add(node.module)
            used |= {f"{node.module}.{a.name}" for a in node.names if is_private(a.name)}
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = ast.unparse(node.value) in ("self", "cls") or node.attr in own
            used |= set() if is_own else {ast.unparse(node)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in own:
                used.add(ast.unparse(node))
    return used


class TestPrivateNames:
    def test_no_private_name_of_another_library_is_used(self) -> None:
        used = {
            name: module for module, tree in modules().items() for name in private_names_used(tree)
        }
        assert {name: used[name] for name in used.keys() - PRIVATE_NAMES.keys()} == {}
        assert PRIVATE_NAMES.keys() - used.keys() == set(), "exceptions that nothing needs"

    @pytest.mark.parametrize(
        "code, name",
        [
            ("from torch._C import x", "torch._C"),
            ("import torch._dynamo", "torch._dynamo"),
            ("from timm.models import _builder", "timm.models._builder"),
            ("def f(model): return model._modules", "model._modules"),
            ("def f(model): return getattr(model, '_modules', None)", "_modules"),
            ("class A:\n    def f(self, b): return self.net._modules", "self.net._modules"),
            ("class A:\n    def f(self, other): return self._x + other._x", None),
            ("def _f(): return __name__", None),
        ],
    )
    def test_the_search_finds_private_names(self, code: str, name: str | None) -> None:
        found = private_names_used(ast.parse(code))
        assert [name in each for each in found] == ([True] if name else [])


class TestPublicNames:
    @staticmethod
    def listed(tree: ast.Module) -> list[str] | None:
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return [ast.literal_eval(name) for name in node.value.elts]  # type: ignore[attr-defined]
        return None

    @staticmethod
    def is_command(node: ast.AST) -> bool:
        """A click command is reached through its group, not by its name."""
        decorators = [ast.unparse(item) for item in getattr(node, "decorator_list", [])]
        return any(re.match(r"(?:\w+\.)?(command|group)\(", text) for text in decorators)

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
                and not (module.startswith("cli") and self.is_command(node))
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


class TestErrors:
    FAMILIES = {  # noqa: RUF012
        name: kind.code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.FinetuneError)
    }

    def test_every_error_of_ours_has_a_code_of_its_family(self) -> None:
        codes = set()
        for module, tree in modules().items():
            for call in ast.walk(tree):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                    continue
                family = self.FAMILIES.get(call.func.id)
                if family in (None, "internal", "interrupted", "paused"):
                    continue
                given = [word.value for word in call.keywords if word.arg == "code"]
                assert given, f"{module}:{call.lineno}: {call.func.id} without a code"
                for text in given:
                    if isinstance(text, ast.Constant):
                        assert re.fullmatch(rf"{family}\.[a-z0-9_]+", text.value), text.value
                        codes.add(text.value)
        assert len(codes) > 60


class TestPromises:
    def test_the_readme_holds_the_two_commands(self) -> None:
        readme = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
        for command in (MAIN_COMMAND, TEST_COMMAND):
            assert sum(line.strip() == command for line in readme) == 1, command

    def test_ci_ends_with_the_readmes_test_command(self) -> None:
        script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()
        assert script[-1] == TEST_COMMAND
        assert "set -euo pipefail" in script
        checks = ("pip check", "ruff check .", "ruff format --check .", "mypy finetune tests/gpu")
        for check in checks:
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
            inside = ast.FunctionDef | ast.ClassDef
            top = ast.Module([n for n in tree.body if not isinstance(n, inside)], [])
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

    @staticmethod
    def named_in(page: str) -> list[str]:
        """The files and folders that a page of the package names, as often as it names them."""
        return re.findall(r"[\w./-]+\.(?:py|html|css|js)\b|(?<=`)[\w./-]+/(?=`)", page)

    def test_the_walk_names_what_is_there_and_nothing_twice(self) -> None:
        page = (PACKAGE / "README.md").read_text(encoding="utf-8")
        named = self.named_in(page)
        assert len(named) > 80
        assert not [name for name in named if not (PACKAGE / name).exists()]
        assert not {name for name in named if named.count(name) > 1}
        assert len(page.splitlines()) <= 350

    def test_the_texts_name_only_files_that_are_there(self) -> None:
        named = {
            (path.name, name.rstrip("./"))
            for path in REPOSITORY.glob("*.md")
            for name in re.findall(
                r"(?<![\w./-])(?:finetune|tests)/[\w./-]*", path.read_text(encoding="utf-8")
            )
        }
        assert len(named) > 30
        assert not sorted(pair for pair in named if not (REPOSITORY / pair[1]).exists())

    def test_the_walk_begins_with_the_packages_in_their_order(self) -> None:
        page = (PACKAGE / "README.md").read_text(encoding="utf-8")
        first = [name.rstrip("/").removesuffix(".py") for name in self.named_in(page)]
        assert first[: len(ORDER)] == list(ORDER)

    def test_a_name_on_the_walk_is_seen_however_it_is_written(self) -> None:
        text = (
            "`data/loader.py`, data/hub_dataset.py's, and `hub/`; `run.json`, [here](run/gone.py)"
        )
        assert self.named_in(text) == [
            "data/loader.py",
            "data/hub_dataset.py",
            "hub/",
            "run/gone.py",
        ]

    def test_the_citation_names_this_version(self) -> None:
        text = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
        assert f"\nversion: {finetune.__version__}\n" in text

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
