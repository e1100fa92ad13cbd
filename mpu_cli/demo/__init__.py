"""The whole protocol on a small model trained on the spot, with nothing downloaded."""
