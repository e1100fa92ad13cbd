"""Streaming, sharded, atomic reading and writing of safetensors. Knows nothing about MPU."""
