"""Tokens and passwords: what goes in by the environment, a file or a slip comes out nowhere."""

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
from refusals import refused

from finetune.cli import main as cli
from finetune.errors import redact_secrets
from finetune.recipe.load import parse_recipe

__all__ = ["sleep_durations"]  # fixture

TOKEN = "hf_CanaryThatMustBeSeenNowhere0123456"
OTHERS = {
    "WANDB_API_KEY": "canary0wandb0key0f00d",
    "COMET_API_KEY": "canary0comet0key0f00d",
    "AWS_SECRET_ACCESS_KEY": "canary0aws0secret0f00d",
    "NEPTUNE_API_TOKEN": "canary0neptune0f00d==",
    "DATABASE_PASSWORD": "canary0password0f00d",
}
IN_ADDRESS = "canary0address0f00d"
SECRETS = (TOKEN, *OTHERS.values(), IN_ADDRESS)
PUBLIC = "hf_publicPublicPublic"
RECIPE = tiny_recipe_text(
    "eval: 'resize(18) | center_crop', batch_size: 256",
    optim="lr: 3e-3, steps: 2",
    run="precision: fp32, push_to: alice/net",
)
PROMISE = "the secret is in no output, file, repository or command line"


def secrets_in(content: bytes | str) -> list[str]:
    """The secrets in a text, also in parts of it that were quoted for JSON or an address."""
    data = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
    return [secret for secret in SECRETS if secret.encode() in data or secret[3:].encode() in data]


def assert_clean(*folders: Path, own: tuple[Path, ...] = ()) -> int:
    """No file below the folders holds a secret, nor is it in a name. Returns: their number."""
    count = 0
    for folder in folders:
        for path in folder.rglob("*"):
            assert not secrets_in(str(path.relative_to(folder))), path
            if path.is_file() and path not in own:
                assert not secrets_in(path.read_bytes()), path
                count += 1
    return count


class Verbs:
    """Carries out verbs with --debug; no output of theirs may hold a secret."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: object, code: int | tuple[int, ...] = 0) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            ended = cli.main([*(str(one) for one in arguments), "--debug"])
        text = said.getvalue()
        assert not secrets_in(text), text
        assert ended in ((code,) if isinstance(code, int) else code), f"{arguments}: {text}"
        self.count += 1
        return text


@pytest.fixture
def verbs() -> Verbs:
    return Verbs()


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_durations: list[float]
) -> Iterator[HubServer]:
    """A hub where alice has the secret token, and this process is alice's."""
    with HubServer() as hub:
        hub.add_user("alice", token=TOKEN)
        hub.add_user("alice", token=PUBLIC, role="read")
        point_clients_at(hub, monkeypatch, tmp_path / "home", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name, value in OTHERS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "net.yaml").write_text(RECIPE)
        Image.new("RGB", (18, 18), (9, 90, 200)).save(tmp_path / "a.png")
        yield hub


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody has pushed."""
    top = tmp_path_factory.mktemp("trained")
    (top / "r.yaml").write_text(RECIPE.replace(", push_to: alice/net", ""))
    with pytest.MonkeyPatch.context() as patch:
        disable_plots(patch)
        assert cli.main(["train", str(top / "r.yaml"), "--out", str(top / "run")]) == 0
    return top / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def published(hub: HubServer, name: str) -> bytes:
    """All that a repository holds, and what was asked for to put it there."""
    files = hub.files(name)
    assert len(files) >= 4
    return b"\n".join([*files.values(), *(f"{m} {p}".encode() for m, p in hub.requests)])


def test_training_with_a_push(
    hub: HubServer,
    verbs: Verbs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    disable_plots(monkeypatch)
    verbs("train", "net.yaml", "--out", "run")
    assert not secrets_in(published(hub, "alice/net"))
    # the process that sends tries again at once
    hub.fail("POST .*/commit/", status=500, times=None, echo=True, retry_after=0)
    verbs("train", "net.yaml", "--out", "second", "run.seed=1", code=7)
    files = assert_clean(tmp_path)
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


@pytest.mark.parametrize(
    "failures", [FAILURES[-3:-2], pytest.param(FAILURES, marks=pytest.mark.faults)]
)
def test_push(
    failures: list[tuple[str, int, int]],
    hub: HubServer,
    verbs: Verbs,
    run: Path,
    tmp_path: Path,
    fault: Callable[..., None],
) -> None:
    """Failures first: a hub that echoes the header it was sent, as careless ones do."""
    for pattern, status, code in failures:
        hub.fail(pattern, status=status, times=None, echo=True, retry_after=0)
        verbs("push", run, "alice/net", code=code)
        hub.faults.clear()
    verbs("push", run, "alice/net")
    assert not secrets_in(published(hub, "alice/net"))
    (run / "model" / "README.md").write_text(f"---\nlicense: mit\n---\n{TOKEN}\n")
    shutil.copytree(run / "model", "plain")
    assert "token" in verbs("push", "plain", "alice/other", code=7)
    shutil.rmtree("plain")
    (run / "model" / "README.md").unlink()
    assert_clean(tmp_path)
    fault(
        "Tokens: push, while the hub echoes the request's header in its errors",
        PROMISE,
        f"{verbs.count} pushes",
    )


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_reading(
    whole: bool, hub: HubServer, verbs: Verbs, run: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    files = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    hub.add_repo("alice/net", files, private=True)
    hub.add_repo("alice/set", {"README.md": b"# none\n"}, kind="dataset", private=True)
    for status in (401, 403, 404, 429, 500) if whole else (403,):
        hub.fail(".*", status=status, times=None, echo=True)
        verbs("predict", "hf-hub:alice/net", "a.png", code=(4, 7))
        verbs("info", "hf-hub:alice/net", code=(4, 7))
        verbs("data", "info", "hub:alice/set", code=(3, 7))
        verbs("eval", "hf-hub:alice/net", "--data", "hub:alice/set", code=(3, 4, 7))
        hub.faults.clear()
    for kind in ("reset", "truncate", "corrupt") if whole else ():
        hub.fail("resolve", kind=kind, times=None)
        verbs("predict", "hf-hub:alice/net", "a.png", code=7)
        hub.faults.clear()
    verbs("predict", "hf-hub:alice/net", "a.png", "--out", "p.csv")
    if whole:
        verbs("eval", "hf-hub:alice/net", "--data", "embedded:digits", "--out", "measured")
        verbs("export", "hf-hub:alice/net", "--format", "torch", "--out", "net.pt2")
        verbs("report", run)
    files_searched = assert_clean(tmp_path)
    fault(
        "Tokens: predict, info, eval, data, export and report with private repositories",
        PROMISE,
        f"{verbs.count} command lines, {files_searched} files searched",
    )


def test_what_is_typed_by_mistake(
    hub: HubServer, verbs: Verbs, run: Path, tmp_path: Path, fault: Callable[..., None]
) -> None:
    """Known from the environment or not: a token is known by its look, too."""
    lines = [
        ("push", run, "alice/net", TOKEN),
        ("push", run, "alice/net", "--token", TOKEN),
        ("push", run, f"alice/{TOKEN}"),
        ("push", run, "alice/net", "--revision", f"@{TOKEN}"),
        ("train", "net.yaml", f"HF_TOKEN={TOKEN}"),
        ("train", "net.yaml", f"run.push_to={TOKEN}"),
        ("train", "net.yaml", f"run.note={TOKEN}"),
        ("train", "net.yaml", f"model.name=https://alice:{IN_ADDRESS}@hub/net"),
        ("train", f"https://alice:{IN_ADDRESS}@hub/net.yaml"),
        ("predict", f"hf-hub:alice/net@{TOKEN}", "a.png"),
        ("predict", f"https://alice:{IN_ADDRESS}@hub/net", "a.png"),
        ("data", "info", f"hub:alice/set@{TOKEN}"),
        ("data", "info", f"https://alice:{IN_ADDRESS}@hub/set"),
        (TOKEN,),
        ("info", TOKEN),
    ]
    for known in (True, False):
        if not known:
            os.environ["HF_TOKEN"] = PUBLIC  # the fixture puts it back
        for line in lines:
            verbs(*line, code=(2, 3, 4, 7))
            verbs(*line, "--json", code=(2, 3, 4, 7))
    with refused("recipe.holds_secret", "recipe", "HF_TOKEN"):
        parse_recipe(RECIPE, overrides=[f"run.note={OTHERS['WANDB_API_KEY']}"])
    assert_clean(tmp_path)
    fault(
        "A token or password on the command line or in a recipe, by mistake",
        "no message repeats it; a recipe that holds one is refused with 2",
        f"{verbs.count} command lines",
    )


def test_the_recorded_command_line(
    hub: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    from finetune.recipe.load import load_recipe
    from finetune.training.train import train

    disable_plots(monkeypatch)
    words = ["train", "net.yaml", f"--token={TOKEN}", f"https://alice:{IN_ADDRESS}@hub/x"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/finetune", *words, *OTHERS.values()])
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
    assert_clean(tmp_path / "kept")
    fault("A command line with a token, in run.json and the report", "*** stands there", "")


def test_the_mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Secrets are masked, and nothing else: a message must stay one."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "token").write_text("login0token0of0another0look\n")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("SOME_TOKEN_PATH", "/some/where/token")
    for text, shown in (
        (f"a {TOKEN}.", "a ***."),
        ("x login0token0of0another0look y", "x *** y"),
        ("http://me:pass@host/a http://key@host", "http://***@host/a http://***@host"),
        ("hf-hub:alice/net@v1, false, /some/where/token", None),
        ("http://127.0.0.1:80/alice@b hf_hub:alice/net hf_transfer", None),
    ):
        assert redact_secrets(text) == (shown or text)


# --- in processes of their own -------------------------------------------------------------------


def _tree(root: int) -> set[int]:
    """A process and all that came of it."""
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


def watched(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, int]:
    """Run a command while reading the command line of every process that belongs to it.

    Returns: exit code, all output, how many processes were seen.
    """
    environment = environment | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1"}
    seen: set[int] = set()
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
            output, end = b"", time.monotonic() + 300
            while process.poll() is None:
                assert time.monotonic() < end, output
                for number in _tree(process.pid):
                    with contextlib.suppress(OSError):
                        line = Path(f"/proc/{number}/cmdline").read_bytes()
                        assert not secrets_in(line), line
                        seen.add(number)
                output += process.stdout.read() or b""  # type: ignore[union-attr]
                time.sleep(0.1)  # reading all of /proc takes a while
            output += process.stdout.read() or b""  # type: ignore[union-attr]
        finally:
            for number in _tree(process.pid) if process.poll() is None else ():
                with contextlib.suppress(OSError):
                    os.kill(number, 9)
    text = output.decode(errors="replace")
    assert not secrets_in(text), text
    return process.returncode, text, len(seen)


@pytest.mark.faults
@pytest.mark.parametrize("place", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
@pytest.mark.parametrize("processes", [1, 2])
def test_processes(
    place: str, processes: int, tmp_path: Path, image_folder: Path, fault: Callable[..., None]
) -> None:
    recipe = tmp_path / "net.yaml"
    changes = f"folder:{image_folder}", "batch_size: 8, keep: none, workers: 2"
    text = RECIPE.replace("embedded:digits", changes[0]).replace("batch_size: 256", changes[1])
    recipe.write_text(text)
    home = tmp_path / "home"
    home.mkdir()
    launch = [sys.executable, "-m", "finetune"]
    if processes == 2:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        launch += ["--num_processes", "2", "--main_process_port", "0", "-m", "finetune"]
    with HubServer() as hub:
        hub.add_user("alice", token=TOKEN)
        environment = hub.environment(home) | OTHERS | {"ACCELERATE_USE_CPU": "true"}
        if place == "file":
            (home / "token").write_text(TOKEN)
        else:
            environment[place] = TOKEN
        line = [*launch, "train", str(recipe), "--debug", "--out"]
        code, text, seen = watched([*line, str(tmp_path / "good")], environment)
        assert code == 0, text
        assert seen >= 3 * processes
        assert not secrets_in(published(hub, "alice/net"))
        hub.fail("POST .*/commit/", status=403, times=None, echo=True)
        code, text, _ = watched([*line, str(tmp_path / "bad"), "run.seed=1"], environment)
        assert code in (1, 7), text  # a launcher has a code of its own
        assert "403" in text
    files = assert_clean(tmp_path, own=(home / "token",))
    fault(
        "Tokens in processes of their own, from the environment or a file: train, workers, push",
        PROMISE,
        f"{seen} processes' command lines, {files} files searched",
    )


@pytest.mark.faults
def test_addresses_with_credentials(trained: Path, tmp_path: Path, fault: Any) -> None:
    """A hub or a proxy whose address holds a password, and which is not there."""
    address = f"http://alice:{IN_ADDRESS}@127.0.0.1:9"
    (tmp_path / "net.yaml").write_text(RECIPE)
    lines = [
        ["push", str(trained), "alice/net"],
        ["train", str(tmp_path / "net.yaml"), "--out", str(tmp_path / "out")],
        ["info", "hf-hub:alice/net"],
        ["data", "info", "hub:alice/set"],
    ]
    count = 0
    with HubServer() as hub:
        hub.add_user("alice", token=TOKEN)
        start = hub.environment(tmp_path / "home", TOKEN) | OTHERS
        inside = hub.url.replace("//", f"//alice:{IN_ADDRESS}@")
        for changes in (
            {"HF_ENDPOINT": address},
            {"HTTP_PROXY": address, "HTTPS_PROXY": address, "ALL_PROXY": address, "NO_PROXY": ""},
            {"HF_ENDPOINT": inside},
        ):
            for line in lines:
                command = [sys.executable, "-m", "finetune", *line, "--debug"]
                code, text, _ = watched(command, start | changes)
                assert code in (0, 3, 4, 7), text
                count += 1
    assert_clean(tmp_path)
    fault(
        "A password in HF_ENDPOINT or in a proxy's address",
        PROMISE,
        f"{count} command lines in processes of their own",
    )
