"""`python -m tdx`: the same as the `tdx` command."""

from __future__ import annotations

import sys

from tdx.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
