"""The supply chain: what runs in CI and with which rights, and what SECURITY.md says of it."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.y*ml"))
SECURITY = REPOSITORY / "SECURITY.md"

# What turns a safety off, or runs what was read. Brackets keep the list from finding itself.
BANNED = (
    r"weights_only[\"']?\s*[=:]\s*[F]alse",
    r"allow_pickle[\"']?\s*[=:]\s*[T]rue",
    r"trust_remote_code[\"']?\s*[=:]\s*[T]rue",
    r"yaml\.(load|full_load|unsafe_load|load_all|unsafe_load_all)[(]",
    r"\b(c?[Pp]ickle|dill|joblib|cloudpickle|marshal)\.(loads?|Unpickler)\b",
    r"\badd_safe_global[s]\b",
    r"TORCH_FORCE_NO_WEIGHTS_ONLY_LOA[D]",
    r"\bverify\s*=\s*[F]alse",
    r"[_]create_unverified_context",
    r"HF_HUB_DISABLE_CERTIFICATE|CURL_CA_BUNDLE=['\"]{2}",
)
# In code: what carries out text. A name behind a dot is a method, such as a network's eval().
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """The texts of a file, and whether each is Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        yield text, path.suffix == ".py"
        return
    for cell in json.loads(text)["cells"]:
        lines = "".join(cell["source"]).splitlines()
        plain = [line for line in lines if not line.lstrip().startswith(("%", "!"))]
        yield "\n".join(plain), cell["cell_type"] == "code"


def surveyed() -> list[Path]:
    """All that is shipped or read: the package, recipes, notebooks and texts."""
    found = list(REPOSITORY.glob("*.md"))
    for folder in ("finetune", "recipes", "notebooks", ".ci", ".github"):
        found += [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    binary = {".safetensors", ".png", ".npz", ".pyc", ".jpg", ".parquet", ".gz"}
    return [path for path in found if path.suffix not in binary and "__pycache__" not in path.parts]


def problems(text: str, *, python: bool) -> list[str]:
    """The ones of the above that a text holds."""
    found = [match[0] for pattern in BANNED for match in re.finditer(pattern, text)]
    if not python:
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy"):
            found += [f"{node.module}.load" for name in node.names if name.name == "load"]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in RUNS_TEXT:
            found.append(name)
        if name.endswith("torch.load") and words.get("weights_only") != "True":
            found.append(name)
        if name in ("np.load", "numpy.load") and words.get("allow_pickle") != "False":
            found.append(name)
    return found


class TestTheLint:
    @pytest.mark.parametrize(
        "line",
        [
            "torch.load(path)",
            "torch.load(path, weights_only=False)".replace("False", "F" + "alse"),
            "np.load(path)",
            "from torch import load as read",
            "from numpy import load",
            "np.load(path, allow_pickle=x)",
            "yaml." + "load(text, Loader)",
            "pickle." + "loads(body)",
            "AutoModel.from_pretrained(x, trust_remote_code=" + "True)",
            "eval(text)",
            "exec(text)",
        ],
    )
    def test_it_sees(self, line: str) -> None:
        assert problems(line, python=True)

    @pytest.mark.parametrize(
        "line", ["model.eval()", "torch.load(p, weights_only=True)", "yaml.safe_load(text)"]
    )
    def test_it_lets_through(self, line: str) -> None:
        assert not problems(line, python=True)

    def test_nothing_turns_a_safety_off(self, fault: Callable[..., None]) -> None:
        """Code, recipes, notebooks, and the words of README, messages and the other texts."""
        paths = surveyed()
        assert len(paths) > 100
        found = {
            f"{path.relative_to(REPOSITORY)}: {problem}"
            for path in paths
            for text, python in pieces(path)
            for problem in problems(text, python=python)
        }
        assert not found
        fault(
            "Source, recipes, notebooks and texts, read for what turns a safety off",
            "nothing loads pickles, runs text or foreign code, or advises to",
            f"{len(paths)} files",
        )


class TestTheWorkflows:
    @pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
    def workflow(self, request: pytest.FixtureRequest) -> dict[Any, Any]:
        found = yaml.safe_load(request.param.read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        return found

    def test_there_are_some(self) -> None:
        assert WORKFLOWS

    def test_actions_are_pinned_and_may_only_read(
        self, workflow: dict[Any, Any], fault: Callable[..., None]
    ) -> None:
        assert workflow["permissions"] == {"contents": "read"}
        steps = []
        for setup in workflow["jobs"].values():
            assert "permissions" not in setup  # none takes more than the workflow gives
            assert setup["timeout-minutes"] <= 60
            steps += setup["steps"]
        uses = [step["uses"] for step in steps if "uses" in step]
        assert uses
        for action in uses:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action), action
        fault(
            "CI: actions and their rights",
            "actions pinned by commit; the token may only read",
            f"{len(uses)} actions",
        )

    def test_a_stranger_s_pull_request_gets_nothing(self, workflow: dict[Any, Any]) -> None:
        # YAML 1.1 takes the key `on` for true
        events = set(workflow[True])
        assert events <= {"push", "pull_request", "schedule", "workflow_dispatch"}
        text = json.dumps(workflow, default=str)
        assert "secrets." not in text
        # what a stranger can write must not become a line of a shell
        for setup in workflow["jobs"].values():
            for step in setup["steps"]:
                assert "${{" not in step.get("run", ""), step
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False


class TestTheDependencies:
    def test_pip_check_is_part_of_the_check(self, fault: Callable[..., None]) -> None:
        script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
        assert "\npip check\n" in script
        assert script.index('pip install --quiet ".[test]"') < script.index("\npip check\n")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
        )
        ours = [line for line in done.stdout.splitlines() if line.startswith("finetune-vision ")]
        assert not ours
        fault("`pip check`", "what is installed fits together; .ci/run runs it", "")

    def test_nothing_is_taken_from_elsewhere_than_the_index(self) -> None:
        """No address, no other index, no switch that leaves out a check."""
        for name in ("setup.cfg", "pyproject.toml", ".ci/run"):
            text = (REPOSITORY / name).read_text(encoding="utf-8")
            for pattern in ("git\\+", "@ https?:", "index-url", "trusted-host", "curl|wget"):
                assert not re.search(pattern, text), (name, pattern)

    @pytest.mark.parametrize(
        "package, least, why",
        [
            ("torch", (2, 6), "its restricted reader ran code before"),
            ("datasets", (4, 0), "it ran loading scripts before"),
            ("pyarrow", (14, 0, 1), "it loaded pickles out of parquet files before"),
            ("pillow", (12,), "older ones have known holes in their decoders"),
        ],
    )
    def test_versions_with_known_holes_are_not_here(
        self, package: str, least: tuple[int, ...], why: str
    ) -> None:
        numbers = re.findall(r"\d+", importlib.metadata.version(package).partition("+")[0])
        assert tuple(map(int, numbers))[: len(least)] >= least, why

    def test_floors_are_above_versions_that_run_code(self) -> None:
        text = (REPOSITORY / "setup.cfg").read_text(encoding="utf-8")
        for package, least in (("torch", (2, 6)), ("datasets", (4, 0)), ("PyYAML", (5, 4))):
            floor = re.search(rf"^    {package}>=([\d.]+)$", text, re.M)
            assert floor is not None, package
            assert tuple(map(int, floor[1].split("."))) >= least, package


class TestSecurityText:
    def test_it_says_how_to_report_what_is_promised_and_what_is_not(self) -> None:
        text = SECURITY.read_text(encoding="utf-8")
        assert re.findall(r"^## (.*)$", text, re.M) == [
            "Reporting",
            "What is promised",
            "What is not promised",
            "What is checked in CI",
        ]
        assert "Report a vulnerability" in text

    def test_every_promise_names_a_test_that_is_there(self, fault: Callable[..., None]) -> None:
        text = SECURITY.read_text(encoding="utf-8")
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
        assert len(named) >= 6
        for path, test in named:
            source = (REPOSITORY / path).read_text(encoding="utf-8")
            assert not test or re.search(rf"\b{test}\b", source), (path, test)
        fault(
            "SECURITY.md", "each promise names its tests, and they are there", f"{len(named)} tests"
        )

    def test_its_limits_are_the_code_s(self) -> None:
        from finetune.data import decode
        from finetune.recipe import strict_yaml as recipe_yaml

        text = SECURITY.read_text(encoding="utf-8")
        assert f"{decode.MAX_PIXELS:,} pixels" in text
        assert f"{recipe_yaml.MAX_BYTES:,} bytes" in text

    def test_what_it_says_of_the_audit_is_so(self) -> None:
        """Said: there is no audit, since a database cannot be had offline."""
        text = SECURITY.read_text(encoding="utf-8")
        script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
        assert "pip-audit" in script
        assert "pip-audit" in text
        commands = [line for line in script.splitlines() if not line.startswith("#")]
        assert not [line for line in commands if "pip-audit" in line]
