"""In the job, around the ranks: start them, watch them, end them, decide what comes next. Never imports torch."""
