"""Signals during the commit of a push: the first lets it finish, the second abandons it.

tests/faults/test_stop_push.py sends them to a process of its own at any time of a push;
test_train_and_push.py sends one before the commit.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hub_fixtures import folder, hub, send_signals_after, sleep_durations
from hub_server import HubServer

from finetune.cli import main as cli

__all__ = ["folder", "hub", "sleep_durations"]  # fixtures


@pytest.mark.parametrize(
    "kind, signals, expected",
    [
        ("slow", [signal.SIGTERM], "the hub holds the whole commit COMMIT"),
        (
            "hang",
            [signal.SIGINT, signal.SIGINT],
            "during the commit: the hub holds the whole commit or nothing of it",
        ),
    ],
    ids=["SIGTERM", "SIGINT twice"],
)
def test_signals_during_the_commit(
    kind: str,
    signals: list[signal.Signals],
    expected: str,
    hub: HubServer,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hub.fail("/commit/", kind=kind, times=None)
    with send_signals_after(hub, "/commit/", signals):
        code = cli.main(["push", str(folder), "alice/net"])
    shown = capfd.readouterr().err
    assert code == 128 + signals[0]
    assert "Traceback" not in shown
    commit, *earlier = hub.commits("alice/net")
    assert len(earlier) == (kind == "slow")
    assert expected.replace("COMMIT", commit) in shown
