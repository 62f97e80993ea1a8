"""The README's tables are what the committed reports say, and its Python examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_tables_come_from_the_reports() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "readme.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_python_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
