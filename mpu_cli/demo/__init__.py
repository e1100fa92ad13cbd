"""The whole protocol on a small model made on the spot, with nothing downloaded."""
