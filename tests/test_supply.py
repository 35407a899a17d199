"""The supply chain: unsafe constructs, CI permissions, dependencies, and SECURITY.md."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.y*ml"))
SECURITY = REPOSITORY / "SECURITY.md"

# Constructs that turn a safety check off or run loaded code. Brackets: no match in this file.
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
# Functions that run text as code. A name after a dot is a method, such as model.eval().
RUNS_CODE = {"eval", "exec", "compile", "__import__"}


def split_into_texts(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a file, and whether each is Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        yield text, path.suffix == ".py"
        return
    for cell in json.loads(text)["cells"]:
        lines = "".join(cell["source"]).splitlines()
        plain = [line for line in lines if not line.lstrip().startswith(("%", "!"))]
        yield "\n".join(plain), cell["cell_type"] == "code"


def project_files() -> list[Path]:
    """Return the files of the package, recipes, notebooks and texts."""
    paths = list(REPOSITORY.glob("*.md"))
    for folder in ("finetune", "recipes", "notebooks", ".ci", ".github"):
        paths += [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    binary = {".safetensors", ".png", ".npz", ".pyc", ".jpg", ".parquet", ".gz"}
    return [path for path in paths if path.suffix not in binary and "__pycache__" not in path.parts]


def unsafe_constructs(text: str, *, python: bool) -> list[str]:
    """Return the unsafe constructs in a text."""
    found = [match[0] for pattern in BANNED for match in re.finditer(pattern, text)]
    if not python:
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy"):
            found += [f"{node.module}.load" for name in node.names if name.name == "load"]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in RUNS_CODE:
            found.append(name)
        if not name.endswith("load"):
            continue
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name.endswith("torch.load") and keywords.get("weights_only") != "True":
            found.append(name)
        if name in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False":
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
    def test_unsafe_lines_are_found(self, line: str) -> None:
        assert unsafe_constructs(line, python=True)

    @pytest.mark.parametrize(
        "line", ["model.eval()", "torch.load(p, weights_only=True)", "yaml.safe_load(text)"]
    )
    def test_safe_lines_pass(self, line: str) -> None:
        assert not unsafe_constructs(line, python=True)

    def test_no_project_file_turns_a_safety_check_off(self) -> None:
        """Check code, recipes, notebooks, messages, README and the other texts."""
        paths = project_files()
        assert len(paths) > 100
        found = {
            f"{path.relative_to(REPOSITORY)}: {problem}"
            for path in paths
            for text, python in split_into_texts(path)
            for problem in unsafe_constructs(text, python=python)
        }
        assert not found


class TestTheWorkflows:
    @pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
    def workflow(self, request: pytest.FixtureRequest) -> dict[Any, Any]:
        content = yaml.safe_load(request.param.read_text(encoding="utf-8"))
        assert isinstance(content, dict)
        return content

    def test_workflows_exist(self) -> None:
        assert WORKFLOWS

    def test_actions_are_pinned_and_read_only(self, workflow: dict[Any, Any]) -> None:
        assert workflow["permissions"] == {"contents": "read"}
        steps = []
        for job in workflow["jobs"].values():
            assert "permissions" not in job  # no job gets more than the workflow
            assert job["timeout-minutes"] <= 60
            steps += job["steps"]
        uses = [step["uses"] for step in steps if "uses" in step]
        assert uses
        for action in uses:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action), action

    def test_a_pull_request_of_a_stranger_gets_no_secrets(self, workflow: dict[Any, Any]) -> None:
        # YAML 1.1 reads the key `on` as true
        events = set(workflow[True])
        assert events <= {"push", "pull_request", "schedule", "workflow_dispatch"}
        text = json.dumps(workflow, default=str)
        assert "secrets." not in text
        # text from a stranger must not become part of a shell command
        for job in workflow["jobs"].values():
            for step in job["steps"]:
                assert "${{" not in step.get("run", ""), step
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False


class TestDependencies:
    def test_pip_check_is_part_of_ci(self) -> None:
        script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
        assert "\npip check\n" in script
        assert script.index('pip install --quiet ".[test]"') < script.index("\npip check\n")
        result = subprocess.run(
            [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
        )
        conflicts = [
            line for line in result.stdout.splitlines() if line.startswith("finetune-vision ")
        ]
        assert not conflicts

    def test_packages_come_only_from_the_index(self) -> None:
        """No URL, no other index, no option that skips a check."""
        for name in ("setup.cfg", "pyproject.toml", ".ci/run"):
            text = (REPOSITORY / name).read_text(encoding="utf-8")
            for pattern in ("git\\+", "@ https?:", "index-url", "trusted-host", "curl|wget"):
                assert not re.search(pattern, text), (name, pattern)


class TestSecurityPolicy:
    def test_it_has_all_sections(self) -> None:
        text = SECURITY.read_text(encoding="utf-8")
        assert re.findall(r"^## (.*)$", text, re.M) == [
            "Reporting",
            "What is promised",
            "What is not promised",
            "What is checked in CI",
        ]
        assert "Report a vulnerability" in text

    def test_every_promise_names_an_existing_test(self) -> None:
        text = SECURITY.read_text(encoding="utf-8")
        references = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
        assert len(references) >= 6
        for path, test in references:
            source = (REPOSITORY / path).read_text(encoding="utf-8")
            assert not test or re.search(rf"\b{test}\b", source), (path, test)

    def test_its_limits_match_the_code(self) -> None:
        from finetune.data import decode
        from finetune.recipe import strict_yaml

        text = SECURITY.read_text(encoding="utf-8")
        assert f"{decode.MAX_PIXELS:,} pixels" in text
        assert f"{strict_yaml.MAX_BYTES:,} bytes" in text

    def test_its_statement_about_the_audit_is_true(self) -> None:
        """SECURITY.md states that no audit runs, since its database is not available offline."""
        text = SECURITY.read_text(encoding="utf-8")
        script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
        assert "pip-audit" in script
        assert "pip-audit" in text
        commands = [line for line in script.splitlines() if not line.startswith("#")]
        assert not [line for line in commands if "pip-audit" in line]
