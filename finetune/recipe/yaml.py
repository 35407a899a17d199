"""YAML as recipes need it: safe, strict, and with the place of every value for error messages.

The loader never constructs objects: it walks the node graph. It differs from YAML 1.1 where that
surprises: `1e-3` is a number, `010` and `1:30` and dates are text; anchors, aliases and tags are
refused. The dumper quotes text that this loader or one of YAML 1.1 would read as anything else.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.errors import RecipeError, nearest

__all__ = [
    "Document",
    "Key",
    "Place",
    "Problem",
    "dump",
    "parse_value",
    "read_document",
    "read_text",
]

Key = tuple[str | int, ...]  # the path to a value: ("optim", "lr") or ("claims", 0, "value")

MAX_BYTES = 1_000_000  # far above any recipe: a data file given by mistake is not parsed
MAX_DEPTH = 20  # the deepest key of a recipe is at 4; free arguments may nest a little
MAX_NUMBER_LENGTH = 64

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_BOOL = re.compile(
    r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_KIND_OF_KEY = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing"}


@dataclass(frozen=True)
class Place:
    """The place at which a value was written."""

    where: str  # "recipes/x.yaml:12" or "override 'optim.lr=3'"
    order: float  # the line, so that problems are listed from top to bottom; overrides come last
    text: str | None = None  # as written, for a scalar


class Problem(NamedTuple):
    """One line of the error that a document ends in."""

    order: float  # as of its place
    text: str
    code: str  # as of a RecipeError


@dataclass
class Document:
    """The plain data of a recipe with the place of every value and the problems so far."""

    name: str
    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[Key] = field(default_factory=set)  # values reported already, each of them once

    def place(self, key: Key) -> Place:
        """Find the place of a value or, failing that, of its parent."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.places:
                return self.places[key[:end]]
        return Place(self.name, 0)

    def is_broken(self, key: Key) -> bool:
        """True if a value or one of its parents has been reported already."""
        return any(key[:end] in self.broken for end in range(1, len(key) + 1))

    def report(self, key: Key, problem: str, *, code: str, line: int | None = None) -> None:
        """Add a problem of one value; `line` if it is not the value's own."""
        place = self.place(key) if line is None else Place(f"{self.name}:{line}", line)
        prefix = f"{_dotted(key)}: " if key else ""
        self.problems.append(Problem(place.order, f"{place.where}: {prefix}{problem}", code))

    def raise_first(self) -> None:
        """Raise a RecipeError for the first problem that was reported, if there is one."""
        if self.problems:
            raise RecipeError(self.problems[0].text, code=self.problems[0].code)


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that a recipe may not hold."""


class _Loader(yaml.SafeLoader):
    """Composes nodes only; refuses anchors, aliases and deep nesting before they cost anything."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None):  # an alias has one too: what it refers to
            problem = "anchors and aliases (& and *) are refused; write the value out, or quote it"
            raise _Refused(problem=problem, problem_mark=event.start_mark)
        if self.depth > MAX_DEPTH:
            problem = f"more than {MAX_DEPTH} levels deep; write it with fewer"
            raise _Refused(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes block style; the resolvers below make it quote text that would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's: these alone
for _name, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("yYnNtTfFoO")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def read_text(path: str | Path) -> str:
    """Read a recipe file.

    Returns: its text.
    Raises: RecipeError if it is not a file that can be read as UTF-8 text.
    """
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}…"
    if re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://", name):
        raise RecipeError(
            f"{name}: a recipe is a local file, not a URL; download it first",
            code="recipe.not_a_recipe",
        )
    if not name.strip():
        raise RecipeError(
            f"{name!r}: an empty name; give the file of a recipe", code="recipe.not_a_recipe"
        )
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            files = sorted(Path(path).glob("*.yaml"))
            hint = f", for example {files[0]}" if files else ""
            raise RecipeError(
                f"{name}: a folder, not a recipe; give one file{hint}", code="recipe.not_a_recipe"
            )
        if not stat.S_ISREG(mode):  # opening a pipe may wait for ever
            raise RecipeError(
                f"{name}: a pipe or a device; give the file of a recipe", code="recipe.not_a_recipe"
            )
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        hint = _nearest_file(Path(path))
        raise RecipeError(f"{name}: no such file{hint}", code="recipe.not_found") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RecipeError(
            f"{name!r}: cannot be read: {cause}; check the path", code="recipe.unreadable"
        ) from None
    if len(data) > MAX_BYTES:
        raise RecipeError(
            f"{name}: over {MAX_BYTES:,} bytes; this is not a recipe, give one",
            code="recipe.not_a_recipe",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        cause = f"not UTF-8 text (byte 0x{data[error.start]:02x})"
        raise RecipeError(
            f"{name}:{line}: {cause}; save the file as UTF-8", code="recipe.syntax"
        ) from None


def read_document(text: str, *, name: str) -> Document:
    """Turn YAML text into plain data with places.

    Args:
        name: what to call the file in messages.
    Returns: the document; problems of keys and tags are in it, to be raised with all others.
    Raises: RecipeError if the text is not YAML, is empty or is not a mapping.
    """
    document = Document(name)
    node = _compose(text, name)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"):
        sections = "a recipe needs the sections model, data and optim"
        raise RecipeError(
            f"{name}: empty; {sections}; see: finetune recipes help", code="recipe.not_a_recipe"
        )
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(
            f"{name}:{node.start_mark.line + 1}: expected a mapping with the sections model, data "
            "and optim; see: finetune recipes help",
            code="recipe.not_a_recipe",
        )
    document.tree = _plain(node, (), document)
    if () in document.broken:  # a tag on the whole
        document.raise_first()
    return document


def parse_value(text: str) -> Any:
    """Read the value of an override: a flow list, flow mapping or quoted text, else one scalar.

    Args:
        text: the part after the equals sign. A bare word is taken whole: ` #` and `: ` in a path
            do not end it.
    Raises: RecipeError if a list, mapping or quoted text is not valid YAML.
    """
    text = text.strip()
    if text[:1] not in ("[", "{", '"', "'"):
        tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))
        return _scalar(str(tag), text)
    document = Document("value")
    node = _compose(text, "value")
    value = None if node is None else _plain(node, (), document)
    document.raise_first()
    return value


def dump(data: dict[str, Any]) -> str:
    """Write plain data as YAML that `read_document` reads back equal.

    Args:
        data: dicts, lists, tuples and scalars.
    """
    return yaml.dump(
        _lists(data),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=None,  # blocks, with the innermost lists and mappings on one line
    )


def _compose(text: str, name: str) -> yaml.Node | None:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        if isinstance(error, _Refused):
            raise RecipeError(f"{place}: {error.problem}", code="recipe.syntax") from None
        has_tab = "\\t" in str(error.problem)
        context = f" ({error.context})" if error.context else ""
        hint = "indent with spaces, not tabs" if has_tab else "correct this line"
        raise RecipeError(
            f"{place}: not valid YAML: {error.problem}{context}; {hint}", code="recipe.syntax"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        cause = f"character 0x{int(error.character):02x} is not text"
        raise RecipeError(
            f"{name}:{line}: {cause}; save it as UTF-8", code="recipe.syntax"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


def _plain(node: yaml.Node, key: Key, document: Document) -> Any:
    """Convert a node. A problem is reported to the document, and the value becomes None."""
    kinds: dict[type[yaml.Node], tuple[str, ...]] = {
        yaml.MappingNode: ("map",),
        yaml.SequenceNode: ("seq",),
        yaml.ScalarNode: ("null", "bool", "int", "float", "str"),
    }
    if node.tag.removeprefix(_TAG) not in kinds[type(node)]:
        tag = node.tag.replace(_TAG, "!!")
        problem = f"the tag {tag} is refused; recipes hold plain values only"
        document.report(key, problem, code="recipe.syntax")
        document.broken.add(key)
        return None
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, key, document)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            child = (*key, index)
            document.places[child] = _place(item, item, document)
            items.append(_plain(item, child, document))
        return items
    try:
        return _scalar(node.tag, node.value)
    except ValueError:
        problem = f"{node.value!r} is not what its tag says; remove the tag"
        document.report(key, problem, code="recipe.syntax")
        document.broken.add(key)
        return None


def _mapping(node: yaml.MappingNode, key: Key, document: Document) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        kind = key_node.tag.removeprefix(_TAG)
        if kind != "str" or not isinstance(key_node, yaml.ScalarNode):
            shown = f"'{key_node.value}'" if isinstance(key_node, yaml.ScalarNode) else "this key"
            read_as = _KIND_OF_KEY.get(kind, "a structure")
            problem = f"{shown} is read as {read_as}, not as a key; quote it if it is one"
            document.report(key, problem, code="recipe.syntax", line=line)
            continue
        child = (*key, key_node.value)
        if key_node.value in result:
            first = document.places[child].order
            problem = f"duplicate key, given already on line {first:g}; keep one"
            document.report(child, problem, code="recipe.duplicate_key", line=line)
            continue
        document.places[child] = _place(key_node, value_node, document)
        result[key_node.value] = _plain(value_node, child, document)
    return result


def _place(at: yaml.Node, value: yaml.Node, document: Document) -> Place:
    line = at.start_mark.line + 1
    text = value.value if isinstance(value, yaml.ScalarNode) else None
    return Place(f"{document.name}:{line}", line, text)


def _scalar(tag: str, text: str) -> Any:
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        if text.lower() not in ("yes", "true", "on", "no", "false", "off"):
            raise ValueError(text)
        return text.lower() in ("yes", "true", "on")
    if kind in ("int", "float") and len(text) <= MAX_NUMBER_LENGTH:
        digits = text.replace("_", "").lower()
        if kind == "int":
            return int(digits)
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _lists(value: Any) -> Any:  # YAML has no tuples
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return value


def _dotted(key: Key) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return "".join(parts).removeprefix(".")


def _nearest_file(path: Path) -> str:
    names = [item.name for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    return nearest(path.name, names) or "; see: finetune recipes list"
