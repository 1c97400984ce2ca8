"""Experiments: a YAML and the training function it names. User code: what jobkit asks a person to write."""
