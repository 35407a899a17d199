"""The command line as a process: imports, pipes, and the package's public names."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from finetune import __version__
from finetune.cli.main import main
from finetune.recipe.load import load_recipe

Captured = pytest.CaptureFixture[str]

REPOSITORY = Path(__file__).resolve().parents[2]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, finetune.cli.main; finetune.cli.main.main(['--help']); "
        "print([n for n in ('torch', 'numpy', 'pydantic', 'yaml') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout.rstrip().endswith("[]")
    assert "train" in done.stdout


def test_a_second_interrupt_ends_the_process_silently() -> None:
    """Garbage collection follows the command: in it, KeyboardInterrupt would be a traceback."""
    code = (
        "import contextlib, os, signal, finetune.cli.main as cli_main\n"
        "@contextlib.contextmanager\n"
        "def defer():\n"
        "    yield\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "cli_main.process_lifecycle.defer_garbage_collection = defer\n"
        "cli_main.run = lambda *_: 130\n"
        "cli_main.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        cwd=REPOSITORY,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's & ignores it
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_a_wrong_command_path_or_key_is_refused_before_torch_is_imported(workspace: Path) -> None:
    cases = {
        "trian x": 2,
        "train nope": 2,
        "train nope.yaml": 2,
        "train mine.yaml optim.lrr=1": 2,
        "train embedded:digits optim.lrr=1": 2,
        "tune nope.yaml --minutes 1": 2,
        "tune mine.yaml --minutes 1": 2,
        "start embedded:digits optim.lrr=1": 2,
        "eval runs/nope": 4,
        "eval mine.yaml": 2,
        "eval embedded:vit_nano --data folder:nope": 3,
        "predict runs/nope x.jpg": 4,
        "info runs/nope": 4,
        "info nope.yaml --plan": 2,
        "info mine.yaml optim.lrr=1 --plan": 2,
        "show runs/nope --out d": 4,
        "show embedded:vit_nano nope.jpg --out d": 3,
        "probe runs/nope": 4,
        "probe embedded:vit_nano --data parquet:nope": 3,
        "reproduce nope": 2,
        "report runs/nope": 2,
        "push runs/nope me/nope": 4,
        "export runs/nope": 4,
        "export embedded:vit_nano --format onx": 2,
        "demo runs/nope": 4,
        "bench nope.yaml": 2,
        "bench mine.yaml optim.lrr=1": 2,
        "data info folder:nope": 3,
        "data info nope": 3,
        "data scan embedded:nope": 3,
        "recipes check nope.yaml": 2,
        "recipes help nope": 2,
        "recipes help mixup": 0,
        "recipes list nope": 2,
    }
    code = (
        "import json, sys; from finetune.cli.main import main\n"
        "ends = {line: (main(line.split()), 'torch' in sys.modules) for line in sys.argv[1:]}\n"
        "print(json.dumps(ends))"
    )
    done = subprocess.run([sys.executable, "-c", code, *cases], capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {line: [exit_code, False] for line, exit_code in cases.items()}


@pytest.mark.parametrize("argument, named", [("mine.yaml", "runs/mine"), ("photos", "photos")])
def test_train_logs_what_it_does_before_it_imports_torch(
    workspace: Path, argument: str, named: str
) -> None:
    Path("photos", "a").mkdir(parents=True)
    code = (
        "import os, sys; from finetune.cli.main import main\n"
        "class ExitAtTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': os._exit(77)\n"
        "sys.meta_path.insert(0, ExitAtTorch())\n"
        "main(['train', sys.argv[1], '--dry-run'])"
    )
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("finetune: ")
    assert named in line
    assert done.returncode == 77


def test_python_m_finetune() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "finetune", "trian"], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "'trian'" in done.stderr
    assert "'train'" in done.stderr


def test_a_closed_pipe_prints_no_error() -> None:
    command = f"{sys.executable} -m finetune recipes schema"
    # a pipe buffers 64 KiB: only a closed one breaks for certain
    done = subprocess.run(
        ["bash", "-c", f"{{ sleep 1; {command}; echo $? >&2; }} | true"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.stderr.strip() == "141"


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"finetune {__version__}\n"


def test_the_package_imports_its_public_names_lazily() -> None:
    import finetune

    assert finetune.load_recipe is load_recipe
    assert {"train", "Classifier", "load_recipe"} <= set(dir(finetune))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        finetune.trian  # noqa: B018
