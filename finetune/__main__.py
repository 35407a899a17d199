"""`python -m finetune` and `accelerate launch -m finetune`: the same as the `finetune` command."""

from __future__ import annotations

import sys

from finetune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
