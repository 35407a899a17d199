"""hub/download.py against the loopback hub: versions, caches, each fault, each refusal."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import timm
import torch
from hub_server import HubServer, point_at
from hub_store import git_sha1
from networks import message, timm_folder
from ranks import forked
from refusals import refused
from safetensors.torch import load_file

from finetune.errors import HubError
from finetune.hub import client
from finetune.hub.download import checked, fetch
from finetune.models.weights import resolve as weights_module
from finetune.models.weights.resolve import resolve
from finetune.recipe.load import parse_recipe
from finetune.training.train import train

Captured, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
NET = "someone/net"
ALICE = "hf_aliceAlice1234"
CONFIG, WEIGHTS = r"GET /someone/net/resolve/.*/config\.json", r"GET /cdn/"
HEADS = r"HEAD /someone/net/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return timm_folder(tmp_path / "net")


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: Patch) -> Iterator[HubServer]:
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(client, "_said", set())
    with HubServer() as hub:
        hub.add_repo(NET, content_of(folder))
        hub.tag(NET, "v1")
        hub.add_user("someone", token=ALICE)
        point_at(hub, monkeypatch, tmp_path / "home")
        yield hub
        assert hub.mistakes == []


def set_offline(monkeypatch: Patch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def hub_error(name: str) -> str:
    with pytest.raises(HubError) as caught:
        resolve(name)
    assert caught.value.exit_code == 7
    text = str(caught.value)
    assert "\n" not in text
    return text


def blob_of(hub: HubServer, filename: str) -> Path:
    """Path of a file's bytes in the cache."""
    return fetch(NET, filename, None).path.resolve()


class TestVersions:
    def test_a_repository_is_read_at_one_commit(self, hub: HubServer, folder: Path) -> None:
        [commit, _] = hub.commits(NET)
        hub.commit(NET, {"config.json": b"broken since"})
        found = resolve(f"hf-hub:{NET}@v1")
        local = resolve(str(folder))
        assert found.state is not None
        assert local.state is not None
        assert all(torch.equal(found.state[k], local.state[k]) for k in local.state)
        assert found.class_names == local.class_names
        assert found.provenance == {
            "source": f"hf-hub:{NET}@v1",
            "repository": NET,
            "revision": commit,
            "file": "model.safetensors",
            "sha256": local.provenance["sha256"],
            "license": local.provenance["license"],
        }
        weights = [path for _, path in hub.requests if path.endswith("model.safetensors")]
        assert weights
        assert all(commit in path for path in weights)

    def test_branches_and_commits(self, hub: HubServer) -> None:
        [old, _] = hub.commits(NET)
        new = hub.commit(NET, {"README.md": b"newer"}, revision="main")
        names = {f"hf-hub:{NET}": new, f"hf-hub:{NET}@main": new, f"hf-hub:{NET}@{old}": old}
        for name, commit in names.items():
            assert resolve(name).provenance["revision"] == commit

    def test_pickled_weights_are_the_second_choice(self, hub: HubServer, folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        hub.commit(NET, {"model.safetensors": None})
        assert "no weights file" in message(f"hf-hub:{NET}")
        torch.save(state, folder / "pytorch_model.bin")
        hub.commit(NET, {"pytorch_model.bin": (folder / "pytorch_model.bin").read_bytes()})
        assert resolve(f"hf-hub:{NET}").provenance["file"] == "pytorch_model.bin"

    def test_registry_names_come_by_the_same_road(self, hub: HubServer, monkeypatch: Patch) -> None:
        entry = timm.get_pretrained_cfg("vit_tiny_patch16_224")
        assert entry is not None
        monkeypatch.setattr(entry, "hf_hub_id", NET)
        monkeypatch.setattr(weights_module.timm, "get_pretrained_cfg", lambda _: entry)
        hub.fail(WEIGHTS, kind="corrupt")
        found = resolve("vit_tiny_patch16_224")
        assert found.state is not None
        assert found.provenance["repository"] == NET
        assert found.provenance["revision"] == hub.commits(NET)[0]
        assert hub.count(r"config\.json") == 0
        assert not {"hf_hub_id", "url", "file"} & found.config.keys()


class TestCache:
    def test_a_warm_cache_needs_no_request(
        self, hub: HubServer, monkeypatch: Patch, capsys: Captured
    ) -> None:
        first = resolve(f"hf-hub:{NET}")
        assert capsys.readouterr().err == ""
        set_offline(monkeypatch)
        hub.requests.clear()
        assert resolve(f"hf-hub:{NET}").provenance == first.provenance
        assert resolve(f"hf-hub:{NET}").provenance == first.provenance
        assert hub.requests == []
        told = [line for line in capsys.readouterr().err.splitlines() if "using revision" in line]
        assert len(told) == 1
        assert str(first.provenance["revision"]) in told[0]
        assert "HF_HUB_OFFLINE is set" in told[0]

    def test_a_warm_cache_serves_when_nobody_answers(
        self, hub: HubServer, capsys: Captured
    ) -> None:
        first = resolve(f"hf-hub:{NET}@v1")
        hub.stop()
        started = time.monotonic()
        assert resolve(f"hf-hub:{NET}@v1").provenance == first.provenance
        assert time.monotonic() - started < 3
        told = [line for line in capsys.readouterr().err.splitlines() if line]
        assert len(told) == 1
        assert "the hub cannot be reached" in told[0]
        assert f"using revision {first.provenance['revision']} from the cache" in told[0]

    def test_a_warm_cache_serves_when_the_hub_is_out_of_order(
        self, hub: HubServer, capsys: Captured
    ) -> None:
        first = resolve(f"hf-hub:{NET}")
        hub.fail(".", status=503, times=None)
        assert resolve(f"hf-hub:{NET}").provenance == first.provenance
        assert "the hub answered 503 (injected fault); using revision" in capsys.readouterr().err

    def test_nothing_cached_and_nobody_there(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.5)  # as it is
        hub.stop()
        started = time.monotonic()
        text = hub_error(f"hf-hub:{NET}")
        assert time.monotonic() - started < 4
        assert "the hub cannot be reached" in text
        set_offline(monkeypatch)
        text = hub_error(f"hf-hub:{NET}")
        assert "HF_HUB_OFFLINE is set" in text
        assert "not in the cache" in text

    def test_a_file_known_to_be_missing(
        self, hub: HubServer, folder: Path, monkeypatch: Patch
    ) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "w.bin")
        weights = (folder / "w.bin").read_bytes()
        hub.commit(NET, {"model.safetensors": None, "pytorch_model.bin": weights})
        first = resolve(f"hf-hub:{NET}")
        set_offline(monkeypatch)
        assert resolve(f"hf-hub:{NET}").provenance == first.provenance

    @pytest.mark.slow
    def test_three_processes_download_once(self, hub: HubServer, tmp_path: Path) -> None:
        given = {"target": download, "args": (hub.url, tmp_path / "cold")}
        running = [forked.Process(**given) for _ in range(3)]
        for process in running:
            process.start()
        for process in running:
            process.join()
        assert [process.exitcode for process in running] == [0, 0, 0]
        assert hub.count(CONFIG) == 1
        assert hub.count(WEIGHTS) == 1
        assert hub.count(HEADS) >= 3


def download(url: str, home: Path) -> None:
    """In a process of its own."""
    with Patch.context() as patch:
        point_at(url, patch, home)
        resolve(f"hf-hub:{NET}")


class TestPassingFaults:
    @pytest.mark.parametrize("place", [HEADS, CONFIG, WEIGHTS])
    @pytest.mark.parametrize("kind", ["503", "429", "reset", "lost"])
    def test_it_is_tried_again(
        self, hub: HubServer, place: str, kind: str, capsys: Captured
    ) -> None:
        if kind.isdigit():
            hub.fail(place, status=int(kind), retry_after=0, times=2)
        else:
            hub.fail(place, kind=kind)
        assert resolve(f"hf-hub:{NET}").state is not None
        told = capsys.readouterr().err
        assert told.count("trying again") <= 1
        assert "http://" not in told
        if kind.isdigit():
            assert f"hf-hub:{NET}: the hub answered {kind} (injected fault); trying again" in told

    def test_a_cut_connection_is_resumed(
        self, hub: HubServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        hub.fail(WEIGHTS, kind="truncate")
        with caplog.at_level(logging.WARNING):
            assert resolve(f"hf-hub:{NET}").state is not None
        assert hub.count(WEIGHTS) == 2
        assert not [r for r in caplog.records if r.name.startswith("huggingface_hub")]

    def test_a_busy_hub_is_left_alone_for_as_long_as_it_asks(
        self, hub: HubServer, monkeypatch: Patch
    ) -> None:
        waits: list[float] = []
        monkeypatch.setattr(client.time, "sleep", waits.append)
        hub.fail(HEADS, status=429, retry_after=3)
        hub.fail(WEIGHTS, status=429, retry_after=3600)
        assert resolve(f"hf-hub:{NET}").state is not None
        assert waits == [3.0, client.LONGEST_WAIT_SECONDS]

    @pytest.mark.parametrize("place", [HEADS, CONFIG, WEIGHTS])
    @pytest.mark.parametrize("kind", ["status", "reset"])
    def test_for_ever(self, hub: HubServer, place: str, kind: str) -> None:
        hub.fail(place, kind=kind, times=None)
        started = time.monotonic()
        text = hub_error(f"hf-hub:{NET}")
        assert time.monotonic() - started < 15
        assert text.startswith(f"hf-hub:{NET}")
        assert "could not be fetched" in text
        assert "try again later" in text
        assert hub.count(place) >= client.TRIES

    def test_cut_for_ever(self, hub: HubServer, monkeypatch: Patch) -> None:
        patient = {**vars(time), "sleep": lambda seconds: None}  # a second each time
        monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(**patient))
        hub.fail(WEIGHTS, kind="truncate", times=None)
        assert "the connection is cut again and again" in hub_error(f"hf-hub:{NET}")
        assert hub.count(WEIGHTS) < 20

    def test_the_client_keeps_its_ways(self, hub: HubServer) -> None:
        session = huggingface_hub.get_session()
        resolve(f"hf-hub:{NET}")
        assert "send" not in vars(session)
        assert not logging.getLogger("huggingface_hub.file_download").filters


class TestOtherBytes:
    """Same length, other content: nothing but the checksum can tell."""

    @pytest.mark.parametrize("place", [CONFIG, WEIGHTS])
    def test_they_are_fetched_again(
        self, hub: HubServer, folder: Path, place: str, capsys: Captured
    ) -> None:
        hub.fail(place, kind="corrupt", times=2)
        found, local = resolve(f"hf-hub:{NET}"), resolve(str(folder))
        assert found.state is not None
        assert local.state is not None
        assert all(torch.equal(found.state[k], local.state[k]) for k in local.state)
        assert found.provenance["sha256"] == local.provenance["sha256"]
        assert hub.count(place) == 3
        assert "bytes that are not those of its checksum; trying again" in capsys.readouterr().err

    @pytest.mark.parametrize("place", [CONFIG, WEIGHTS])
    def test_for_ever(self, hub: HubServer, tmp_path: Path, place: str) -> None:
        hub.fail(place, kind="corrupt", times=None)
        assert "bytes that are not those of its checksum" in hub_error(f"hf-hub:{NET}")
        left = [p for p in (tmp_path / "home/hub").rglob("blobs/*") if p.is_file()]
        good = set(hub.files(NET).values())
        assert all(path.read_bytes() in good for path in left)

    @pytest.mark.parametrize("filename", ["config.json", "model.safetensors"])
    def test_in_the_cache(
        self, hub: HubServer, folder: Path, filename: str, monkeypatch: Patch
    ) -> None:
        blob = blob_of(hub, filename)
        resolve(f"hf-hub:{NET}")
        damaged = bytearray(blob.read_bytes())
        damaged[-5] ^= 1
        blob.write_bytes(damaged)
        with monkeypatch.context() as offline:
            set_offline(offline)
            text = message(f"hf-hub:{NET}")
            assert f"{filename} in the cache is damaged" in text
            assert f"delete {blob}, or connect" in text
        sha256 = resolve(str(folder)).provenance["sha256"]
        assert resolve(f"hf-hub:{NET}").provenance["sha256"] == sha256
        assert blob.read_bytes() == (folder / filename).read_bytes()
        blob.write_bytes(damaged)
        hub.stop()
        assert "in the cache is damaged" in message(f"hf-hub:{NET}")

    def test_without_links(self, hub: HubServer, monkeypatch: Patch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_SYMLINKS", True)
        monkeypatch.setattr(
            "huggingface_hub.file_download.are_symlinks_supported", lambda *_: False
        )
        hub.fail(CONFIG, kind="corrupt", times=None)
        with refused("hub.out_of_order", "checksum"):
            fetch(NET, "config.json", None)


class TestRefusals:
    def test_four_different_ones(self, hub: HubServer, monkeypatch: Patch) -> None:
        texts = {message("hf-hub:nobody/net"), message(f"hf-hub:{NET}@v2")}
        hub.commit(NET, {"config.json": None})
        texts.add(message(f"hf-hub:{NET}"))
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        texts.add(hub_error(f"hf-hub:{NET}"))
        parts = (
            "nobody/net: no such repository, or it is private; check the name, or log in with",
            "@v2: no such revision; leave '@v2' away",
            "no file config.json",
            "the hub refuses the token in HF_TOKEN (401); make a new one and `hf auth login`",
        )
        for part in parts:
            assert len([text for text in texts if part in text]) == 1, part

    def test_names_that_are_none(self, hub: HubServer) -> None:
        assert "write hf-hub:owner/name" in message("hf-hub:a/b/c")

    def test_a_wrong_token_is_told_although_there_is_a_copy(
        self, hub: HubServer, monkeypatch: Patch
    ) -> None:
        resolve(f"hf-hub:{NET}")
        monkeypatch.setenv("HF_TOKEN", "hf_wrongWrong1234")
        assert "refuses the token in HF_TOKEN" in hub_error(f"hf-hub:{NET}")

    def test_private(self, hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
        hub.add_repo("someone/secret", content_of(folder), private=True)
        assert "or it is private; check the name, or log in" in message("hf-hub:someone/secret")
        hub.add_user("other", token="hf_otherOther1234")
        monkeypatch.setenv("HF_TOKEN", "hf_otherOther1234")
        assert "check the rights of your token" in message("hf-hub:someone/secret")
        monkeypatch.setenv("HF_TOKEN", ALICE)
        assert resolve("hf-hub:someone/secret").state is not None

    def test_gated(self, hub: HubServer, folder: Path, monkeypatch: Patch) -> None:
        hub.add_repo("someone/gated", content_of(folder), gated=True)
        assert "access must be granted first" in hub_error("hf-hub:someone/gated")
        monkeypatch.setenv("HF_TOKEN", ALICE)
        assert resolve("hf-hub:someone/gated").state is not None

    @pytest.mark.parametrize("status", [400, 403, 500])
    @pytest.mark.parametrize("place", [HEADS, CONFIG, WEIGHTS])
    def test_a_token_is_never_repeated(
        self, hub: HubServer, place: str, status: int, monkeypatch: Patch, capsys: Captured
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        hub.fail(place, status=status, times=None, echo=True)
        text = hub_error(f"hf-hub:{NET}")
        assert str(status) in text
        seen = capsys.readouterr()
        assert ALICE not in text + seen.out + seen.err

    @pytest.mark.parametrize("address", ["localhost:8", "{cdn}/elsewhere"])
    def test_what_answers_is_no_hub(
        self, hub: HubServer, address: str, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        point_at(address.format(cdn=hub.cdn), monkeypatch, tmp_path / "other")
        assert "check HF_ENDPOINT" in hub_error(f"hf-hub:{NET}")

    def test_xet_names_the_switch(self, hub: HubServer, monkeypatch: Patch) -> None:
        pytest.importorskip("hf_xet")
        hub.xet = True
        assert "HF_HUB_DISABLE_XET=1" in hub_error(f"hf-hub:{NET}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        assert resolve(f"hf-hub:{NET}").state is not None


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_damaged_weights_are_never_trained_on(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    """A run whose weights came with other bytes first is the run from the true ones, bit by bit."""
    text = """
    model: {name: NAME}
    data: {source: "embedded:digits", train: resize, eval: resize, batch_size: 32}
    optim: {name: sgd, lr: 0.01, steps: 2}
    run: {precision: fp32, threads: 1, log_every: 1}
    """
    hub.fail(WEIGHTS, kind="corrupt", times=2)
    ends = []
    for number, name in enumerate((f"hf-hub:{NET}@v1", str(folder))):
        run = tmp_path / str(number)
        train(parse_recipe(text.replace("NAME", json.dumps(name))), run)
        ends.append((run / "model" / "model.safetensors").read_bytes())
        record = json.loads((run / "run.json").read_text())
        assert resolve(str(folder)).provenance["sha256"] in json.dumps(record)
    assert hub.count(WEIGHTS) == 3
    assert ends[0] == ends[1]
    assert hub.commits(NET)[0] in (tmp_path / "0" / "run.json").read_text()


class TestChecked:
    @pytest.mark.parametrize("name", ["sha256", "git"])
    def test_by_the_name_in_the_cache(self, tmp_path: Path, name: str) -> None:
        content = b"some bytes"
        sha256 = hashlib.sha256(content).hexdigest()
        blob = tmp_path / (sha256 if name == "sha256" else git_sha1(content))
        blob.write_bytes(content)
        link = tmp_path / "file"
        link.symlink_to(blob.name)
        assert checked(link) == (sha256 if name == "sha256" else "")
        blob.write_bytes(b"some Bytes")
        assert checked(link) is None
        assert checked(blob) == ""  # a file without a link, of which nothing is known
        assert checked(blob, etag=blob.name) is None
