"""Bytes in, launches out: one module a kind of device, each loading binaries and calling their kernels."""
