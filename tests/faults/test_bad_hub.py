"""Names on the hub that are malformed, missing, refused or damaged, against a hub on loopback."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults_bad import PROMISE, Bad, parametrised, refuse
from hub_samples import READ, hub, model_folder, slept
from hub_server import HubServer, point_at
from networks import timm_folder
from samples import make_parquet

from finetune.hub import client

__all__ = ["hub", "slept"]  # fixtures

NAMES = {
    "model: one part": Bad("info hf-hub:name", "weights.unknown_name", "'hf-hub:name'"),
    "model: three parts": Bad("info hf-hub:a/b/c", "weights.unknown_name", "a/b/c"),
    "model: nothing": Bad("info hf-hub:", "weights.unknown_name", "hf-hub:"),
    "model: a space": Bad(["info", "hf-hub:a/b c"], "weights.unknown_name", "a/b c"),
    "model: upwards": Bad("info hf-hub:../etc", "weights.unknown_name", "../etc"),
    "model: a zero byte": Bad(["info", "hf-hub:a/b\0"], "weights.unknown_name", "hf-hub:a/b"),
    "model: a name too long": Bad(
        ["info", f"hf-hub:a/{'x' * 200}"],
        "weights.unknown_name",
        "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    ),
    "model: missing": Bad("info hf-hub:zoo/nothing", "weights.not_found", "zoo/nothing"),
    "model: no such revision": Bad("info hf-hub:zoo/net@v9", "weights.not_found", "v9"),
    "model: an empty revision": Bad("info hf-hub:zoo/bare@", "weights.not_found", "config.json"),
    "model: no configuration": Bad("info hf-hub:zoo/bare", "weights.not_found", "config.json"),
    "model: a configuration of text": Bad(
        "info hf-hub:zoo/text", "weights.damaged", "hf-hub:zoo/text"
    ),
    "model: no weights": Bad("predict hf-hub:zoo/hollow a.png", "weights.not_found", "zoo/hollow"),
    "model: damaged weights": Bad(
        "predict hf-hub:zoo/torn a.png", "weights.damaged", "model.safetensors"
    ),
    "model: private": Bad("info hf-hub:bob/secret", "weights.not_found", "bob/secret"),
    "model: gated": Bad("info hf-hub:bob/gated", "hub.forbidden", "bob/gated"),
    "transformers: one part": Bad(
        "info transformers:name", "weights.unknown_name", "transformers:name"
    ),
    "transformers: missing": Bad(
        "info transformers:zoo/nothing", "weights.not_found", "zoo/nothing"
    ),
    "transformers: of timm": Bad("info transformers:zoo/net", "weights.wrong_format", "zoo/net"),
    "data: missing": Bad("data info hub:zoo/nothing", "data.not_found", "zoo/nothing"),
    "data: a model": Bad("data info hub:zoo/net", "data.not_found", "zoo/net"),
    "data: no such revision": Bad("data info hub:zoo/set@v9", "data.not_found", "v9"),
    "data: no such configuration": Bad(
        "data info hub:zoo/set:other", "data.not_loadable", "zoo/set"
    ),
    "data: no tables": Bad("data info hub:zoo/prose", "data.not_loadable", "zoo/prose"),
    "data: three parts": Bad("data info hub:a/b/c", "data.wrong_source", "hub:a/b/c"),
    "data: an empty revision": Bad("data info hub:zoo/set@", "data.wrong_source", "hub:zoo/set@"),
    "push: to somebody else": Bad("push net bob/net", "hub.forbidden", "bob"),
    "push: a folder without weights": Bad(
        "push empty alice/net", "weights.not_found", "empty", {"empty": Path.mkdir}
    ),
    "push: no such folder": Bad("push nowhere alice/net", "weights.not_found", "nowhere"),
}
REFUSED = {
    "a token that may only read": (READ, Bad("push net alice/net", "hub.forbidden", "HF_TOKEN")),
    "a token of nobody": (
        "hf_nobodynobody",
        Bad("push net alice/net", "hub.forbidden", "HF_TOKEN"),
    ),
    "no token": ("", Bad("push net alice/net", "hub.no_token", "hf auth login")),
}
TROUBLE = {
    "a hub out of order": (
        r"GET|HEAD",
        "status",
        Bad("info hf-hub:zoo/net", "hub.out_of_order", "503"),
    ),
    "a connection that is cut": (
        r"GET|HEAD",
        "reset",
        Bad("info hf-hub:zoo/net", "hub.unreachable", "zoo/net"),
    ),
    "a hub out of order, data": (
        r"GET|HEAD",
        "status",
        Bad("data info hub:zoo/set", "hub.unreachable", "503"),
    ),
    "a hub out of order, push": (
        r"GET|HEAD",
        "status",
        Bad("push net alice/net", "hub.out_of_order", "503"),
    ),
}

LOOP = {"Location": "/api/models/zoo/net"}
# What is asked for, the answer, and the command.
WRONG = {
    **{
        f"push: who you are is {name}": (
            "GET /api/whoami",
            {"status": 200, "body": body},
            Bad("push net alice/net", "hub.wrong_answer", "alice/net"),
        )
        for name, body in {
            "null": b"null",
            "a list": b"[]",
            "a number": b"7",
            "of other parts": b'{"name": "alice", "orgs": 7}',
            "without a name": b"{}",
        }.items()
    },
    "push: who you are is nested": (
        "GET /api/whoami",
        {"status": 200, "body": b"[" * 100_000},
        Bad("push net alice/net", "hub.wrong_answer", "nested more than"),
    ),
    "push: the repository is a list": (
        "GET /api/models/alice/net",
        {"status": 200, "body": b"[]"},
        Bad("push net alice/net", "hub.wrong_answer", "alice/net"),
    ),
    "push: a refusal is null": (
        "GET /api/whoami",
        {"status": 418, "body": b"null"},
        Bad("push net alice/net", "hub.out_of_order", "418"),
    ),
    "push: the card's check is a list": (
        "POST /api/validate-yaml",
        {"status": 200, "body": b"[]"},
        Bad("push net alice/net", "hub.wrong_answer", "alice/net"),
    ),
    "push: a circle of redirects": (
        "GET /api/(whoami|models)",
        {"status": 302, "headers": LOOP},
        Bad("push net alice/net", "hub.wrong_answer", "from one address to another"),
    ),
    "model: a circle of redirects": (
        "(GET|HEAD) .*zoo/net",
        {"status": 302, "headers": {"Location": "/zoo/net/resolve/main/config.json"}},
        Bad("info hf-hub:zoo/net", "hub.wrong_answer", "from one address to another"),
    ),
    "data: a circle of redirects": (
        "GET /api/",
        {"status": 302, "headers": LOOP},
        Bad("data info hub:zoo/set", "hub.wrong_answer", "from one address to another"),
    ),
    "data: the data set is null": (
        "GET /api/datasets",
        {"status": 200, "body": b"null"},
        Bad("data info hub:zoo/set", "hub.wrong_answer", "zoo/set"),
    ),
}
ANSWER_SECONDS = 10  # without a wait between two tries


@pytest.fixture
def shelf(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """Repositories with something wrong in each, and a folder to push."""
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(client, "_said", set())
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


@pytest.mark.parametrize("pattern, answer, bad", WRONG.values(), ids=list(WRONG))
def test_wrong_answers(
    pattern: str,
    answer: dict[str, Any],
    bad: Bad,
    shelf: HubServer,
    slept: list[float],
    fault: Callable[..., None],
) -> None:
    shelf.fail(pattern, times=None, **answer)
    began = time.monotonic()
    refuse(bad)
    assert slept == []
    assert time.monotonic() - began < ANSWER_SECONDS * max(1.0, os.getloadavg()[0] / 2)
    fault("bad input: a hub whose answers have another shape", PROMISE)
