"""Calibration, accounting and audit of what a publication protects."""
