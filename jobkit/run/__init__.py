"""A run on disk: its configuration, identity, directory and journal. Standard library, OmegaConf and filelock only."""
