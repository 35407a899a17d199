"""Licences: those of the hub as they are, others by name."""

from __future__ import annotations

import pytest

from finetune.publish.model_card import licence_keys


@pytest.mark.parametrize(
    "licence,keys",
    [
        ("apache-2.0", {"license": "apache-2.0"}),
        ("other", {"license": "other"}),
        ("dinov3-license", {"license": "other", "license_name": "dinov3-license"}),
        ("Not For Sale!", {"license": "other", "license_name": "not-for-sale"}),
        ("!", {"license": "other", "license_name": "unknown"}),
        (None, {}),
        ("", {}),
    ],
)
def test_what_a_card_says(licence: str | None, keys: dict[str, str]) -> None:
    assert licence_keys(licence) == keys
