"""Safe, strict YAML for recipes, with the location of every value for error messages.

The loader converts the YAML node graph to plain data and never constructs other objects. It differs
from YAML 1.1 where that is surprising: `1e-3` is a number; `010`, `1:30` and dates are text;
anchors, aliases and tags are errors. The dumper quotes text that this loader or a YAML 1.1 loader
would read as another type.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.errors import RecipeError
from finetune.recipe.paths import suggest_path

__all__ = [
    "KeyPath",
    "Problem",
    "SourceLocation",
    "YamlDocument",
    "dump_yaml",
    "parse_document",
    "parse_value",
    "read_recipe_text",
]

KeyPath = tuple[str | int, ...]  # the path to a value: ("optim", "lr") or ("claims", 0, "value")

MAX_BYTES = 1_000_000  # far above any recipe; rejects data files given by mistake
MAX_DEPTH = 20  # the deepest recipe key is at level 4; model.args may nest deeper
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
_KEY_TYPE_NAMES = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing"}


@dataclass(frozen=True)
class SourceLocation:
    """Where a value was written: a line of a file, or an override."""

    label: str  # "recipes/x.yaml:12" or "override 'optim.lr=3'"
    sort_key: float  # line number, to sort problems; infinity for overrides
    raw_text: str | None = None  # text of a scalar as written; None for lists and mappings


class Problem(NamedTuple):
    """One line of the final error message of a document."""

    sort_key: float  # sort_key of its SourceLocation
    text: str
    code: str  # error code of a RecipeError


@dataclass
class YamlDocument:
    """Plain data of a recipe, with the location of every value and the problems found so far."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, SourceLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    reported_keys: set[KeyPath] = field(default_factory=set)  # to report each value only once

    def location_of(self, key: KeyPath) -> SourceLocation:
        """Return the location of a value, or of its nearest parent that has one."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.locations:
                return self.locations[key[:end]]
        return SourceLocation(self.name, 0)

    def is_reported(self, key: KeyPath) -> bool:
        """True if a problem of a value or one of its parents was already reported."""
        return any(key[:end] in self.reported_keys for end in range(1, len(key) + 1))

    def add_problem(
        self, key: KeyPath, problem: str, *, code: str, line: int | None = None
    ) -> None:
        """Add a problem of the value at `key`; if `line` is given, report it as the location."""
        location = (
            self.location_of(key) if line is None else SourceLocation(f"{self.name}:{line}", line)
        )
        prefix = f"{_format_key_path(key)}: " if key else ""
        self.problems.append(
            Problem(location.sort_key, f"{location.label}: {prefix}{problem}", code)
        )

    def raise_first_problem(self) -> None:
        """Raise a RecipeError for the first problem, if any."""
        if self.problems:
            raise RecipeError(self.problems[0].text, code=self.problems[0].code)


class _UnsupportedYamlError(yaml.MarkedYAMLError):
    """Valid YAML that recipes do not allow."""


class _Loader(yaml.SafeLoader):
    """Loader that composes nodes, but no objects; rejects anchors, aliases and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None):  # also set for aliases
            problem = (
                "anchors and aliases (& and *) are not allowed; write the value out or quote it"
            )
            raise _UnsupportedYamlError(problem=problem, problem_mark=event.start_mark)
        if self.depth > MAX_DEPTH:
            problem = f"more than {MAX_DEPTH} levels deep; write it with fewer levels"
            raise _UnsupportedYamlError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Dumper without aliases; quotes text that the resolvers below would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}  # drop the resolvers of YAML 1.1
for _name, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("yYnNtTfFoO")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)


def read_recipe_text(path: str | Path) -> str:
    """Read the text of a recipe file.

    Raises: RecipeError if the path is not a readable UTF-8 file.
    """
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}…"
    if re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://", name):
        raise RecipeError(
            f"{name}: a recipe is a local file, not a URL; download it, or for images in "
            f"a tar file write tar:{name}",
            code="recipe.not_a_recipe",
        )
    if not name.strip():
        raise RecipeError(f"{name!r}: empty path; give a recipe file", code="recipe.not_a_recipe")
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            files = sorted(Path(path).glob("*.yaml"))
            hint = f", for example {files[0]}" if files else ""
            raise RecipeError(
                f"{name}: a folder, not a recipe; give one file{hint}", code="recipe.not_a_recipe"
            )
        if not stat.S_ISREG(mode):  # opening a pipe could block
            raise RecipeError(
                f"{name}: a pipe or device, not a regular file; give a recipe file",
                code="recipe.not_a_recipe",
            )
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        hint = suggest_path(str(path), suffixes=(".yaml", ".yml"))
        hint = hint or "; see: finetune recipes list"
        raise RecipeError(f"{name}: no such file{hint}", code="recipe.not_found") from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RecipeError(
            f"{name!r}: cannot read the file: {cause}; check the path", code="recipe.unreadable"
        ) from None
    if len(data) > MAX_BYTES:
        raise RecipeError(
            f"{name}: larger than {MAX_BYTES:,} bytes, so not a recipe; give a recipe file",
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


def parse_document(text: str, *, name: str) -> YamlDocument:
    """Parse YAML text into plain data with locations.

    Args:
        text: the YAML text.
        name: name of the file in error messages.
    Returns: the document. Invalid keys and tags are collected in its `problems`, so that
        `validate_document` can raise all problems together.
    Raises: RecipeError if the text is empty, not valid YAML or not a mapping.
    """
    document = YamlDocument(name)
    node = _parse_node(text, name)
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
    document.data = _to_plain_data(node, (), document)
    if () in document.reported_keys:  # the whole document has a tag
        document.raise_first_problem()
    return document


def parse_value(text: str) -> Any:
    """Parse the value of an override: a flow list, flow mapping, quoted text or scalar.

    Args:
        text: the text after the equals sign. Unlike in a YAML file, an unquoted scalar may contain
            ` #` and `: `, for example in a path.
    Raises: RecipeError if a list, mapping or quoted text is not valid YAML.
    """
    text = text.strip()
    if text[:1] not in ("[", "{", '"', "'"):
        tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))
        return _parse_scalar(str(tag), text)
    document = YamlDocument("value")
    node = _parse_node(text, "value")
    value = None if node is None else _to_plain_data(node, (), document)
    document.raise_first_problem()
    return value


def dump_yaml(data: dict[str, Any]) -> str:
    """Format plain data as YAML that `parse_document` reads back unchanged.

    Args:
        data: nested dicts, lists, tuples and scalars; tuples become lists.
    """
    return yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=None,  # block style, with innermost lists and mappings on one line
    )


def _parse_node(text: str, name: str) -> yaml.Node | None:
    try:
        return _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{name}:{mark.line + 1}" if mark else name
        if isinstance(error, _UnsupportedYamlError):
            raise RecipeError(f"{location}: {error.problem}", code="recipe.syntax") from None
        has_tab = "\\t" in str(error.problem)
        context = f" ({error.context})" if error.context else ""
        hint = "indent with spaces, not tabs" if has_tab else "correct this line"
        raise RecipeError(
            f"{location}: not valid YAML: {error.problem}{context}; {hint}", code="recipe.syntax"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        cause = f"character 0x{int(error.character):02x} is not text"
        raise RecipeError(
            f"{name}:{line}: {cause}; save the file as UTF-8", code="recipe.syntax"
        ) from None


def _to_plain_data(node: yaml.Node, key: KeyPath, document: YamlDocument) -> Any:
    """Convert a node to plain data; if it is invalid, add a problem and return None."""
    kinds: dict[type[yaml.Node], tuple[str, ...]] = {
        yaml.MappingNode: ("map",),
        yaml.SequenceNode: ("seq",),
        yaml.ScalarNode: ("null", "bool", "int", "float", "str"),
    }
    if node.tag.removeprefix(_TAG) not in kinds[type(node)]:
        tag = node.tag.replace(_TAG, "!!")
        problem = f"the tag {tag} is not allowed; write a plain value"
        document.add_problem(key, problem, code="recipe.syntax")
        document.reported_keys.add(key)
        return None
    if isinstance(node, yaml.MappingNode):
        return _mapping_to_dict(node, key, document)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            child = (*key, index)
            document.locations[child] = _location_of_node(item, item, document)
            items.append(_to_plain_data(item, child, document))
        return items
    try:
        return _parse_scalar(node.tag, node.value)
    except ValueError:
        problem = f"{node.value!r} does not match its tag; remove the tag"
        document.add_problem(key, problem, code="recipe.syntax")
        document.reported_keys.add(key)
        return None


def _mapping_to_dict(
    node: yaml.MappingNode, key: KeyPath, document: YamlDocument
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        kind = key_node.tag.removeprefix(_TAG)
        if kind != "str" or not isinstance(key_node, yaml.ScalarNode):
            key_text = (
                f"'{key_node.value}'" if isinstance(key_node, yaml.ScalarNode) else "this key"
            )
            type_name = _KEY_TYPE_NAMES.get(kind, "a structure")
            problem = (
                f"YAML reads {key_text} as {type_name}, not as text; quote it to use it as a key"
            )
            document.add_problem(key, problem, code="recipe.syntax", line=line)
            continue
        child = (*key, key_node.value)
        if key_node.value in result:
            first_line = document.locations[child].sort_key
            problem = f"duplicate key, first given on line {first_line:g}; keep one"
            document.add_problem(child, problem, code="recipe.duplicate_key", line=line)
            continue
        document.locations[child] = _location_of_node(key_node, value_node, document)
        result[key_node.value] = _to_plain_data(value_node, child, document)
    return result


def _location_of_node(at: yaml.Node, value: yaml.Node, document: YamlDocument) -> SourceLocation:
    line = at.start_mark.line + 1
    text = value.value if isinstance(value, yaml.ScalarNode) else None
    return SourceLocation(f"{document.name}:{line}", line, text)


def _parse_scalar(tag: str, text: str) -> Any:
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


def _format_key_path(key: KeyPath) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return "".join(parts).removeprefix(".")
