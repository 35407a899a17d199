"""Recipes with `run.push_to`: rights are checked before training; a failed push keeps the run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hub_clients import run_card_code
from hub_fixtures import READ_TOKEN, hub, send_signals_after, sleep_durations, upload_in_fork
from hub_server import HubServer, point_clients_at
from PIL import Image
from ranks import run_rank_command_on_hub, run_two_ranks
from recipe_texts import tiny_recipe_text

from finetune.cli import main as cli
from finetune.recipe.load import load_recipe
from finetune.training import accelerator
from finetune.training.train import train

pytestmark = pytest.mark.usefixtures("no_plots", "upload_in_fork")

RECIPE = tiny_recipe_text(
    "eval: 'resize(18) | center_crop'",
    optim="lr: 3e-3, steps: 3",
    run="precision: fp32, push_to: alice/digits",
)
__all__ = ["hub", "sleep_durations", "upload_in_fork"]  # fixtures
CANARY = "hf_canary_that_must_be_seen_nowhere"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "digits.yaml"
    path.write_text(RECIPE)
    return path


def read_run_record(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "run.json").read_text()))


def test_train_pushes_the_model_folder_in_one_commit(
    hub: HubServer, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    out = tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(out)]) == 0
    (commit, *earlier) = hub.commits("alice/digits")
    assert len(earlier) == 1  # the initial commit of the repository
    stderr = capsys.readouterr().err
    assert commit in stderr
    assert read_run_record(out)["pushed"]["commit"] == commit
    files = hub.files("alice/digits")
    files.pop(".gitattributes", None)
    assert files == {path.name: path.read_bytes() for path in (out / "model").iterdir()}
    assert load_recipe(out / "model" / "recipe.yaml").run.push_to is None
    assert b"hf-hub:alice/digits" in files["README.md"]
    assert cli.main(["push", str(out), "alice/digits"]) == 0  # nothing has changed
    assert hub.commits("alice/digits") == [commit, *earlier]
    assert "no new commit" in capsys.readouterr().out
    Image.new("RGB", (30, 20)).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    for library in ("timm", "transformers"):
        run_card_code(library, "alice/digits")


def test_missing_rights_fail_before_training(
    hub: HubServer, recipe: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    point_clients_at(hub, monkeypatch, tmp_path / "home", READ_TOKEN)
    out = tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(out)]) == 7
    assert not (out / "metrics.jsonl").exists()
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main(["train", str(recipe), "--out", str(out), "--dry-run"]) == 7
    assert hub.count("POST /api/repos/create") == 0


def test_failed_push_keeps_the_finished_run(
    hub: HubServer, recipe: Path, tmp_path: Path, capfd
) -> None:
    out = tmp_path / "run"
    hub.fail(r"POST .*/commit/", status=403, times=None)
    assert cli.main(["train", str(recipe), "--out", str(out)]) == 7
    stderr = capfd.readouterr().err
    assert "Traceback" not in stderr
    command = f"finetune push {out} alice/digits"
    assert command in stderr
    assert read_run_record(out)["status"] == "done"
    assert json.loads((out / "results.json").read_text())["test"]["examples"]
    hub.faults.clear()
    assert cli.main(command.split()[1:]) == 0
    assert hub.files("alice/digits")["model.safetensors"] == (
        (out / "model" / "model.safetensors").read_bytes()
    )


def test_a_temperature_that_was_fitted_later_is_pushed(
    hub: HubServer, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert cli.main(["train", str(recipe), "--out", str(out)]) == 0
    num_commits = len(hub.commits("alice/digits"))
    assert cli.main(["eval", str(out), "--split", "test", "--fit-temperature"]) == 0
    for _ in range(2):
        assert cli.main(["train", str(recipe), "--out", str(out), "--resume"]) == 0
        assert len(hub.commits("alice/digits")) == num_commits + 1
    files = hub.files("alice/digits")
    assert files["config.json"] == (out / "model" / "config.json").read_bytes()


def test_resuming_a_finished_run_pushes_only_if_not_yet_pushed(
    hub: HubServer, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    hub.fail(r"POST .*/commit/", status=403, times=None)
    assert cli.main(["train", str(recipe), "--out", str(out)]) == 7
    hub.faults.clear()
    assert cli.main(["train", str(recipe), "--out", str(out), "--resume"]) == 0
    (commit, _) = hub.commits("alice/digits")
    assert read_run_record(out)["pushed"]["commit"] == commit
    user_commit = hub.commit(
        "alice/digits", {"README.md": b"---\nlicense: mit\n---\nMy own words.\n"}
    )
    assert cli.main(["train", str(recipe), "--out", str(out), "--resume"]) == 0
    assert hub.commits("alice/digits")[0] == user_commit


def test_signal_during_the_push_keeps_the_finished_run(
    hub: HubServer, recipe: Path, tmp_path: Path, capfd
) -> None:
    out = tmp_path / "run"
    hub.fail("/preupload/", kind="hang", times=None)
    with send_signals_after(hub, "/preupload/", [signal.SIGINT]):
        assert cli.main(["train", str(recipe), "--out", str(out)]) == 130
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    assert f"push again with: finetune push {out} alice/digits" in shown
    assert read_run_record(out)["status"] == "done"
    assert "pushed" not in read_run_record(out)
    assert json.loads((out / "results.json").read_text())["test"]["examples"]
    assert len(hub.commits("alice/digits")) == 1  # the initial commit of the repository
    hub.faults.clear()
    assert cli.main(["train", str(recipe), "--out", str(out), "--resume"]) == 0
    assert read_run_record(out)["pushed"]["commit"] == hub.commits("alice/digits")[0]


def test_no_rank_waits_in_a_collective_during_the_push(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective times out: after ten minutes on a GPU, after thirty on a CPU."""
    events: list[str] = []
    broadcast, push_started = accelerator.broadcast_object_list, [False]

    def record_broadcast(outcome: list[Any]) -> Any:
        events.extend(["in a collective"] * push_started[0])
        return broadcast(outcome)

    def push(*_: object, **__: object) -> dict[str, Any]:
        push_started[0] = True
        events.append("alone")
        return {"repository": "alice/digits", "url": "u", "commit": "c"}

    monkeypatch.setattr(accelerator, "broadcast_object_list", record_broadcast)
    monkeypatch.setattr("finetune.publish.push.push", push)
    monkeypatch.setattr("finetune.publish.permissions.check_rights", lambda *_, **__: None)
    train(load_recipe(recipe), tmp_path / "run")
    assert events == ["alone"]


@pytest.mark.slow
def test_two_processes_push_once_and_never_show_the_token(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with HubServer() as server:
        server.add_user("alice", token=CANARY)
        arguments = ["train", str(recipe), "--out", str(out)]
        result = run_two_ranks(
            run_rank_command_on_hub, server.url, tmp_path / "home", CANARY, *arguments
        )
        assert read_run_record(out)["num_processes"] == 2
        assert server.count("POST .*/commit/") == 1
        assert set(server.files("alice/digits")) >= {"config.json", "model.safetensors"}
        published = b"".join(server.files("alice/digits").values())
    assert CANARY not in result.stdout + result.stderr
    assert CANARY.encode() not in published
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert CANARY.encode() not in path.read_bytes(), path


def test_invalid_repository_name_is_a_recipe_error(tmp_path: Path, recipe: Path) -> None:
    for repository in ("digits", "a/b/c", "alice/", "https://huggingface.co/alice/x"):
        out = tmp_path / "run"
        assert cli.main(["train", str(recipe), f"run.push_to={repository}", "--out", str(out)]) == 2
        assert not out.exists()
