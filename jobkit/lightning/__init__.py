"""Lightning's Trainer under jobkit: `from jobkit.lightning import JobkitCallback`. It trains by the Trainer's own
loop, and never requeues by Lightning's."""

from jobkit.lightning.callback import JobkitCallback as JobkitCallback
