"""``python -m serving_demo``: see ``--help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fusedops.errors import FusedOpsError
from serving_demo.options import DEFAULT_PROMPTS, DEVICES, DTYPES, DemoOptions


def _parser() -> argparse.ArgumentParser:
    default = DemoOptions()
    parser = argparse.ArgumentParser(
        prog="python -m serving_demo",
        description="Answer prompts with a Llama-family model on fusedops, beside transformers.",
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="user messages, answered together")
    add("--model", type=Path, help="GGUF file or Hugging Face folder (default: SmolLM2-135M)")
    add("--max-new-tokens", type=int, default=default.max_new_tokens, metavar="N")
    add("--device", default=default.device, help=", ".join(DEVICES))
    add("--dtype", default=default.dtype, help=", ".join(DTYPES))
    add("--no-compare", dest="compare", action="store_false", help="leave transformers out")
    add("--json", dest="json_path", type=Path, metavar="FILE", help="write the report there")
    add("--seed", type=int, default=default.seed, metavar="N")
    add("--temperature", type=float, default=default.temperature, metavar="T", help="0: greedy")
    add("--quiet", action="store_true", help="print errors only")
    return parser


def main(arguments: Sequence[str] | None = None, errors: TextIO | None = None) -> int:
    """Run the demo; returns the exit code: 0, or 2 after one line that says what is wrong."""
    values = vars(_parser().parse_args(arguments))
    quiet = values.pop("quiet")
    values["prompts"] = tuple(values["prompts"]) or DEFAULT_PROMPTS
    try:
        from rich.console import Console

        from serving_demo.run import run_demo

        run_demo(DemoOptions(**values), Console(quiet=quiet))
    except FusedOpsError as error:
        print(f"error: {error}", file=errors or sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
