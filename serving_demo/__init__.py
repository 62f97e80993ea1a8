"""A serving demo on fusedops: a Llama-family model with a paged KV cache decodes real prompts."""

from __future__ import annotations

import os
import sys

if "torch" not in sys.modules:
    # OpenMP's threads spin between parallel regions by default, and a spinning thread keeps the
    # core from the one it waits for as soon as anything else runs: a decode step then took 8 times
    # as long (3.2 s against 0.4 s on two cores with a load of 8), and no longer when all was quiet.
    # It is read when torch loads, so it cannot be set later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
