"""Tests with packages that jobkit does without: Hugging Face's and Lightning. `tools/test integrations` runs them."""
