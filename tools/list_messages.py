"""Compare docs/messages.md, the list of all messages of finetune/, with the source.

Print a diff and exit with 1 if the page is stale; --write updates it. The page has no line
numbers, so moving code does not change it.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "finetune"
PAGE = ROOT / "docs" / "messages.md"
HEADER = """\
# Messages

Errors, log messages and command-line help of finetune, by module. An error starts with its code or
class, a log message with its level. A text that is part of a message starts with the name of its
variable or function. `{...}` is a value. `python tools/list_messages.py --write` writes this page.
"""
ERROR = re.compile(r"(\w+\.)?((?!Pydantic)\w+Error|Interrupted|\w+_error|fail)")
LOG_CALL = re.compile(r"logger\.(info|warning|error|log)|warn_once")
COMMAND = re.compile(r"(\w+\.)?(command|group)")
# variables with texts of messages, some of which another module logs or raises
TEXT_VARIABLES = {"advice", "cause", "hint", "message", "problem", "problems", "reason", "warnings"}


def render(node: ast.AST) -> str:
    """Return a message's text, with {expression} for each value."""
    match node:
        case ast.Constant(value=str(text)):
            return text.replace("\n", "\\n")
        case ast.JoinedStr(values=parts):
            return "".join(map(render, parts))
        case ast.BinOp(op=ast.Add()):
            return render(node.left) + render(node.right)
        case ast.FormattedValue():
            conversion = f"!{chr(node.conversion)}" if node.conversion >= 0 else ""
            format_spec = f":{render(node.format_spec)}" if node.format_spec else ""
            return render(ast.Name(ast.unparse(node.value) + conversion + format_spec))
    # Python versions differ in the quotes of nested f-strings and in "for (a, b) in"
    expression = re.sub(r"\bfor \(([\w, ]+)\) in\b", r"for \1 in", ast.unparse(node))
    return "{" + expression.replace('"', "'") + "}"


def has_words(node: ast.AST) -> bool:
    """Return True if a string in the expression has two words."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(re.search(r"[A-Za-z]+,? [a-z]{2,}", str(constant)) for constant in constants)


def find_message(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return the label and the text if this call is a message or this function a command."""
    for decorator in getattr(node, "decorator_list", []):
        if isinstance(decorator, ast.Call) and COMMAND.fullmatch(ast.unparse(decorator.func)):
            name = render(decorator.args[0]) if decorator.args else node.name
            docstring = " ".join((ast.get_docstring(node) or "").split())
            return f"help of {name}", ast.Constant(docstring)
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = ast.unparse(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if LOG_CALL.fullmatch(name):
        return name.removeprefix("logger.").replace("warn_once", "warning"), node.args[-1]
    text = next(filter(has_words, node.args), None)
    if ERROR.fullmatch(name) and (text or not name.endswith("_error")):
        return render(keywords.get("code", ast.Constant(name))), text or node.args[0]
    return (f"help of {render(node.args[0])}", keywords["help"]) if "help" in keywords else None


def find_texts(tree: ast.Module, names: set[str]) -> dict[ast.AST, tuple[str, ast.AST]]:
    """Find what these variables are assigned or appended, and these functions return."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=text)
                | ast.AugAssign(target=ast.Name(id=name), value=text)
                | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[text])
            ):
                found[node] = name, text
            case ast.FunctionDef(name=name):
                returns = [part for part in ast.walk(node) if isinstance(part, ast.Return)]
                found |= {part: (name, part.value) for part in returns if part.value}
    return {node: text for node, text in found.items() if text[0] in names and has_words(text[1])}


def build_page() -> str:
    """Return the page as Markdown."""
    page = HEADER
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        messages = {node: message for node in ast.walk(tree) if (message := find_message(node))}
        parts = [part for _, text in messages.values() for part in ast.walk(text)]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        found = find_texts(tree, names | TEXT_VARIABLES) | messages
        if found:
            page += f"\n## {path.relative_to(PACKAGE).as_posix()}\n\n"
        for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
            page += f"    {found[node][0]}: {render(found[node][1])}\n"
    return page


def main() -> int:
    """Compare or write the page. Returns the exit code."""
    page = build_page()
    if "--write" in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
    lines = [text.splitlines(keepends=True) for text in (PAGE.read_text(encoding="utf-8"), page)]
    sys.stdout.writelines(difflib.unified_diff(*lines, "docs/messages.md", "the source", n=0))
    return int(lines[0] != lines[1])


if __name__ == "__main__":
    sys.exit(main())
