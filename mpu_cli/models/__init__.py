"""Loading models: where a model comes from, its small files, and transformers' view of it."""
