"""One page about one or several runs: what they logged, how their time went, what they are made of. No torch."""
