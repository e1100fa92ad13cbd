"""Privacy of a publication: calibration, accounting and audit."""
