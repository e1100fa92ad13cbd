"""What each model family looks like: its tensors, what their axes mean, the symmetries they allow."""
