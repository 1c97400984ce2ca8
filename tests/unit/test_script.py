"""The arguments of jobkit.init, and a YAML beside them."""

from __future__ import annotations

from pathlib import Path

from jobkit.run.load import load
from jobkit.worker import script
from jobkit.worker.launcher import Topology


def test_arguments_of_init_win_over_its_yaml(tmp_path: Path) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("name: mine\nseed: 5\nparams: {lr: 1, kept: 2}\ncheckpoint: {every: 7}\n")
    values = script._values({"lr": 0.5, "out": Path("out"), "local_rank": 0, "text": "a: [b"}, Topology())
    for seed, expected in ((0, 5), (3, 3), (None, None)):
        config = load(yaml, script._words("other", values, seed), ["python", "x.py"]).config
        assert (config.name, config.seed, config.checkpoint.every) == ("other", expected, 7)
        assert config.params == {"lr": 0.5, "kept": 2, "out": "out", "text": "a: [b"}
