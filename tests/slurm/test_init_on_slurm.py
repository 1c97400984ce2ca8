"""What a job of Slurm tells its tasks about their ranks."""

from __future__ import annotations

import json
from pathlib import Path

from harness.project import Project, status, wait_for
from slurm_cluster import Cluster


def test_the_rank_family_of_variables_reaches_every_task(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    (project.path / "mytask.py").write_text(
        "import json, os\n"
        "NAMES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR', 'MASTER_PORT')\n"
        "def train(ctx):\n"
        "    import torch, torch.distributed as dist\n"
        "    total = torch.ones(1); dist.all_reduce(total)\n"
        "    seen = {name: os.environ[name] for name in NAMES} | {'total': total.item()}\n"
        "    (ctx.run_dir / f'seen_{ctx.rank}.json').write_text(json.dumps(seen))\n"
    )
    for place, attempt in (("--cluster=slurm", 1), ("--local", 2)):
        project.submit(place, "--fresh")
        run = project.runs[attempt - 1]
        wait_for("the end", lambda: status(run).get("state") in ("finished", "failed"), run)  # noqa: B023
        seen = [json.loads((run / f"seen_{rank}.json").read_text()) for rank in range(4)]
        assert [one["RANK"] for one in seen] == ["0", "1", "2", "3"]
        assert [one["LOCAL_RANK"] for one in seen] == ["0", "1", "0", "1"]
        assert [one["GROUP_RANK"] for one in seen] == ["0", "0", "1", "1"]
        assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["total"]) for one in seen} == {("4", "2", 4.0)}
        assert len({one["MASTER_PORT"] for one in seen}) == 1
