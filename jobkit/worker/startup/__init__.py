"""What every Python process of a job runs when it starts: this folder is on its PYTHONPATH."""
