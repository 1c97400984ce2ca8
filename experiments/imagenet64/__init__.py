"""Class-conditional flow matching on ImageNet 64 x 64, or on handwritten digits where there is no ImageNet.

    python -m jobkit.submit experiments/imagenet64.yaml --local

train.py is all of the training; what it calls is the model (unet), the method (flow, discrete), the data (data, digits)
and FID (fid). check.py looks for what FID needs before anything is queued. sample.py draws images from a finished run,
and says how good they are.

Nothing is imported here: a submission runs check.py, and should not wait for torch.
"""
