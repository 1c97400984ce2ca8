"""Pre-training of a small language model, on a file of documents, or on Python's help texts where there is none.

    python -m jobkit.submit experiments/minimind.yaml --local

train.py is all of the training; it calls the model (model), the data (data) and the sampler (generate). generate.py
also continues prompts with a finished run.
"""
