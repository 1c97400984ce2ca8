"""Class-conditional flow matching on ImageNet 64 x 64, or on handwritten digits where there is no ImageNet.

    python -m jobkit.submit experiments/imagenet64.yaml --local

train.py is all of the training; it calls the model (unet), the method (flow) and the data (data, digits).
"""
