"""The data owner's side: data, losses, optimisers, training, and the delta that is sent back."""
