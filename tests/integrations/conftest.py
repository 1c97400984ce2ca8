"""Tests with packages that jobkit does without: Hugging Face's, Lightning, W&B, MLflow. `tools/test integrations`."""
