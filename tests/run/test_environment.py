"""The environment recorded in run.json, and the launcher's command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from forked_runs import check_child_success, run_in_child
from refusals import refused

from finetune.precision import resolve_precision
from finetune.run import environment as provenance
from finetune.run.environment import collect_environment
from finetune.training.launcher import requested_num_processes


def test_environment_is_json_serializable() -> None:
    environment = collect_environment(torch.device("cpu"), 2)
    assert json.loads(json.dumps(environment)) == environment
    assert environment["versions"]["torch"] == version("torch")
    assert environment["num_processes"] == 2
    assert environment["device"]["type"] == "cpu"


def test_the_recorded_command_line_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary0wandb0key0f00d")
    secrets = [
        "--token=hf_CanaryThatMustBeSeenNowhere",
        "https://me:canary@hub/x",
        "canary0wandb0key0f00d",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/finetune", "train", "net.yaml", *secrets])
    recorded = collect_environment(torch.device("cpu"), 1)["argv"]
    assert recorded == ["finetune", "train", "net.yaml", "--token=***", "https://***@hub/x", "***"]


@pytest.mark.parametrize(
    "capabilities, expected",
    [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx2": True}, "fp32")],
)
def test_auto_precision_uses_bf16_if_the_cpu_supports_it(
    monkeypatch, capabilities, expected
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert resolve_precision("auto", torch.device("cpu")) == expected
    assert resolve_precision("fp32", torch.device("cpu")) == "fp32"
    assert resolve_precision("fp16", torch.device("meta")) == "fp16"
    with refused("setup.needs_gpu", "run.precision", "fp16"):
        resolve_precision("fp16", torch.device("cpu"))


@pytest.mark.parametrize(
    "command, expected",
    [
        (["bin/accelerate", "launch", "--cpu", "--num_processes", "2", "-m", "finetune"], 2),
        (["bin/accelerate", "launch", "--num_processes=4", "-m", "finetune"], 4),
        (["python", "-m", "accelerate.commands.launch", "--num_processes", "3"], 3),
        (["bin/accelerate", "launch", "-m", "finetune"], None),
        (["bash", "-c", "launch --num_processes 2"], None),
    ],
)
def test_num_processes_is_read_from_the_launchers_command_line(
    monkeypatch, command, expected
) -> None:
    line = "\0".join(command).encode() + b"\0"
    monkeypatch.setattr(Path, "read_bytes", lambda self: line)
    assert requested_num_processes() == expected


def test_num_processes_is_read_from_the_launchers_config_file(tmp_path: Path, monkeypatch) -> None:
    config = tmp_path / "two.yaml"
    config.write_text("num_processes: 2\n")
    line = "\0".join(["bin/accelerate", "launch", "--config_file", str(config), "-m", "finetune"])
    monkeypatch.setattr(Path, "read_bytes", lambda self: line.encode())
    assert requested_num_processes() == 2
    config.write_text("num_processes: [\n")
    assert requested_num_processes() is None


def test_no_requested_processes_without_a_launcher() -> None:
    """Like the parent of this test process."""

    def work() -> None:
        assert requested_num_processes() is None

    check_child_success(run_in_child(work))


def test_source_commit_is_the_checkouts_commit(tmp_path: Path, monkeypatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return finished.stdout.strip()

    package = tmp_path / "finetune" / "run"
    package.mkdir(parents=True)
    module = package / "environment.py"
    module.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(module))
    assert provenance._source_commit() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert provenance._source_commit() == commit
    module.write_text("# changed")
    assert provenance._source_commit() == f"{commit}+changes"


def test_installed_package_records_the_commit_it_was_built_from(
    tmp_path: Path, monkeypatch, repository: Path
) -> None:
    """Builds a minimal checkout with setup.py, as pip does."""

    def run(*command: str) -> str:
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return finished.stdout.strip()

    package = tmp_path / "finetune" / "run"
    package.mkdir(parents=True)
    (package / "environment.py").touch()
    shutil.copy(repository / "setup.py", tmp_path)
    (tmp_path / "setup.cfg").write_text(
        "[metadata]\nname = finetune\n[options]\npackages = finetune, finetune.run\n"
    )
    build = (sys.executable, "setup.py", "-q", "build", "--build-lib")
    run(*build, "none")
    installed = "finetune/run/environment.py"
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "none" / installed))
    assert provenance._source_commit() is None, "the sources are not a git checkout"
    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "one")
    commit = run("git", "rev-parse", "HEAD")
    run(*build, "clean")
    (package / "environment.py").write_text("# changed")
    run(*build, "changed")
    for name, expected in (("clean", commit), ("changed", f"{commit}+changes")):
        monkeypatch.setattr(provenance, "__file__", str(tmp_path / name / installed))
        assert provenance._source_commit() == expected
