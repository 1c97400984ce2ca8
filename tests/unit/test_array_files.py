"""What arrays a file holds is read from its headers, without torch, as its own library would say it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.imports import HEAVY
from safetensors.torch import save_file
from torch import nn

from jobkit.run.array_files import shapes_in

ROOT = Path(__file__).parents[2]
NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
STATE = NET.state_dict()
SHAPES = {name: tuple(tensor.shape) for name, tensor in STATE.items()}
ARRAYS = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}


def before_1_6(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[Path], object]] = {
    "torch.save": lambda path: torch.save(STATE, path),
    "torch.save before 1.6": lambda path: before_1_6(STATE, path),
    "safetensors": lambda path: save_file(STATE, path, metadata={"format": "pt"}),
    "numpy.savez": lambda path: np.savez(path.open("wb"), **ARRAYS),
    "numpy.savez_compressed": lambda path: np.savez_compressed(path.open("wb"), **ARRAYS),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_shapes_are_those_that_were_written_and_a_file_of_one_byte_less_is_torn(writer: str, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    WRITERS[writer](file)
    assert shapes_in(file) == SHAPES
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"^{file}: torn: "):
        shapes_in(file)


@pytest.mark.parametrize("save", [torch.save, before_1_6], ids=["zip", "before 1.6"])
def test_arrays_in_mappings_are_named_by_their_keys_and_all_else_is_left_out(
    save: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "checkpoint.pt"
    weights = {
        "half": torch.zeros(2, 3).bfloat16(),
        "own": nn.Parameter(torch.zeros(5)),
        "8 bits": torch.ones(7).byte(),
    }
    others = {"epoch": 3, "path": Path("x"), "set": {1}, "type": torch.float32, "device": torch.device("cpu")}
    save({"model": weights, "optimizer": {"state": {0: {"step": torch.tensor(1)}}}, **others}, file)
    expected = {"model.half": (2, 3), "model.own": (5,), "model.8 bits": (7,), "optimizer.state.0.step": ()}
    assert shapes_in(file) == expected


def test_what_holds_no_arrays_by_name_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content, says in [
        (NET, "a Sequential in it, expected arrays by name, as of a state_dict()"),
        ([torch.zeros(3)], "a list in it"),
        (torch.zeros(3), "one array in it"),
        ({"epoch": 3}, "no arrays by name in it"),
    ]:
        for save in (torch.save, before_1_6):
            save(content, file)
            with pytest.raises(ValueError, match=re.escape(f"{file}: {says}")):
                shapes_in(file)
    torch.jit.script(NET).save(file)
    with pytest.raises(ValueError, match="a program of TorchScript, no weights"):
        shapes_in(file)
    for text in ("", "<!DOCTYPE html>", "version https://git-lfs.github.com/spec/v1"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"no file of safetensors, numpy.savez or torch.save"):
            shapes_in(file)
    with pytest.raises(FileNotFoundError):
        shapes_in(tmp_path / "nowhere")


def test_nothing_that_a_file_names_is_imported_or_called(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "called",)

    torch.save({"a": torch.zeros(2), "b": Evil()}, tmp_path / "file")
    assert shapes_in(tmp_path / "file") == {"a": (2,)}
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("recipe", ["imagenet64", "minimind", "cogvideo"])
def test_what_a_recipe_looks_at_before_anything_is_queued_imports_nothing_heavy(recipe: str) -> None:
    program = f"import sys, experiments.{recipe}.check; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
