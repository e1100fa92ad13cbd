"""Measuring what a model knows: scores, generation, metrics, benchmarks, verdicts and receipts."""
