"""`python -m jobkit VERB`: one small file a verb."""
