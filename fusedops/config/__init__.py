"""Tile configurations: loading them by name, which are legal, and which one a problem gets."""

from __future__ import annotations

from fusedops.config.decode import (
    DecodeConfig,
    DecodeTile,
    choose_decode,
    decode_tiles,
    m_bucket,
)
from fusedops.config.files import DECODE_BUCKETS, NamedTile, tuned_choices, tuning_key
from fusedops.config.prefill import PrefillConfig, PrefillTile, choose_prefill, prefill_tiles

__all__ = [
    "DECODE_BUCKETS",
    "DecodeConfig",
    "DecodeTile",
    "NamedTile",
    "PrefillConfig",
    "PrefillTile",
    "choose_decode",
    "choose_prefill",
    "decode_tiles",
    "m_bucket",
    "prefill_tiles",
    "tuned_choices",
    "tuning_key",
]
