"""CogVideoX's text-to-video diffusion on latents, or on moving handwritten digits where there are none.

    videos --encode--> latents, texts --train--> weights --sample--> latents --codec--> clips

    python -m jobkit.submit experiments/cogvideo.yaml --local

train.py is all of the training; it calls the model (transformer; published: weights to start from), the method
(diffusion), the data (data) and the way back to frames (codec). sample.py makes clips with a finished run.
"""
