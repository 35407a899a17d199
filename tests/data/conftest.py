"""Fixtures of the tests of data."""

from __future__ import annotations

import pytest

from finetune.data import notices


@pytest.fixture(autouse=True)
def fresh_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices are logged once per process: each test starts anew."""
    monkeypatch.setattr(notices, "_logged", set())
