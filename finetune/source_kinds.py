"""Kinds of data sources: the prefixes `KIND:` of source strings, and what each kind supports.

Recipes, the command line and `finetune/data/open_source.py` all use this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "EMBEDDED_DATASETS",
    "SOURCE_KINDS",
    "SourceKind",
    "kind_from_suffix",
    "split_source",
    "streamable_kinds",
]

EMBEDDED_DATASETS = ("digits", "digit_pairs")


@dataclass(frozen=True)
class SourceKind:
    """A kind of data source.

    Attributes:
        syntax: syntax of the source string, for help and error messages.
        suffix: suffix of a single file of this kind; None if the kind is not a single file.
        is_local: the rest of the source string is a path on this machine.
        accepts_glob: the path may be a glob.
        has_columns: data.image_column and data.label_column apply.
        can_stream: data.streaming applies.
    """

    syntax: str
    suffix: str | None = None
    is_local: bool = True
    accepts_glob: bool = False
    has_columns: bool = True
    can_stream: bool = False


SOURCE_KINDS = {
    "hub": SourceKind("hub:owner/name[@revision][:config]", is_local=False, can_stream=True),
    "parquet": SourceKind("parquet:PATH", ".parquet", accepts_glob=True, can_stream=True),
    "tar": SourceKind("tar:PATTERN", ".tar", accepts_glob=True, can_stream=True),
    "csv": SourceKind("csv:PATH", ".csv"),
    "folder": SourceKind("folder:PATH", has_columns=False),
    "embedded": SourceKind("embedded:digits", is_local=False, has_columns=False),
}


def split_source(source: str) -> tuple[str | None, str]:
    """Split a source string. Returns: (kind, rest), or (None, source) without a known prefix."""
    kind, colon, rest = source.partition(":")
    return (kind, rest) if colon and kind in SOURCE_KINDS else (None, source)


def kind_from_suffix(path: str) -> str | None:
    """Return the kind of a file by its suffix (.csv: "csv"); None for an unknown suffix."""
    suffix = Path(path).suffix.lower()
    return next((name for name, kind in SOURCE_KINDS.items() if kind.suffix == suffix), None)


def streamable_kinds() -> tuple[str, ...]:
    """Return the prefixes of sources that data.streaming supports: "hub:", "parquet:", "tar:"."""
    return tuple(f"{name}:" for name, kind in SOURCE_KINDS.items() if kind.can_stream)
