"""Samples: loaders, their order, batches, seeds of a sample. Knows no model, no run and no other rank."""
