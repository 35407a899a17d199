"""Recipes: schema, YAML loading, validation and help; no torch here."""
