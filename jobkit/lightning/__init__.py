"""Lightning's Trainer under jobkit: `from jobkit.lightning import JobkitCallback`."""

from jobkit.lightning.callback import JobkitCallback as JobkitCallback
