"""Inside a rank: from the run directory to the end of the training function."""
