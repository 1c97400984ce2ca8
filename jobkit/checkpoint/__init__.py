"""Checkpoints: a store that is atomic and verified, the state that goes in, and a writer off the hot path."""
