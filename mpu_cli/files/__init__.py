"""Reading and writing files, the other party's above all: boundary, checkpoints, sealing, manifests;
randomness for what is secret in them."""
