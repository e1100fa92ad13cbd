"""The client's side: records, losses, optimisers, training, and the delta that is sent back."""
