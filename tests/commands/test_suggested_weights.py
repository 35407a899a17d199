"""The hint at better weights on the Hub."""

from __future__ import annotations

import re
import time

import pytest
import timm
import torch
from hub_fixtures import hub, sleep_durations
from hub_server import HubServer

from finetune.commands import suggested_weights
from finetune.commands.suggested_weights import is_on_hub, suggest_weights

__all__ = ["hub", "sleep_durations"]  # fixtures

SUGGESTIONS = sorted(  # tests need the same order in every process
    {
        suggest_weights(side, torch.device(device))
        for side in (32, 200)
        for device in ("cpu", "cuda")
    },
    key=lambda weights: weights.name,
)
SUGGESTION = suggest_weights(200, torch.device("cpu"))


@pytest.mark.parametrize("weights", SUGGESTIONS, ids=lambda weights: weights.name)
def test_timm_has_the_weights_with_the_stated_size(
    weights: suggested_weights.SuggestedWeights,
) -> None:
    with torch.device("meta"):
        network = timm.create_model(weights.name, num_classes=0)
    num_bytes = 4 * sum(parameter.numel() for parameter in network.parameters())
    assert num_bytes / 1e6 == pytest.approx(weights.megabytes, rel=0.1)
    assert timm.get_pretrained_cfg(weights.name).hf_hub_id.startswith("timm/")


def test_asks_the_hub_once_and_downloads_nothing(hub: HubServer) -> None:
    assert not is_on_hub(SUGGESTION)  # this hub has no such repository
    assert hub.count(re.escape(SUGGESTION.name)) == 1
    hub.add_repo(f"timm/{SUGGESTION.name}")
    assert is_on_hub(SUGGESTION)
    assert hub.count("/resolve/") == 0


def test_a_hub_that_does_not_answer_costs_two_seconds_at_most(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suggested_weights, "TIMEOUT_SECONDS", 0.2)
    hub.fail("/api/models", kind="hang")
    started = time.perf_counter()
    assert not is_on_hub(SUGGESTION)
    assert time.perf_counter() - started < 2


def test_offline_no_request_is_sent(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggested_weights, "is_offline_mode", lambda: True)
    assert not is_on_hub(SUGGESTION)
    assert hub.count(".") == 0
