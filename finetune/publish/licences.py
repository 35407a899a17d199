"""Licences, as the hub's cards name them."""

from __future__ import annotations

import re

__all__ = ["licence_keys"]

_LICENCES = (  # what the hub knows: it refuses a card with any other
    "apache-2.0 mit bsd-2-clause bsd-3-clause cc0-1.0 cc-by-4.0 cc-by-nc-4.0 cc-by-sa-4.0 "
    "cc-by-nc-sa-4.0 gpl-3.0 agpl-3.0 openrail gemma apple-amlr unknown other"
)


def licence_keys(licence: object) -> dict[str, str]:
    """What the head of a card says of a licence; one that the hub does not know is named."""
    if not licence or str(licence) in _LICENCES.split():
        return {"license": str(licence)} if licence else {}
    name = re.sub(r"[^a-z0-9.]+", "-", str(licence).lower()).strip("-.")
    return {"license": "other", "license_name": name or "unknown"}
