"""`jobkit verify`: a run that was interrupted equals the run that was not. It runs by the production path, and changes
no run but its own."""
