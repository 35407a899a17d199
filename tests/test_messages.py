"""docs/messages.md, the reviewed list of all messages of finetune/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_list_of_messages_is_up_to_date(repository: Path) -> None:
    command = [sys.executable, str(repository / "tools" / "list_messages.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.returncode, (
        f"docs/messages.md is stale; run: python tools/list_messages.py --write\n"
        f"{done.stdout}{done.stderr}"
    )
