"""What processes say to each other: messages, pages in shared memory, signals, groups of ranks. No decisions."""
