"""Secret, function-preserving changes of coordinates: drawing, applying and inverting them."""
