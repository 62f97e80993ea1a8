"""Compiling kernels and keeping them: the store (compile cache), NVRTC, and prepared launches."""

from __future__ import annotations
