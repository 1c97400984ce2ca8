"""Building blocks for training functions. Each one is usable without the others, and without jobkit's loop."""
