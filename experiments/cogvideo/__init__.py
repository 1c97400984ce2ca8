"""CogVideoX's text-to-video diffusion on latents, or on moving handwritten digits where there are none.

    python -m jobkit.submit experiments/cogvideo.yaml --local

train.py is all of the training; what it calls is the model (transformer; published: weights to start from), the method
(diffusion), the data (clips, digits) and what is looked at (decoder, show). check.py looks for what decoding needs
before anything is queued. sample.py makes clips from a finished run.

Nothing is imported here: a submission runs check.py, and should not wait for torch.
"""
