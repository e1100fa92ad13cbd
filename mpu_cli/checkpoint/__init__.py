"""Safetensors in and out: streaming, sharded, atomic. Knows nothing of MPU."""
