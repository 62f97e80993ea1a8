"""Ladders: one kernel an idea at a time, each step run, measured and explained on this GPU.

A ladder is a module of this package with a ``LADDER``; ``steps.json`` lists the steps of all that
are specified, built or not. The kernels are in ``csrc/ladders``.
"""

from __future__ import annotations

from fusedops.ladders.catalog import built, load_ladder, specified

__all__ = ["built", "load_ladder", "specified"]
