"""Training on a streamed set of the loopback hub: resumed exactly, the same on any number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults_runs import TINY, killed_before, losses, weights
from hub_server import HubServer, point_at
from ranks import command_at, two_ranks
from refusals import refused
from streamed import NAME, bytes_sent, on_disk, shards, without_waits

from finetune.cli.main import main
from finetune.data.streaming import remote_file as ranges
from finetune.errors import DataError, HubError, RecipeError
from finetune.recipe.load import Recipe, parse_recipe
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")

FILES = shards(4, 40)
STREAMED = [
    *(f"data.source=hub:{NAME}", "data.streaming=true", "data.batch_size=24"),
    *("data.val_fraction=0.2", "optim.steps=12", "run.save_every=3", "run.eval_every=4"),
    *("model.dropout=0.1", "optim.ema_decay=0.9", "data.micro_batch=8"),
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    without_waits(monkeypatch)
    with HubServer() as hub:
        hub.add_repo(NAME, FILES, kind="dataset")
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.mistakes == []


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(TINY, overrides=[*STREAMED, *overrides])


@pytest.fixture(scope="module")
def whole(no_pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch, HubServer() as hub:
        hub.add_repo(NAME, FILES, kind="dataset")
        point_at(hub, patch, out.parent / "home")
        train(recipe(), out)
    return out


def results(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "results.json").read_text())
    return found


def test_it_learns_the_same_wherever_the_files_are(whole: Path, tmp_path: Path) -> None:
    local = on_disk(tmp_path, FILES)
    train(recipe(f"data.source={local}", "data.workers=0"), tmp_path / "local")
    assert weights(whole) == weights(tmp_path / "local")
    assert losses(whole) == losses(tmp_path / "local")
    assert results(whole)["test"]["examples"] == 20
    assert results(whole)["val"]["examples"] == 33  # 11 of each class
    assert results(whole)["test"]["top1"] > 0.6
    home = whole.parent / "home"
    assert any(home.rglob("*"))
    assert not list(home.rglob("*.parquet"))  # nothing was downloaded whole


def test_evaluation_is_that_of_the_same_set_in_memory(hub: HubServer, tmp_path: Path) -> None:
    still = ["optim.steps=1", "optim.warmup_steps=0", "optim.lr=1e-30", "optim.ema_decay=null"]
    told = []
    for changes in ([], ["data.streaming=false", "data.keep=memory"]):
        train(recipe(*changes, *still, "model.head_init=default"), tmp_path / f"one-{len(changes)}")
        told.append(results(tmp_path / f"one-{len(changes)}")["test"])
    assert told[0]["confusion"] == told[1]["confusion"]
    assert told[0]["loss"] == told[1]["loss"] != pytest.approx(math.log(3), abs=1e-3)


def test_killed_and_resumed_it_ends_with_the_same_weights(
    hub: HubServer, whole: Path, tmp_path: Path
) -> None:
    killed_before(9, recipe(), tmp_path / "killed")
    steps = [int(p.name[5:]) for p in (tmp_path / "killed/checkpoints").iterdir()]
    assert max(steps) < 9
    train(recipe(), tmp_path / "killed", resume=True)
    assert weights(tmp_path / "killed") == weights(whole)
    assert losses(tmp_path / "killed") == losses(whole)


def test_a_resumed_run_reads_what_is_left(hub: HubServer, tmp_path: Path) -> None:
    quiet = ["data.val_fraction=0", "run.test=false", "run.eval_every=100", "optim.steps=6"]
    killed_before(6, recipe(*quiet), tmp_path / "run")  # 6 steps of 24 are most of an epoch
    whole = bytes_sent(hub)
    hub.requests.clear()
    hub.headers.clear()
    train(recipe(*quiet), tmp_path / "run", resume=True)
    assert 0 < bytes_sent(hub) < whole
    images = sum(map(len, FILES.values()))
    ends = 5 * 2**16  # larger than these files: their ends alone are as large as they
    assert whole < 2 * images + ends


def test_keys_that_streaming_excludes_are_refused(hub: HubServer, tmp_path: Path) -> None:
    for key, value in (
        ("data.keep", "memory"),
        ("data.keep", "device"),
        ("data.unreadable", "quarantine"),
        ("data.source", "embedded:digits"),
    ):
        with pytest.raises(RecipeError) as caught:
            recipe(f"{key}={value}")
        assert caught.value.code == "recipe.conflict"
        assert f"{key}: " in str(caught.value)
        assert f"'{value}'" in str(caught.value)
    assert recipe("data.keep=none").data.streaming


class TestFaults:
    def test_one_in_the_middle_changes_nothing(
        self, hub: HubServer, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        step = TrainerState.step

        def disturbed(self: TrainerState, *args: Any) -> None:
            if self.counters.step in (2, 5):
                hub.fail("GET /cdn/", kind="truncate")
                hub.fail("GET /cdn/", status=503)
                ranges._places.clear()
            step(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainerState, "step", disturbed)
            patch.setattr("finetune.data.streaming.prefetch._BATCHES_AHEAD", 1)
            patch.setattr("finetune.data.streaming.prefetch.LIMIT_BYTES", 2 * 10**4)
            train(recipe(), tmp_path / "disturbed")
        assert sum(fault.times == 0 for fault in hub.faults) >= 2
        assert "trying again" in capfd.readouterr().err
        assert weights(tmp_path / "disturbed") == weights(whole)

    @pytest.mark.parametrize(
        "what, kind, code",
        [("lost", HubError, 7), ("changed", DataError, 3), ("gone", DataError, 3)],
    )
    def test_a_definite_loss_ends_the_run_and_can_be_gone_on_from(
        self,
        hub: HubServer,
        whole: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        what: str,
        kind: type,
        code: int,
    ) -> None:
        step = TrainerState.step
        commit = hub.store.any_of(NAME).find("main")
        assert commit is not None
        before = dict(commit.files)

        def hurt(self: TrainerState, *args: Any) -> None:
            if self.counters.step == 4:
                ranges._places.clear()
                if what == "lost":
                    hub.fail("/resolve/|/cdn/", times=None, echo=True)
                else:
                    for name in before:
                        commit.files.pop(name)
                    if what == "changed":
                        commit.files.update(
                            zip(before, reversed(list(before.values())), strict=True)
                        )
            step(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(TrainerState, "step", hurt)
            patch.setattr("finetune.data.streaming.prefetch._BATCHES_AHEAD", 1)
            patch.setattr("finetune.data.streaming.prefetch.LIMIT_BYTES", 2 * 10**4)
            with pytest.raises(kind) as caught:
                train(recipe(), tmp_path / "run")
        assert caught.value.exit_code == code  # type: ignore[attr-defined]
        assert "\n" not in str(caught.value)
        hub.faults.clear()
        commit.files.update(before)
        train(recipe(), tmp_path / "run", resume=True)
        assert weights(tmp_path / "run") == weights(whole)

    def test_another_set_is_not_gone_on_with(self, hub: HubServer, tmp_path: Path) -> None:
        killed_before(6, recipe(), tmp_path / "run")
        hub.commit(NAME, {"README.md": b"---\nlicense: mit\n---\n"})
        hub.commit(
            NAME,
            {
                "data/train-00000-of-00004.parquet": shards(1, 20)[
                    "data/train-00000-of-00001.parquet"
                ]
            },
        )
        with refused("data.changed", NAME, tmp_path / "run"):
            train(recipe(), tmp_path / "run", resume=True)
        name = f"data.source=hub:{NAME}@{hub.commits(NAME)[1]}"
        with refused("recipe.not_this_run", "data.source"):
            train(recipe(name), tmp_path / "run", resume=True)

    def test_through_the_command_line(
        self, hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "tiny.yaml"
        path.write_text(TINY)
        command = ["train", str(path), *STREAMED, "--out", str(tmp_path / "run")]
        hub.fail("/cdn/", times=None)
        assert main(command) == 7
        said = capfd.readouterr().err
        assert "Traceback" not in said
        assert said.count("again and again") == 1


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(hub: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    plain = [change for change in STREAMED if "dropout" not in change]
    train(parse_recipe(TINY, overrides=plain), tmp_path / "one")
    words = ["train", str(path), *plain, "--out", str(tmp_path / "two")]
    two_ranks(command_at, hub.url, tmp_path / "home-of-two", None, *words)
    assert json.loads((tmp_path / "two/run.json").read_text())["num_processes"] == 2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    mine, theirs = results(tmp_path / "two"), results(tmp_path / "one")
    assert mine["test"]["examples"] == theirs["test"]["examples"] == 20
    assert mine["val"]["examples"] == theirs["val"]["examples"] == 33
