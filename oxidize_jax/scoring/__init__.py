"""Scoring: log probabilities and embeddings of given tokens, through the paged model."""
