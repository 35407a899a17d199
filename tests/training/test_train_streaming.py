"""Training on a streamed dataset of the local test hub: exact resume, several processes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_runs import TINY_RECIPE, read_train_losses, read_weights, train_until_killed
from hub_server import HubServer, point_clients_at
from ranks import run_rank_command_on_hub, run_two_ranks
from refusals import refused
from streaming_dataset import (
    REPO_NAME,
    bytes_requested,
    dataset_shards,
    disable_retry_waits,
    write_to_disk,
)

from finetune.cli.main import main
from finetune.data.streaming import shard_file
from finetune.errors import DataError, HubError, RecipeError
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_plots")

FILES = dataset_shards(4, 40)
STREAMED = [
    *(f"data.source=hub:{REPO_NAME}", "data.streaming=true", "data.batch_size=24"),
    *("data.val_fraction=0.2", "optim.steps=8", "run.save_every=3", "run.eval_every=4"),
    *("model.dropout=0.1", "optim.ema_decay=0.9", "data.micro_batch=8"),
    *("data.train=resize | random_crop(padding=2)", "model.args.depth=1"),
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    disable_retry_waits(monkeypatch)
    with HubServer() as hub:
        hub.add_repo(REPO_NAME, FILES, kind="dataset")
        point_clients_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.server_errors == []


def make_recipe(*overrides: str) -> Recipe:
    return parse_recipe(TINY_RECIPE, overrides=[*STREAMED, *overrides])


@pytest.fixture(scope="module")
def finished_run(no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch, HubServer() as hub:
        hub.add_repo(REPO_NAME, FILES, kind="dataset")
        point_clients_at(hub, patch, out.parent / "home")
        train(make_recipe(), out)
    return out


def read_results(run: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((run / "results.json").read_text())
    return results


def test_streamed_and_local_files_give_the_same_weights(finished_run: Path, tmp_path: Path) -> None:
    local = write_to_disk(tmp_path, FILES)
    train(make_recipe(f"data.source={local}", "data.workers=0"), tmp_path / "local")
    assert read_weights(finished_run) == read_weights(tmp_path / "local")
    assert read_train_losses(finished_run) == read_train_losses(tmp_path / "local")
    assert read_results(finished_run)["test"]["examples"] == 20
    assert read_results(finished_run)["val"]["examples"] == 33  # 11 of each class
    assert read_results(finished_run)["test"]["top1"] > 0.6
    home = finished_run.parent / "home"
    assert any(home.rglob("*"))
    assert not list(home.rglob("*.parquet"))  # no file was downloaded completely


def test_streamed_evaluation_matches_images_in_memory(hub: HubServer, tmp_path: Path) -> None:
    no_training = [
        "optim.steps=1",
        "optim.warmup_steps=0",
        "optim.lr=1e-30",
        "optim.ema_decay=null",
    ]
    test_results = []
    for changes in ([], ["data.streaming=false", "data.keep=memory"]):
        train(
            make_recipe(*changes, *no_training, "model.head_init=default"),
            tmp_path / f"one-{len(changes)}",
        )
        test_results.append(read_results(tmp_path / f"one-{len(changes)}")["test"])
    assert test_results[0]["confusion"] == test_results[1]["confusion"]
    assert (
        test_results[0]["loss"] == test_results[1]["loss"] != pytest.approx(math.log(3), abs=1e-3)
    )


def test_killed_run_resumes_to_the_same_weights(
    hub: HubServer, finished_run: Path, tmp_path: Path
) -> None:
    train_until_killed(7, make_recipe(), tmp_path / "killed")
    steps = [int(p.name[5:]) for p in (tmp_path / "killed/checkpoints").iterdir()]
    assert max(steps) < 7
    train(make_recipe(), tmp_path / "killed", resume=True)
    assert read_weights(tmp_path / "killed") == read_weights(finished_run)
    assert read_train_losses(tmp_path / "killed") == read_train_losses(finished_run)


def test_resumed_run_reads_only_the_rest_of_the_epoch(hub: HubServer, tmp_path: Path) -> None:
    overrides = ["data.val_fraction=0", "run.test=false", "run.eval_every=100", "optim.steps=6"]
    # 6 steps of 24 images are most of an epoch
    train_until_killed(6, make_recipe(*overrides), tmp_path / "run")
    first_bytes = bytes_requested(hub)
    hub.requests.clear()
    hub.headers.clear()
    train(make_recipe(*overrides), tmp_path / "run", resume=True)
    assert 0 < bytes_requested(hub) < first_bytes
    image_bytes = sum(map(len, FILES.values()))
    footers = 5 * 2**16  # the footer reads are larger than these small files
    assert first_bytes < 2 * image_bytes + footers


def test_keys_that_conflict_with_streaming_are_refused(hub: HubServer, tmp_path: Path) -> None:
    for key, value in (
        ("data.keep", "memory"),
        ("data.keep", "device"),
        ("data.unreadable", "quarantine"),
        ("data.source", "embedded:digits"),
    ):
        with pytest.raises(RecipeError) as caught:
            make_recipe(f"{key}={value}")
        assert caught.value.code == "recipe.conflict"
        assert f"{key}: " in str(caught.value)
        assert f"'{value}'" in str(caught.value)
    assert make_recipe("data.keep=none").data.streaming


class TestFaults:
    def test_transient_errors_do_not_change_the_weights(
        self, hub: HubServer, finished_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        train_step = TrainerState.train_step

        def disturbed(self: TrainerState, *args: Any) -> None:
            if self.counters.step in (2, 5):
                hub.fail("GET /cdn/", kind="truncate")
                hub.fail("GET /cdn/", status=503)
                shard_file.store_urls.clear()
            train_step(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainerState, "train_step", disturbed)
            patch.setattr("finetune.data.streaming.prefetch.MAX_BATCHES_AHEAD", 1)
            patch.setattr("finetune.data.streaming.prefetch.MAX_CACHED_BYTES", 2 * 10**4)
            train(make_recipe(), tmp_path / "disturbed")
        assert sum(fault.times == 0 for fault in hub.faults) >= 2
        assert "trying again" in capfd.readouterr().err
        assert read_weights(tmp_path / "disturbed") == read_weights(finished_run)

    @pytest.mark.parametrize(
        "damage, error_type, code",
        [
            ("lost", HubError, 7),
            ("changed", DataError, 3),
            pytest.param("gone", DataError, 3, marks=pytest.mark.faults),
        ],
    )
    def test_permanent_error_ends_the_run_and_resume_continues(
        self,
        hub: HubServer,
        finished_run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        damage: str,
        error_type: type,
        code: int,
    ) -> None:
        train_step = TrainerState.train_step
        commit = hub.store.any_of(REPO_NAME).find("main")
        assert commit is not None
        before = dict(commit.files)

        def damaged(self: TrainerState, *args: Any) -> None:
            if self.counters.step == 4:
                shard_file.store_urls.clear()
                if damage == "lost":
                    hub.fail("/resolve/|/cdn/", times=None, echo=True)
                else:
                    for name in before:
                        commit.files.pop(name)
                    if damage == "changed":
                        commit.files.update(
                            zip(before, reversed(list(before.values())), strict=True)
                        )
            train_step(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(TrainerState, "train_step", damaged)
            patch.setattr("finetune.data.streaming.prefetch.MAX_BATCHES_AHEAD", 1)
            patch.setattr("finetune.data.streaming.prefetch.MAX_CACHED_BYTES", 2 * 10**4)
            with pytest.raises(error_type) as caught:
                train(make_recipe(), tmp_path / "run")
        assert caught.value.exit_code == code  # type: ignore[attr-defined]
        assert "\n" not in str(caught.value)
        hub.faults.clear()
        commit.files.update(before)
        train(make_recipe(), tmp_path / "run", resume=True)
        assert read_weights(tmp_path / "run") == read_weights(finished_run)

    def test_resume_refuses_a_changed_dataset(self, hub: HubServer, tmp_path: Path) -> None:
        train_until_killed(2, make_recipe("run.save_every=1"), tmp_path / "run")
        hub.commit(REPO_NAME, {"README.md": b"---\nlicense: mit\n---\n"})
        hub.commit(
            REPO_NAME,
            {
                "data/train-00000-of-00004.parquet": dataset_shards(1, 20)[
                    "data/train-00000-of-00001.parquet"
                ]
            },
        )
        with refused("data.changed", REPO_NAME, tmp_path / "run"):
            train(make_recipe("run.save_every=1"), tmp_path / "run", resume=True)
        name = f"data.source=hub:{REPO_NAME}@{hub.commits(REPO_NAME)[1]}"
        with refused("recipe.not_this_run", "data.source"):
            train(make_recipe("run.save_every=1", name), tmp_path / "run", resume=True)

    def test_cli_reports_an_unreachable_hub_once(
        self, hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "tiny.yaml"
        path.write_text(TINY_RECIPE)
        command = ["train", str(path), *STREAMED, "--out", str(tmp_path / "run")]
        hub.fail("/cdn/", times=None)
        assert main(command) == 7
        stderr = capfd.readouterr().err
        assert "Traceback" not in stderr
        assert stderr.count(", repeatedly;") == 1


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(hub: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    overrides = [change for change in STREAMED if "dropout" not in change]
    train(parse_recipe(TINY_RECIPE, overrides=overrides), tmp_path / "one")
    args = ["train", str(path), *overrides, "--out", str(tmp_path / "two")]
    run_two_ranks(run_rank_command_on_hub, hub.url, tmp_path / "home-of-two", None, *args)
    assert json.loads((tmp_path / "two/run.json").read_text())["num_processes"] == 2
    assert read_train_losses(tmp_path / "two") == pytest.approx(
        read_train_losses(tmp_path / "one"), abs=1e-5
    )
    actual, expected = read_results(tmp_path / "two"), read_results(tmp_path / "one")
    assert actual["test"]["examples"] == expected["test"]["examples"] == 20
    assert actual["val"]["examples"] == expected["val"]["examples"] == 33
