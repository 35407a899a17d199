"""A recipe: from YAML to a frozen, checked object; no torch here."""
