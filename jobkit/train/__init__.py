"""The parts of a training step: models over ranks, data, gradients, optimizers, evaluation."""
