"""Build the package with the commit that it is built from, so that run.json can name it.

Everything else about the package stands in setup.cfg.
"""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCommit(build_py):
    """Adds finetune/run/COMMIT, unless the sources are no checkout, or are installed in place."""

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
    answer = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True
    )
    return answer.stdout.strip()


setup(cmdclass={"build_py": BuildWithCommit})
