"""`python -m jobkit VERB`: one small file a verb, whose `add_arguments` says what it takes and `run` does it."""
