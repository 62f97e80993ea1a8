"""``python -m fusedops``: the command line without an installed entry point."""

from __future__ import annotations

import sys

from fusedops.cli import main

if __name__ == "__main__":
    sys.exit(main())
