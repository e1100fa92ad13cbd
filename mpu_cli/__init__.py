"""MPU: privacy-preserving knowledge unlearning between a model owner and a data owner (arXiv 2602.23798)."""

__version__ = "0.1.0"
