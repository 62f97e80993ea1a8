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
from fusedops.config.mixed_prefill import (
    MixedPrefillTile,
    choose_mixed_prefill,
    mixed_prefill_tiles,
)
from fusedops.config.mixed_tiles import MixedTile, choose_mixed, mixed_tiles
from fusedops.config.prefill import PrefillConfig, PrefillTile, choose_prefill, prefill_tiles

__all__ = [
    "DECODE_BUCKETS",
    "DecodeConfig",
    "DecodeTile",
    "MixedPrefillTile",
    "MixedTile",
    "NamedTile",
    "PrefillConfig",
    "PrefillTile",
    "choose_decode",
    "choose_mixed",
    "choose_mixed_prefill",
    "choose_prefill",
    "decode_tiles",
    "m_bucket",
    "mixed_prefill_tiles",
    "mixed_tiles",
    "prefill_tiles",
    "tuned_choices",
    "tuning_key",
]
