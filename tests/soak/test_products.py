"""More products of three axes than tests/ranks/test_parallel.py has: 20 s of CPU each, for eight ranks."""

from __future__ import annotations

from pathlib import Path

from ranks.test_parallel import check_products


def test_the_other_products_on_eight_ranks_train_as_one_process_does_and_resume(tmp_path: Path) -> None:
    cases = {
        "ddp x tensor x pipeline": ({"tensor": 2, "pipeline": 2}, {"tensor": 2}),
        "hsdp x tensor": ({"data": "hsdp", "shards": 2, "tensor": 2}, {"tensor": 2}),
    }
    check_products(cases, tmp_path)
