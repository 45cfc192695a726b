"""Anchor of the device code: its sub-packages are the folders of the top-level `kernels/` (see pyproject.toml)."""
