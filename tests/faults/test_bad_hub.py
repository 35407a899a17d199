"""Names on the hub that are malformed, missing, refused or damaged, against a hub on loopback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from faults_bad import PROMISE, Bad, parametrised, refuse
from hub_samples import READ, hub, model_folder, slept
from hub_server import HubServer, point_at
from networks import timm_folder
from samples import make_parquet

from finetune.hub import client as hub_reads

__all__ = ["hub", "slept"]  # fixtures

NAMES = {
    "model: one part": Bad("info hf-hub:name", 4, "name"),
    "model: three parts": Bad("info hf-hub:a/b/c", 4, "a/b/c"),
    "model: nothing": Bad("info hf-hub:", 4, "hf-hub:"),
    "model: a space": Bad(["info", "hf-hub:a/b c"], 4, "a/b c"),
    "model: upwards": Bad("info hf-hub:../etc", 4, "../etc"),
    "model: a zero byte": Bad(["info", "hf-hub:a/b\0"], 4, "hf-hub:a/b"),
    "model: a name too long": Bad(["info", f"hf-hub:a/{'x' * 200}"], 4, "x" * 50),
    "model: missing": Bad("info hf-hub:zoo/nothing", 4, "zoo/nothing"),
    "model: no such revision": Bad("info hf-hub:zoo/net@v9", 4, "v9"),
    "model: an empty revision": Bad("info hf-hub:zoo/bare@", 4, "config.json"),
    "model: no configuration": Bad("info hf-hub:zoo/bare", 4, "config.json"),
    "model: a configuration of text": Bad("info hf-hub:zoo/text", 4, "not JSON"),
    "model: no weights": Bad("predict hf-hub:zoo/hollow a.png", 4, "no weights"),
    "model: damaged weights": Bad("predict hf-hub:zoo/torn a.png", 4, "truncated"),
    "model: private": Bad("info hf-hub:bob/secret", 4, "bob/secret"),
    "model: gated": Bad("info hf-hub:bob/gated", 7, "bob/gated"),
    "transformers: one part": Bad("info transformers:name", 4, "transformers:name"),
    "transformers: missing": Bad("info transformers:zoo/nothing", 4, "zoo/nothing"),
    "transformers: of timm": Bad("info transformers:zoo/net", 4, "zoo/net"),
    "data: missing": Bad("data info hub:zoo/nothing", 3, "zoo/nothing"),
    "data: a model": Bad("data info hub:zoo/net", 3, "zoo/net"),
    "data: no such revision": Bad("data info hub:zoo/set@v9", 3, "v9"),
    "data: no such configuration": Bad("data info hub:zoo/set:other", 3, "zoo/set"),
    "data: no tables": Bad("data info hub:zoo/prose", 3, "zoo/prose"),
    "data: three parts": Bad("data info hub:a/b/c", 3, "expected hub:owner/name"),
    "data: an empty revision": Bad("data info hub:zoo/set@", 3, "expected hub:owner/name"),
    "push: to somebody else": Bad("push net bob/net", 7, "bob"),
    "push: a folder without weights": Bad(
        "push empty alice/net", 4, "empty", {"empty": Path.mkdir}
    ),
    "push: no such folder": Bad("push nowhere alice/net", 4, "nowhere"),
}
REFUSED = {
    "a token that may only read": (READ, Bad("push net alice/net", 7, "write")),
    "a token of nobody": ("hf_nobodynobody", Bad("push net alice/net", 7, "token")),
    "no token": ("", Bad("push net alice/net", 7, "token")),
}
TROUBLE = {
    "a hub out of order": (r"GET|HEAD", "status", Bad("info hf-hub:zoo/net", 7, "503")),
    "a connection that is cut": (r"GET|HEAD", "reset", Bad("info hf-hub:zoo/net", 7, "zoo/net")),
    "a hub out of order, data": (r"GET|HEAD", "status", Bad("data info hub:zoo/set", 7, "503")),
    "a hub out of order, push": (r"GET|HEAD", "status", Bad("push net alice/net", 7, "503")),
}


@pytest.fixture
def shelf(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """Repositories with something wrong in each, and a folder to push."""
    monkeypatch.setattr(hub_reads, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(hub_reads, "_said", set())
    net = timm_folder(tmp_path / "made")
    config, weights = ((net / name).read_bytes() for name in ("config.json", "model.safetensors"))
    hub.add_repo("zoo/net", {"config.json": config, "model.safetensors": weights})
    hub.add_repo("zoo/bare", {"README.md": b"# nothing\n"})
    hub.add_repo("zoo/text", {"config.json": b"hello"})
    hub.add_repo("zoo/hollow", {"config.json": config})
    hub.add_repo("zoo/torn", {"config.json": config, "model.safetensors": weights[:-9]})
    hub.add_repo("bob/secret", {"config.json": config}, private=True)
    hub.add_repo("bob/gated", {"config.json": config}, gated=True)
    table = make_parquet(tmp_path / "t.parquet", [0, 1, 0, 1], names=["a", "b"]).read_bytes()
    hub.add_repo("zoo/set", {"data/train-00000-of-00001.parquet": table}, kind="dataset")
    hub.add_repo("zoo/prose", {"README.md": b"# nothing\n"}, kind="dataset")
    here = tmp_path / "here"
    here.mkdir()
    model_folder(here / "net")
    monkeypatch.chdir(here)
    return hub


@parametrised(NAMES)
def test_names(bad: Bad, shelf: HubServer, fault: Callable[..., None]) -> None:
    refuse(bad)
    assert shelf.count("^(PUT|DELETE) |/commit/") == 0  # nothing was uploaded
    fault("bad input: names on the hub", PROMISE)


@pytest.mark.parametrize("token, bad", REFUSED.values(), ids=list(REFUSED))
def test_refusals(
    token: str,
    bad: Bad,
    shelf: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    point_at(shelf, monkeypatch, tmp_path / "home2", token or None)
    assert token not in refuse(bad) or not token
    fault("bad input: tokens that are refused", PROMISE)


@pytest.mark.parametrize("pattern, kind, bad", TROUBLE.values(), ids=list(TROUBLE))
def test_trouble(
    pattern: str, kind: str, bad: Bad, shelf: HubServer, fault: Callable[..., None]
) -> None:
    shelf.fail(pattern, kind=kind, times=None)
    refuse(bad)
    fault("bad input: a hub that is out of order", PROMISE)
