"""A language model in MiniMind's manner, on text in a .jsonl file, or on Python's help texts where there is none.

    python -m jobkit.submit experiments/minimind.yaml --local

train.py is all of the training; what it calls is the model (model), the data (data, documents, tokens, topics) and its
voice (sampling). check.py looks at data and tokenizer before anything is queued. generate.py writes texts from a
finished run, and says how good the model is.

Nothing is imported here: a submission runs check.py, and should not wait for torch.
"""
