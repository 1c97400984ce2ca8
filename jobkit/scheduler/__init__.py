"""What a scheduler says about a job. Used on both sides: by the submitting one and from inside the job."""
