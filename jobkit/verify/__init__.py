"""`jobkit verify`: a run that was interrupted equals the run that was not."""
