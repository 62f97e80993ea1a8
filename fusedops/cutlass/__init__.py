"""Kernels written in CuTe DSL, CUTLASS's Python interface, driven by the one Epilogue definition.

Modules of this package import the DSL when they are imported themselves; nothing here does.
"""
