"""Print which packages of finetune import each other, and check the layering.

"data -> hub" means that a module in finetune/data/ imports one in finetune/hub/. `ORDER` in
tests/test_project.py lists the packages from the lowest layer to the highest; a package may import
only packages listed before it. Exits with 1 on import cycles or if an import breaks this rule.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "finetune"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_project import ORDER  # noqa: E402


def collect_imports() -> dict[str, set[str]]:
    """Map each package to the packages that it imports; "data" stands for finetune/data/."""
    targets: dict[str, set[str]] = {name: set() for name in ORDER}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package == "__init__":  # re-exports the public names
            continue
        if package not in targets:
            sys.exit(f"finetune/{package}: is not in ORDER of tests/test_project.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            imported = {name.split(".")[1] for name in names if name.startswith("finetune.")}
            targets[package] |= imported & set(ORDER) - {package}
    return targets


def find_cycle(targets: dict[str, set[str]]) -> list[str]:
    """Return the packages that are part of an import cycle, or that import one."""
    left = set(targets)
    while done := {package for package in left if not targets[package] & left}:
        left -= done
    return sorted(left, key=ORDER.index)


def main() -> int:
    """Print the report. Returns the exit code."""
    targets = collect_imports()
    packages = [name for name in ORDER if (PACKAGE / name).is_dir()]
    print(f"{len(packages)} packages:", *packages)
    print("single modules:", *(name for name in ORDER if name not in packages))
    print(f"{sum(map(len, targets.values()))} imports between packages:")
    for name in ORDER:
        print(f"  {name} ->", *sorted(targets[name], key=ORDER.index))
    cycle = find_cycle(targets)
    higher = [
        f"{name} -> {target}"
        for name in ORDER
        for target in sorted(targets[name], key=ORDER.index)
        if ORDER.index(target) > ORDER.index(name)
    ]
    print("cycle:", *(cycle or ["none"]))
    print("imports of a higher layer:", *(higher or ["none"]))
    return 1 if cycle or higher else 0


if __name__ == "__main__":
    sys.exit(main())
