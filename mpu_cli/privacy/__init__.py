"""Calibration, accounting and audit of what a publication protects. Nothing here yet; see SECURITY.md."""
