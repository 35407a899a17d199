"""Bad names on the hub, and malformed responses, from a hub on loopback."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from hub_fixtures import hub, sleep_durations, write_model_folder
from hub_server import HubServer
from networks import write_timm_folder
from small_datasets import write_parquet

from finetune.hub import client

__all__ = ["hub", "sleep_durations"]  # fixtures

NAMES = {
    "model: one part": BadInput("info hf-hub:name", "weights.unknown_name", "'hf-hub:name'"),
    "model: three parts": BadInput("info hf-hub:a/b/c", "weights.unknown_name", "a/b/c"),
    "model: empty": BadInput("info hf-hub:", "weights.unknown_name", "hf-hub:"),
    "model: a space": BadInput(["info", "hf-hub:a/b c"], "weights.unknown_name", "a/b c"),
    "model: parent folder": BadInput("info hf-hub:../etc", "weights.unknown_name", "../etc"),
    "model: a NUL byte": BadInput(["info", "hf-hub:a/b\0"], "weights.unknown_name", "hf-hub:a/b"),
    "model: a name too long": BadInput(
        ["info", f"hf-hub:a/{'x' * 200}"],
        "weights.unknown_name",
        "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    ),
    "model: an empty revision": BadInput(
        "info hf-hub:zoo/bare@", "weights.not_found", "config.json"
    ),
    "model: no configuration": BadInput("info hf-hub:zoo/bare", "weights.not_found", "config.json"),
    "model: a configuration that is plain text": BadInput(
        "info hf-hub:zoo/text", "weights.damaged", "hf-hub:zoo/text"
    ),
    "model: no weights": BadInput(
        "predict hf-hub:zoo/hollow a.png", "weights.not_found", "zoo/hollow"
    ),
    "model: damaged weights": BadInput(
        "predict hf-hub:zoo/torn a.png", "weights.damaged", "model.safetensors"
    ),
    "transformers: one part": BadInput(
        "info transformers:name", "weights.unknown_name", "transformers:name"
    ),
    "transformers: missing": BadInput(
        "info transformers:zoo/nothing", "weights.not_found", "zoo/nothing"
    ),
    "transformers: a timm model": BadInput(
        "info transformers:zoo/net", "weights.wrong_format", "zoo/net"
    ),
    "data: a model": BadInput("data info hub:zoo/net", "data.not_found", "zoo/net"),
    "data: no such configuration": BadInput(
        "data info hub:zoo/set:other", "data.not_loadable", "zoo/set"
    ),
    "data: no tables": BadInput("data info hub:zoo/prose", "data.not_loadable", "zoo/prose"),
    "data: three parts": BadInput("data info hub:a/b/c", "data.wrong_source", "hub:a/b/c"),
    "data: an empty revision": BadInput(
        "data info hub:zoo/set@", "data.wrong_source", "hub:zoo/set@"
    ),
}

REDIRECT_TO_ITSELF = {"Location": "/api/models/zoo/net"}
# The request, the response, and the command.
WRONG_RESPONSES = {
    **{
        f"push: whoami is {name}": (
            "GET /api/whoami",
            {"status": 200, "body": body},
            BadInput("push net alice/net", "hub.wrong_answer", "alice/net"),
        )
        for name, body in {
            "null": b"null",
            "a list": b"[]",
            "a number": b"7",
            "of other types": b'{"name": "alice", "orgs": 7}',
            "without a name": b"{}",
        }.items()
    },
    "push: whoami is deeply nested": (
        "GET /api/whoami",
        {"status": 200, "body": b"[" * 100_000},
        BadInput("push net alice/net", "hub.wrong_answer", "RecursionError"),
    ),
    "push: the repository is a list": (
        "GET /api/models/alice/net",
        {"status": 200, "body": b"[]"},
        BadInput("push net alice/net", "hub.wrong_answer", "alice/net"),
    ),
    "push: an error body is null": (
        "GET /api/whoami",
        {"status": 418, "body": b"null"},
        BadInput("push net alice/net", "hub.out_of_order", "418"),
    ),
    "push: the card validation is a list": (
        "POST /api/validate-yaml",
        {"status": 200, "body": b"[]"},
        BadInput("push net alice/net", "hub.wrong_answer", "alice/net"),
    ),
    "push: a redirect loop": (
        "GET /api/(whoami|models)",
        {"status": 302, "headers": REDIRECT_TO_ITSELF},
        BadInput("push net alice/net", "hub.wrong_answer", "TooManyRedirects"),
    ),
    "model: a redirect loop": (
        "(GET|HEAD) .*zoo/net",
        {"status": 302, "headers": {"Location": "/zoo/net/resolve/main/config.json"}},
        BadInput("info hf-hub:zoo/net", "hub.wrong_answer", "TooManyRedirects"),
    ),
    "data: a redirect loop": (
        "GET /api/",
        {"status": 302, "headers": REDIRECT_TO_ITSELF},
        BadInput("data info hub:zoo/set", "hub.wrong_answer", "TooManyRedirects"),
    ),
    "data: the dataset is null": (
        "GET /api/datasets",
        {"status": 200, "body": b"null"},
        BadInput("data info hub:zoo/set", "hub.wrong_answer", "zoo/set"),
    ),
}
MAX_SECONDS = 10  # no wait between tries


@pytest.fixture
def broken_hub(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A hub with one fault in each repository; the working directory has a folder to push."""
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    model_folder = write_timm_folder(tmp_path / "made")
    config, weights = (
        (model_folder / name).read_bytes() for name in ("config.json", "model.safetensors")
    )
    hub.add_repo("zoo/net", {"config.json": config, "model.safetensors": weights})
    hub.add_repo("zoo/bare", {"README.md": b"# nothing\n"})
    hub.add_repo("zoo/text", {"config.json": b"hello"})
    hub.add_repo("zoo/hollow", {"config.json": config})
    hub.add_repo("zoo/torn", {"config.json": config, "model.safetensors": weights[:-9]})
    table = write_parquet(tmp_path / "t.parquet", [0, 1, 0, 1], names=["a", "b"]).read_bytes()
    hub.add_repo("zoo/set", {"data/train-00000-of-00001.parquet": table}, kind="dataset")
    hub.add_repo("zoo/prose", {"README.md": b"# nothing\n"}, kind="dataset")
    cwd = tmp_path / "here"
    cwd.mkdir()
    write_model_folder(cwd / "net")
    monkeypatch.chdir(cwd)
    return hub


@parametrize_bad_inputs(NAMES)
def test_bad_hub_names(bad: BadInput, broken_hub: HubServer) -> None:
    check_bad_input(bad)
    assert broken_hub.count("^(PUT|DELETE) |/commit/") == 0  # nothing was uploaded


@pytest.mark.parametrize(
    "pattern, response, bad", WRONG_RESPONSES.values(), ids=list(WRONG_RESPONSES)
)
def test_malformed_responses(
    pattern: str,
    response: dict[str, Any],
    bad: BadInput,
    broken_hub: HubServer,
    sleep_durations: list[float],
) -> None:
    broken_hub.fail(pattern, times=None, **response)
    started = time.monotonic()
    check_bad_input(bad)
    assert sleep_durations == []
    assert time.monotonic() - started < MAX_SECONDS * max(1.0, os.getloadavg()[0] / 2)
