"""Inside the job: process group, notices, the context and its loop."""
