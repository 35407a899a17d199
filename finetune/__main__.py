"""Entry point for `python -m finetune` and `accelerate launch -m finetune`."""

from __future__ import annotations

import sys

from finetune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
