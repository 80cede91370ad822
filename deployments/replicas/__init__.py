"""Replicas of the encoder, the generator and the ranker: their versions, batches and engine threads."""
