"""Tokens and passwords from the environment, a file or a typo never appear in any output."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_runs import disable_plots
from hub_fixtures import sleep_durations
from hub_server import HubServer, point_clients_at
from huggingface_hub import constants
from PIL import Image
from recipe_texts import tiny_recipe_text
from tar_shards import RangeServer, write_tar_shards

from finetune.cli import main as cli

__all__ = ["sleep_durations"]  # fixture

TOKEN = "hf_CanaryThatMustBeSeenNowhere0123456"
OTHER_SECRETS = {
    "WANDB_API_KEY": "canary0wandb0key0f00d",
    "COMET_API_KEY": "canary0comet0key0f00d",
    "AWS_SECRET_ACCESS_KEY": "canary0aws0secret0f00d",
    "NEPTUNE_API_TOKEN": "canary0neptune0f00d==",
    "DATABASE_PASSWORD": "canary0password0f00d",
}
URL_PASSWORD = "canary0address0f00d"
SECRETS = (TOKEN, *OTHER_SECRETS.values(), URL_PASSWORD)
READ_TOKEN = "hf_publicPublicPublic"
RECIPE = tiny_recipe_text(
    "eval: 'resize(18) | center_crop', batch_size: 256",
    optim="lr: 3e-3, steps: 2",
    run="precision: fp32, push_to: alice/net",
)
PROMISE = "the secret is in no output, file, repository or command line"


def secrets_in(content: bytes | str) -> list[str]:
    """Return the secrets in a text, also in parts quoted for JSON or a URL."""
    data = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
    return [secret for secret in SECRETS if secret.encode() in data or secret[3:].encode() in data]


def check_no_secrets(*folders: Path, except_paths: tuple[Path, ...] = ()) -> int:
    """Check that no file content or name below the folders has a secret. Returns: file count."""
    count = 0
    for folder in folders:
        for path in folder.rglob("*"):
            assert not secrets_in(str(path.relative_to(folder))), path
            if path.is_file() and path not in except_paths:
                assert not secrets_in(path.read_bytes()), path
                count += 1
    return count


class CommandRunner:
    """Runs commands with --debug; no output may contain a secret."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: object, code: int | tuple[int, ...] = 0) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            exit_code = cli.main([*(str(argument) for argument in arguments), "--debug"])
        text = output.getvalue()
        assert not secrets_in(text), text
        assert exit_code in ((code,) if isinstance(code, int) else code), f"{arguments}: {text}"
        self.count += 1
        return text


@pytest.fixture
def run_command() -> CommandRunner:
    return CommandRunner()


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_durations: list[float]
) -> Iterator[HubServer]:
    """A hub where alice has the secret token, which this process uses."""
    with HubServer() as hub:
        hub.add_user("alice", token=TOKEN)
        hub.add_user("alice", token=READ_TOKEN, role="read")
        point_clients_at(hub, monkeypatch, tmp_path / "home", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name, value in OTHER_SECRETS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "net.yaml").write_text(RECIPE)
        Image.new("RGB", (18, 18), (9, 90, 200)).save(tmp_path / "a.png")
        yield hub


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not pushed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "r.yaml").write_text(RECIPE.replace(", push_to: alice/net", ""))
    with pytest.MonkeyPatch.context() as patch:
        disable_plots(patch)
        assert cli.main(["train", str(folder / "r.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run_dir(trained_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained_run, tmp_path / "run")
    return tmp_path / "run"


def published_content(hub: HubServer, name: str) -> bytes:
    """Return all files of a repository and the request lines to the hub."""
    files = hub.files(name)
    assert len(files) >= 4
    return b"\n".join([*files.values(), *(f"{m} {p}".encode() for m, p in hub.requests)])


def test_no_secret_in_a_run_with_push_to(
    hub: HubServer,
    run_command: CommandRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    disable_plots(monkeypatch)
    run_command("train", "net.yaml", "--out", "run")
    assert not secrets_in(published_content(hub, "alice/net"))
    # the upload process retries without a wait
    hub.fail("POST .*/commit/", status=500, times=None, echo=True, retry_after=0)
    run_command("train", "net.yaml", "--out", "second", "run.seed=1", code=7)
    files = check_no_secrets(tmp_path)
    assert files > 20
    fault(
        "Tokens in the environment: train with run.push_to, pushed and refused, with --debug",
        PROMISE,
        f"{len(SECRETS)} secrets, {files} files searched",
    )


FAILURES = [
    ("whoami", 401, 7),
    ("whoami", 500, 7),
    ("GET /api/models/alice/net", 403, 7),
    ("POST /api/repos/create", 400, 7),
    ("POST /api/repos/create", 503, 7),
    ("validate-yaml", 500, 7),
    ("preupload", 403, 7),
    ("/commit/", 400, 7),
    ("/commit/", 429, 7),
    ("info/lfs", 403, 7),
]


def test_no_secret_in_a_push(
    hub: HubServer,
    run_command: CommandRunner,
    run_dir: Path,
    tmp_path: Path,
    fault: Callable[..., None],
) -> None:
    """The hub fails and repeats the request header, as careless servers do."""
    for pattern, status, code in FAILURES:
        hub.fail(pattern, status=status, times=None, echo=True, retry_after=0)
        run_command("push", run_dir, "alice/net", code=code)
        hub.faults.clear()
    run_command("push", run_dir, "alice/net")
    assert not secrets_in(published_content(hub, "alice/net"))
    (run_dir / "model" / "README.md").write_text(f"---\nlicense: mit\n---\n{TOKEN}\n")
    shutil.copytree(run_dir / "model", "plain")
    assert "token" in run_command("push", "plain", "alice/other", code=7)
    shutil.rmtree("plain")
    (run_dir / "model" / "README.md").unlink()
    check_no_secrets(tmp_path)
    fault(
        "Tokens: push, while the hub echoes the request's header in its errors",
        PROMISE,
        f"{run_command.count} pushes",
    )


def test_no_secret_from_a_signed_url(
    run_command: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """A run does not store the URL; it resumes with another signature of the same file."""
    disable_plots(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    shards = write_tar_shards(tmp_path / "shards")
    text = tiny_recipe_text("eval: resize, batch_size: 4", optim="lr: 3e-3, steps: 2")
    Path("net.yaml").write_text(text)
    with RangeServer(shards) as server:
        address = server.url.replace("//", f"//me:{URL_PASSWORD}@")
        name = f"{address}/set-{{train-0000,train-0001,test-0000}}.tar"
        sources = [f"tar:{name}?X-Amz-Signature={secret}" for secret in OTHER_SECRETS.values()]
        data = f"data.source={sources[0]}"
        monkeypatch.setattr(sys, "argv", ["finetune", "train", "net.yaml", data])
        constant_lr = ["optim.schedule=constant", "--out", "run"]
        run_command("train", "net.yaml", data, *constant_lr)
        longer = ["optim.steps=3", "--resume", *constant_lr]
        run_command("train", "run", f"data.source={sources[1]}", *longer)
        run_command("eval", "run", code=3)
        run_command("eval", "run", "--data", sources[2])
        run_command("report", "run")
        run_command("start", sources[3], "model.freeze=backbone", "optim.lr=1", "--out", "s.yaml")
        run_command("data", "info", sources[0].replace("set-", "no-"), code=3)
    files = check_no_secrets(tmp_path)
    assert "?***" in (tmp_path / "run" / "recipe.yaml").read_text()
    fault(
        "A password and a signature in the URL of tar shards: train, resume, eval, start",
        PROMISE,
        f"{run_command.count} command lines, {files} files searched",
    )


def test_no_secret_when_reading_private_repositories(
    hub: HubServer,
    run_command: CommandRunner,
    run_dir: Path,
    tmp_path: Path,
    fault: Callable[..., None],
) -> None:
    files = {path.name: path.read_bytes() for path in (run_dir / "model").iterdir()}
    hub.add_repo("alice/net", files, private=True)
    hub.add_repo("alice/set", {"README.md": b"# none\n"}, kind="dataset", private=True)
    for status in (401, 403, 404, 429, 500):
        hub.fail(".*", status=status, times=None, echo=True)
        run_command("predict", "hf-hub:alice/net", "a.png", code=(4, 7))
        run_command("info", "hf-hub:alice/net", code=(4, 7))
        run_command("data", "info", "hub:alice/set", code=(3, 7))
        run_command("eval", "hf-hub:alice/net", "--data", "hub:alice/set", code=(3, 4, 7))
        hub.faults.clear()
    for kind in ("reset", "truncate", "corrupt"):
        hub.fail("resolve", kind=kind, times=None)
        run_command("predict", "hf-hub:alice/net", "a.png", code=7)
        hub.faults.clear()
    run_command("predict", "hf-hub:alice/net", "a.png", "--out", "p.csv")
    run_command("eval", "hf-hub:alice/net", "--data", "embedded:digits", "--out", "measured")
    run_command("export", "hf-hub:alice/net", "--format", "torch", "--out", "net.pt2")
    run_command("report", run_dir)
    files_searched = check_no_secrets(tmp_path)
    fault(
        "Tokens: predict, info, eval, data, export and report with private repositories",
        PROMISE,
        f"{run_command.count} command lines, {files_searched} files searched",
    )


def test_no_secret_from_mistyped_arguments(
    hub: HubServer,
    run_command: CommandRunner,
    run_dir: Path,
    tmp_path: Path,
    fault: Callable[..., None],
) -> None:
    """With the token in the environment, and without it, recognized only by its form."""
    commands = [
        ("push", run_dir, "alice/net", TOKEN),
        ("push", run_dir, "alice/net", "--token", TOKEN),
        ("push", run_dir, f"alice/{TOKEN}"),
        ("push", run_dir, "alice/net", "--revision", f"@{TOKEN}"),
        ("train", "net.yaml", f"HF_TOKEN={TOKEN}"),
        ("train", "net.yaml", f"run.push_to={TOKEN}"),
        ("train", "net.yaml", f"run.note={TOKEN}"),
        ("train", "net.yaml", f"run.note=token={URL_PASSWORD}"),
        ("train", "net.yaml", f"run.push_to=me:{URL_PASSWORD}@owner/name"),
        ("train", "net.yaml", f"model.name=https://alice:{URL_PASSWORD}@hub/net"),
        ("train", f"https://alice:{URL_PASSWORD}@hub/net.yaml"),
        ("predict", f"hf-hub:alice/net@{TOKEN}", "a.png"),
        ("predict", f"https://alice:{URL_PASSWORD}@hub/net", "a.png"),
        ("data", "info", f"hub:alice/set@{TOKEN}"),
        ("data", "info", f"https://alice:{URL_PASSWORD}@hub/set"),
        (TOKEN,),
        ("info", TOKEN),
    ]
    for is_in_environment in (True, False):
        if not is_in_environment:
            os.environ["HF_TOKEN"] = READ_TOKEN  # the fixture restores it
        for arguments in commands:
            run_command(*arguments, code=(2, 3, 4, 7))
            run_command(*arguments, "--json", code=(2, 3, 4, 7))
    check_no_secrets(tmp_path)
    fault(
        "A token or password on the command line or in a recipe by mistake",
        "no message repeats it; a recipe that holds one is refused with 2",
        f"{run_command.count} command lines",
    )


def test_no_secret_in_the_recorded_command_line(
    hub: HubServer, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    from finetune.recipe.load import load_recipe
    from finetune.training.train import train

    disable_plots(monkeypatch)
    arguments = ["train", "net.yaml", f"--token={TOKEN}", f"https://alice:{URL_PASSWORD}@hub/x"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/finetune", *arguments, *OTHER_SECRETS.values()])
    train(load_recipe("net.yaml", ["run.push_to=null"]), "kept")
    record = json.loads(Path("kept/run.json").read_text())
    assert record["argv"][:5] == [
        "finetune",
        "train",
        "net.yaml",
        "--token=***",
        "https://***@hub/x",
    ]
    assert cli.main(["report", "kept"]) == 0
    check_no_secrets(tmp_path / "kept")
    fault("A command line with a token, in run.json and the report", "*** is stored instead", "")


# --- subprocesses --------------------------------------------------------------------------------


def process_tree(root: int) -> set[int]:
    """Return the ids of a process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    tree = {root}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def run_and_inspect(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, int]:
    """Run a command and check the command line of each of its processes.

    Returns: exit code, all output, number of processes seen.
    """
    environment = environment | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1"}
    process_ids: set[int] = set()
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
            output, end = b"", time.monotonic() + 300
            while process.poll() is None:
                assert time.monotonic() < end, output
                for process_id in process_tree(process.pid):
                    with contextlib.suppress(OSError):
                        command_line = Path(f"/proc/{process_id}/cmdline").read_bytes()
                        assert not secrets_in(command_line), command_line
                        process_ids.add(process_id)
                output += process.stdout.read() or b""  # type: ignore[union-attr]
                time.sleep(0.1)  # reading /proc is slow
            output += process.stdout.read() or b""  # type: ignore[union-attr]
        finally:
            for process_id in process_tree(process.pid) if process.poll() is None else ():
                with contextlib.suppress(OSError):
                    os.kill(process_id, 9)
    text = output.decode(errors="replace")
    assert not secrets_in(text), text
    return process.returncode, text, len(process_ids)


@pytest.mark.parametrize("token_source", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_no_secret_in_any_process(
    token_source: str,
    num_processes: int,
    tmp_path: Path,
    image_folder: Path,
    fault: Callable[..., None],
) -> None:
    recipe = tmp_path / "net.yaml"
    changes = f"folder:{image_folder}", "batch_size: 8, keep: none, workers: 2"
    text = RECIPE.replace("embedded:digits", changes[0]).replace("batch_size: 256", changes[1])
    recipe.write_text(text)
    home = tmp_path / "home"
    home.mkdir()
    program = [sys.executable, "-m", "finetune"]
    if num_processes == 2:
        program = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        program += ["--num_processes", "2", "--main_process_port", "0", "-m", "finetune"]
    with HubServer() as hub:
        hub.add_user("alice", token=TOKEN)
        environment = hub.environment(home) | OTHER_SECRETS | {"ACCELERATE_USE_CPU": "true"}
        if token_source == "file":
            (home / "token").write_text(TOKEN)
        else:
            environment[token_source] = TOKEN
        command = [*program, "train", str(recipe), "--debug", "--out"]
        code, text, num_seen = run_and_inspect([*command, str(tmp_path / "good")], environment)
        assert code == 0, text
        assert num_seen >= 3 * num_processes
        assert not secrets_in(published_content(hub, "alice/net"))
        hub.fail("POST .*/commit/", status=403, times=None, echo=True)
        code, text, _ = run_and_inspect(
            [*command, str(tmp_path / "bad"), "run.seed=1"], environment
        )
        assert code in (1, 7), text  # a launcher has its own exit code
        assert "403" in text
    files = check_no_secrets(tmp_path, except_paths=(home / "token",))
    fault(
        "Tokens in subprocesses, from the environment or a file: train, workers, push",
        PROMISE,
        f"{num_seen} processes' command lines, {files} files searched",
    )


def test_no_secret_from_addresses_with_passwords(
    trained_run: Path, tmp_path: Path, fault: Any
) -> None:
    """The address of a hub or proxy, reachable or not, contains a password."""
    address = f"http://alice:{URL_PASSWORD}@127.0.0.1:9"
    (tmp_path / "net.yaml").write_text(RECIPE)
    commands = [
        ["push", str(trained_run), "alice/net"],
        ["train", str(tmp_path / "net.yaml"), "--out", str(tmp_path / "out")],
        ["info", "hf-hub:alice/net"],
        ["data", "info", "hub:alice/set"],
    ]
    count = 0
    with HubServer() as hub:
        hub.add_user("alice", token=TOKEN)
        environment = hub.environment(tmp_path / "home", TOKEN) | OTHER_SECRETS
        endpoint = hub.url.replace("//", f"//alice:{URL_PASSWORD}@")
        for changes in (
            {"HF_ENDPOINT": address},
            {"HTTP_PROXY": address, "HTTPS_PROXY": address, "ALL_PROXY": address, "NO_PROXY": ""},
            {"HF_ENDPOINT": endpoint},
        ):
            for arguments in commands:
                command = [sys.executable, "-m", "finetune", *arguments, "--debug"]
                code, text, _ = run_and_inspect(command, environment | changes)
                assert code in (0, 3, 4, 7), text
                count += 1
    check_no_secrets(tmp_path)
    fault(
        "A password in HF_ENDPOINT or in a proxy's address",
        PROMISE,
        f"{count} command lines in subprocesses",
    )
