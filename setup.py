"""Build the package with the commit that it is built from, so that run.json can record it.

All other package settings are in setup.cfg.
"""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCommit(build_py):
    """Add finetune/run/COMMIT, except outside a checkout and in an editable install."""

    def run(self) -> None:
        super().run()
        root = Path(__file__).resolve().parent
        if self.editable_mode or not (root / ".git").exists():
            return
        try:
            commit = _git(root, "rev-parse", "HEAD")
            commit += "+changes" if _git(root, "status", "--porcelain", "-uno") else ""
        except (OSError, subprocess.SubprocessError):
            return
        Path(self.build_lib, "finetune", "run", "COMMIT").write_text(commit, encoding="utf-8")


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True
    )
    return result.stdout.strip()


setup(cmdclass={"build_py": BuildWithCommit})
