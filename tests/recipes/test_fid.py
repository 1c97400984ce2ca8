"""FID of imagenet64: the libraries' arithmetic, each sample drawn once, the training images' features kept once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from harness.experiment_folder import Folder
from harness.project import causes, logged_steps, status, weights
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from experiments.imagenet64 import check as imagenet64_check
from experiments.imagenet64.check import INCEPTION, check
from experiments.imagenet64.data import Part, PngImages, open_images, split, write_png
from experiments.imagenet64.fid import Fid, Gaussian, Inception, features_of, hash_of, read, sums_of, write
from experiments.imagenet64.scores import frechet_distance
from experiments.imagenet64.train import withheld
from jobkit.errors import InvalidValue, UsageError
from jobkit.run.experiment import load
from jobkit.run.files import read_fresh

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "experiments" / "imagenet64.yaml"
SAMPLING = ROOT / "experiments" / "imagenet64_sample.yaml"
CPU = torch.device("cpu")

STAND_IN = """
import collections, os, signal, time
from pathlib import Path

import torch
from torch import nn

from experiments.imagenet64 import sample as sampling
from experiments.imagenet64 import train as training

done = collections.Counter()


def note(what, line, count=None):
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(f"{what} {line}\\n")
    count = count or what
    done[count] += 1
    stop, stopped = os.environ["STOP"], Path(os.environ["NOTES"] + ".stopped")
    if os.environ["RANK"] != "0":
        while stop.rpartition(" ")[0] == count and not stopped.exists():  # until the first rank has had its part
            time.sleep(0.02)
    elif stop == f"{count} {done[count]}":
        os.kill(os.getpid(), signal.SIGTERM)
        stopped.touch()


class StandIn(nn.Module):
    \"\"\"Takes the place of Inception: 16 features of pixels, the same in every process.\"\"\"

    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weight", torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, images):
        note("seen", len(images))
        return torch.relu(images.flatten(1).float() @ self.weight / 255)


def noted(ctx, *arguments, draws=training.draws):
    function = draws(ctx, *arguments)

    def noting(labels, ids):
        images = function(labels, ids)
        note("drawn", f"{ctx.step}: {' '.join(map(str, ids.tolist()))}", count=f"drawn at {ctx.step}")
        return images

    return noting


training.draws = sampling.draws = noted


def train(ctx):
    return training.train(ctx, StandIn)


def sample(ctx):
    return sampling.sample(ctx, StandIn)
"""

TRAINING = (
    "params={steps: 6, batch: 600, micro_batch: 300, held_out: 30, validate_every: 100, validate_batch: 30, "
    "fid_every: 1, fid_samples: 45, fid_batch: 8, solver: euler, solver_steps: 2, "
    "unet: {width: 8, multipliers: [1, 2], blocks: 1, attention: [2], head: 8, dropout: 0.0}}"
)
"""Two steps are an epoch: FID at steps 2 and 4, and at the end."""

DRAWING = "params={samples: 45, batch: 8, solver: euler, solver_steps: 2, fid: true}"


class Place(Folder):
    """A folder in which the recipes are run with the stand-in, and notes are taken of what it is asked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "imagenet64", "write_png")
        (path / "stand_in.py").write_text(STAND_IN)

    def start(
        self, name: str, recipe: Path, ranks: int, *overrides: str, stop: str = "", notes: str = ""
    ) -> subprocess.Popen[str]:
        """A run of so many ranks; the first gets SIGTERM when it comes by `stop`: `seen 10`, or `drawn at 2 2`."""
        task = "train" if recipe == RECIPE else "sample"
        where = (f"name={name}", f"task=stand_in:{task}", 'check=""', f"resources.tasks_per_node={ranks}")
        submit = ("-m", "jobkit", "submit", f"experiments/{recipe.name}", "--local", "--demo")
        environment = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "JOBKIT_CONFIG": "none", "JOBKIT_RUNS": "runs"},
            **{"NOTES": str(self.path.parent / f"{notes or name}.txt"), "STOP": stop},
        }
        return subprocess.Popen(
            [sys.executable, *submit, *where, *overrides],
            cwd=self.path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def _notes(self, what: str, *names: str) -> list[str]:
        lines = "".join((self.path.parent / f"{name}.txt").read_text() for name in names).splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(what)]

    def drawn(self, *names: str) -> Counter[tuple[int, int]]:
        """How often each image was drawn: (step, its number)."""
        lines = [line.split(":") for line in self._notes("drawn", *names)]
        return Counter((int(step), int(number)) for step, numbers in lines for number in numbers.split())

    def seen(self, *names: str) -> int:
        """How many images the stand-in was given."""
        return sum(map(int, self._notes("seen", *names)))

    def statistics(self) -> list[Path]:
        """What is kept beside the data."""
        return sorted(self.path.glob("data/digits/train_8/box.fid/*"))


def ended(process: subprocess.Popen[str], expect: int = 0) -> str:
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == expect, printed
    return printed


class Small(nn.Module):
    """A stand-in within this process: 6 features of images [N, 3, 4, 4]."""

    num_features = 6

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("weight", scale * torch.randn(48, self.num_features, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images.flatten(1).float() @ self.weight / 255)


def images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randint(60, 200, (3, 4, 4), generator=generator)
    return (mean + 40 * torch.randn(count, 3, 4, 4, generator=generator)).clamp(0, 255).to(torch.uint8)


def gaussian(of: Tensor) -> Gaussian:
    return Gaussian.of(sums_of(features_of(of, Small()), CPU))


# The arithmetic


@pytest.mark.parametrize("counts", [(500, 700), (100, 4), (3, 5), (2, 2)], ids=str)
def test_the_distance_is_torchmetrics(counts: tuple[int, int]) -> None:
    drawn, real = images(counts[0], 1), images(counts[1], 2)
    library = FrechetInceptionDistance(feature=Small())
    for some, is_real in ((drawn, False), (real, True)):
        for part in some.split(90):
            library.update(part, real=is_real)
    expected = library.compute().item()
    assert gaussian(drawn).distance(gaussian(real)) == pytest.approx(expected, rel=1e-6)
    assert expected > 0.01


@pytest.mark.parametrize("counts", [(500, 700), (100, 4)], ids=str)
def test_mean_covariance_and_distance_are_torch_fidelitys(counts: tuple[int, int]) -> None:
    library = pytest.importorskip("torch_fidelity.metric_fid", exc_type=Exception)
    features = [features_of(images(count, seed), Small()) for seed, count in enumerate(counts)]
    own = [Gaussian.of(sums_of(one, CPU)) for one in features]
    theirs = [library.fid_features_to_statistics(one.double()) for one in features]
    for one, other in zip(own, theirs, strict=True):
        assert np.allclose(one.mean, other["mu"], rtol=1e-9)
        assert np.allclose(one.covariance, other["sigma"], rtol=1e-9, atol=1e-12)
    expected = library.fid_statistics_to_metric(*theirs, verbose=False)["frechet_inception_distance"]
    assert own[0].distance(own[1]) == pytest.approx(expected, rel=1e-6)


def test_sums_of_parts_add_up_to_the_moments_of_the_whole() -> None:
    features = features_of(images(10_000, 3), Small())
    whole = Gaussian.of(sums_of(features, CPU))
    parts = Gaussian.of(torch.stack([sums_of(one, CPU) for one in features.split(777)]).sum(0))
    assert parts.count == whole.count == 10_000
    assert torch.allclose(whole.mean, features.double().mean(0), rtol=1e-12)
    for one in (whole, parts):
        assert torch.allclose(one.covariance, features.double().T.cov(), rtol=1e-9, atol=1e-12)
    assert whole.distance(parts) == pytest.approx(0, abs=1e-9)


def test_the_distance_of_known_gaussians() -> None:
    mean, other = torch.zeros(2, dtype=torch.float64), torch.tensor([3.0, 4.0], dtype=torch.float64)
    narrow, wide = torch.eye(2, dtype=torch.float64), 4 * torch.eye(2, dtype=torch.float64)
    assert frechet_distance(mean, narrow, other, wide) == pytest.approx(25 + 2 * (2 - 1) ** 2)
    assert frechet_distance(mean, 0 * narrow, mean, wide) == pytest.approx(8)


def test_one_image_has_no_covariance() -> None:
    with pytest.raises(UsageError, match="two images or more, found 1"):
        gaussian(images(1, 0))


# The network


def test_a_network_is_known_by_its_weights() -> None:
    assert hash_of(Small()) == hash_of(Small())
    assert hash_of(Small()) != hash_of(Small(scale=1.001))


def test_statistics_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = gaussian(images(50, 0))
    write(tmp_path / "new" / "a.npz", written)
    found = read(tmp_path / "new" / "a.npz")
    assert torch.equal(found.mean, written.mean) and torch.equal(found.covariance, written.covariance)
    assert found.count == 50
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.npz"]


@pytest.mark.parametrize("damage", ["empty", "half", "a byte", "of something else", "a folder"])
def test_statistics_that_are_damaged_are_made_again(damage: str, tmp_path: Path) -> None:
    data = tmp_path / "train_8" / "box"
    random = torch.Generator().manual_seed(0)
    for number in range(6):
        write_png(data / "class" / f"{number}.png", torch.randint(0, 256, (1, 8, 8), generator=random).to(torch.uint8))
    training = split(open_images(data, 8, 1), 0, flip=False)[0]
    expected = Fid(alone(tmp_path / "run"), Sums, "", training, data).real
    (file,) = data.with_name("box.fid").iterdir()
    whole = file.read_bytes()
    if damage == "of something else":
        np.savez(file, mean=np.zeros(3))
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        middle = len(whole) // 2
        file.write_bytes(
            {"empty": b"", "half": whole[:middle]}.get(damage, whole[:middle] + b"x" + whole[middle + 1 :])
        )
    found = Fid(alone(tmp_path / "run"), Sums, "", training, data).real
    assert torch.equal(found.covariance, expected.covariance)
    if damage != "a folder":
        assert torch.equal(read(file).covariance, expected.covariance)


def test_statistics_that_one_rank_finds_and_rank_0_cannot_read_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk is away on one node: the run would end without its FID, and say nothing."""
    data = tmp_path / "train_8" / "box"
    for number in range(6):
        write_png(data / "class" / f"{number}.png", torch.full((1, 8, 8), number, dtype=torch.uint8))
    training = split(open_images(data, 8, 1), 0, flip=False)[0]
    Fid(alone(tmp_path / "run"), Sums, "", training, data)
    looks = []

    def read_once(file: Path) -> bytes:
        looks.append(file)
        if len(looks) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_fresh(file)

    monkeypatch.setattr("experiments.imagenet64.fid.read_fresh", read_once)
    with pytest.raises(OSError, match="Input/output error"):
        Fid(alone(tmp_path / "run"), Sums, "", training, data)


class Sums(nn.Module):
    """Four features of pixels."""

    def __init__(self, weights: str) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).float() @ self.weight / 255


def alone(run_dir: Path) -> SimpleNamespace:
    """What Fid needs of a context of one rank."""

    def mapped(function: Callable[[Tensor, Tensor], Any], count: int, to: str = "all") -> Any:
        parts = [function(torch.tensor([number]), torch.tensor([number])) for number in range(count)]
        return torch.cat(parts) if isinstance(parts[0], Tensor) else [one for part in parts for one in part]

    nothing = {"barrier": lambda: None, "heartbeat": lambda: None}
    return SimpleNamespace(local_rank=0, is_main=True, device=CPU, run_dir=run_dir, map=mapped, **nothing)


@pytest.mark.parametrize("packed", [True, False])
def test_statistics_are_named_after_the_images_that_they_are_of(packed: bool, tmp_path: Path) -> None:
    data = tmp_path / "train_8" / "box"

    def write_images(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for number in range(6):
            image = torch.randint(0, 256, (1, 8, 8), generator=random, dtype=torch.uint8)
            write_png(data / "class" / f"{number}.png", image)

    def training() -> Part:
        return split(open_images(data, 8, 1) if packed else PngImages(data, 8, 1), 0, flip=False)[0]

    write_images(0)
    before = training()
    write_images(1)  # others take their places before FID is made
    Fid(alone(tmp_path / "run"), Sums, "", before, data)
    after = Fid(alone(tmp_path / "run"), Sums, "", training(), data).real
    of_images = Gaussian.of(sums_of(Sums("")(torch.stack([training()[i][0] for i in range(6)])), CPU))
    assert torch.allclose(after.mean, of_images.mean) and torch.allclose(after.covariance, of_images.covariance)


def test_without_torch_fidelity_one_line_says_what_to_install_and_nothing_is_trained(tmp_path: Path) -> None:
    place = Place(tmp_path / "folder")
    (place.path / "without.py").write_text(
        "import sys\nsys.modules['torch_fidelity'] = None\nfrom experiments.imagenet64.train import train\n"
    )
    printed = ended(place.start("without", RECIPE, 2, TRAINING, "task=without:train"), expect=1)
    said = [line for line in printed.splitlines() if "pip install torch-fidelity" in line]
    assert said and "Traceback" not in printed
    (run,) = place.path.glob("runs/without-*")
    assert causes(run) == ["crashed"] and status(run)["step"] == 0


def test_without_its_packages_a_run_that_asks_for_fid_is_refused_at_submission(tmp_path: Path) -> None:
    if find_spec("torch_fidelity") is not None and find_spec("torchvision") is not None:
        pytest.skip("both are installed")
    place = Place(tmp_path / "folder")
    printed = place.submit(RECIPE, "params.fid_every=1", expect=2)
    assert (
        "params.fid_every: FID needs torch_fidelity" in printed
        and "constraints.txt torch-fidelity torchvision, or" in printed
    )
    assert not (place.path / "runs").exists()


def test_weights_that_are_not_there_are_refused_at_submission(tmp_path: Path) -> None:
    place = Place(tmp_path / "folder")
    (place.path / "train_blurred_64" / "box").mkdir(parents=True)
    command = ("-m", "jobkit", "submit", "experiments/imagenet64.yaml", "--local", "--no-demo", "--dry-run")
    environment = {"IMAGENET_DIR": ".", "CUDA_VISIBLE_DEVICES": "0", "INCEPTION": "missing.pth"}
    done = subprocess.run(
        [sys.executable, *command], cwd=place.path, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "inputs: missing.pth: no such file or directory" in done.stdout + done.stderr


def test_the_variable_for_the_weights_counts_in_the_small_recipe_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IMAGENET_DIR", raising=False)
    monkeypatch.setenv("INCEPTION", "missing.pth")
    for recipe, overrides in ((RECIPE, []), (SAMPLING, ["params.run=x"])):
        assert load(recipe, overrides).config.params["inception"] == "missing.pth"
    place = Place(tmp_path / "folder")
    command = [sys.executable, "-m", "jobkit", "submit", "experiments/imagenet64.yaml", "--local"]
    done = subprocess.run(command, cwd=place.path, capture_output=True, text=True)
    assert done.returncode == 2 and "inputs: missing.pth: no such file or directory" in done.stderr
    assert not (place.path / "runs").exists()


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_weights_that_are_no_inceptions_are_refused_at_submission(
    is_zip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagenet64_check, "find_spec", lambda name: object())  # as if FID's packages were installed
    file = tmp_path / "inception.pth"
    weights = {name: torch.zeros(shape) for name, shape in INCEPTION.items()} | {"fc.bias": torch.zeros(1008)}

    def save(content: object) -> None:
        torch.save(content, file, _use_new_zipfile_serialization=is_zip)

    def refused(says: str) -> None:
        with pytest.raises(InvalidValue, match=rf"^params\.inception: {file}: {says}; expected the weights that docs"):
            check({"fid": True, "inception": str(file)})

    save(weights)
    check({"fid": True, "inception": str(file)})
    file.write_bytes(file.read_bytes()[:-1])
    refused("torn: .*")
    save(weights | {"fc.weight": torch.zeros(1000, 2048)})
    refused("fc.weight is 1000 x 2048")
    save({"state_dict": weights})
    refused("no Conv2d_1a_3x3.conv.weight in it")
    save(nn.Linear(2, 2))
    refused("a Linear in it, expected arrays by name.*")
    file.write_text("<!DOCTYPE html>")
    refused("no file of safetensors, numpy.savez or torch.save")
    check({"fid": False, "inception": str(file)})


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights for torch-fidelity's network, which cannot be downloaded here, drawn at random."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", exc_type=Exception)
    file = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        patch.setattr(fidelity, "load_state_dict_from_url", lambda *_, **__: {})
        network = fidelity.FeatureExtractorInceptionV3("inception", ["2048"])
    torch.save(network.state_dict(), file)
    return file


def test_features_are_those_of_torch_fidelitys_network(random_weights: Path) -> None:
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", exc_type=Exception)
    pixels = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8)
    theirs = fidelity.FeatureExtractorInceptionV3("inception", ["2048"], str(random_weights))
    own = Inception(str(random_weights))
    assert features_of(pixels, own).shape == (3, 2048)
    assert torch.equal(features_of(pixels, own), theirs(pixels)[0])
    grey = features_of(pixels[:, :1], own)
    assert torch.equal(grey, theirs(pixels[:, :1].repeat(1, 3, 1, 1))[0])


def test_weights_that_cannot_be_had_are_named_with_what_to_do(
    random_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", exc_type=Exception)

    def offline(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(fidelity, "load_state_dict_from_url", offline)
    with pytest.raises(
        UsageError, match=r"cannot be downloaded: .*save https://.*6726825d.pth .*params.inception=PATH"
    ):
        Inception("")
    (tmp_path / "wrong.pth").write_bytes(b"no weights")
    with pytest.raises(UsageError, match=r"params.inception: .*wrong.pth: .*save https://"):
        Inception(str(tmp_path / "wrong.pth"))


# Whole runs, of a tiny model and with the stand-in

KNOWN = 1797 - 30
"""Training images."""

ONCE = Counter({(step, number): 1 for step in (2, 4, 6) for number in range(45)})
"""What is drawn for FID, each image once."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Two finished trainings that began at once, of one rank and of two, on the same data."""
    place = Place(tmp_path_factory.mktemp("trained") / "folder")
    for process in [place.start(name, RECIPE, ranks, TRAINING) for name, ranks in (("one", 1), ("two", 2))]:
        ended(process)
    return place


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Trainings of two ranks, stopped: at the training images, in an FID, in the last; beside the data is no room."""
    place = Place(tmp_path_factory.mktemp("interrupted") / "folder")
    (place.path / "data/digits/train_8").mkdir(parents=True)
    (place.path / "data/digits/train_8/box.fid").write_text("a file where the folder would be")
    stops = {"looking": "seen 10", "drawing": "drawn at 2 2", "ending": "drawn at 6 2"}
    first = [place.start(name, RECIPE, 2, TRAINING, stop=stop, notes=f"{name}1") for name, stop in stops.items()]
    for process in first:
        ended(process, expect=75)
    assert not list(place.run("looking").glob("fid"))
    for process in [place.start(name, RECIPE, 2, TRAINING, notes=f"{name}2") for name in stops]:
        ended(process)
    return place


def test_fid_is_measured_every_epoch_and_at_the_end_and_each_image_is_drawn_once(trained: Place) -> None:
    for name in ("one", "two"):
        assert logged_steps(trained.run(name), "validation/fid") == [2, 4, 6]
        assert trained.drawn(name) == ONCE
    results = [status(trained.run(name))["result"]["fid"] for name in ("one", "two")]
    assert results[0] > 0
    assert results[1] == pytest.approx(results[0], rel=1e-2)  # two ranks add up gradients in another order than one


def test_runs_that_begin_at_once_leave_one_file_of_the_training_images(trained: Place) -> None:
    (file,) = trained.statistics()
    assert read(file).count == KNOWN
    assert not list(trained.path.glob("runs/*/fid"))


def test_samples_have_the_fid_that_training_ended_with_on_any_number_of_ranks(trained: Place) -> None:
    run, before = trained.run("one"), [file.stat().st_mtime_ns for file in trained.statistics()]
    names = {"alone": 1, "three": 3}
    started = [trained.start(name, SAMPLING, ranks, DRAWING, f"params.run={run}") for name, ranks in names.items()]
    printed = [ended(process) for process in started]
    found = [status(trained.run(name))["result"]["fid"] for name in names]
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    assert found[0] == pytest.approx(status(run)["result"]["fid"], rel=1e-6)
    for name, text, fid in zip(names, printed, found, strict=True):
        assert f"FID of 45 samples against 1,767 training images: {fid}" in text
        assert trained.seen(name) == 45, "the training images' features are those in the file"
    assert [file.stat().st_mtime_ns for file in trained.statistics()] == before


@pytest.mark.parametrize(("name", "step"), [("looking", 0), ("drawing", 2), ("ending", 6)])
def test_a_stop_draws_and_looks_at_nothing_twice_and_changes_nothing(
    interrupted: Place, trained: Place, name: str, step: int
) -> None:
    run, expected = interrupted.run(name), trained.run("two")
    assert [attempt["last_step"] for attempt in status(run)["attempts"]] == [step, 6]
    assert interrupted.seen(f"{name}1") > 0 and interrupted.seen(f"{name}2") > 0
    assert (set(interrupted.drawn(f"{name}2")) < set(ONCE)) == (name != "looking")
    assert interrupted.drawn(f"{name}1", f"{name}2") == ONCE
    assert interrupted.seen(f"{name}1", f"{name}2") == KNOWN + 3 * 45
    assert logged_steps(run, "validation/fid") == [2, 4, 6]
    assert status(run)["result"] == status(expected)["result"]
    assert weights(run) == weights(expected)


def test_where_nothing_can_be_written_beside_the_data_the_file_is_kept_in_the_run(
    interrupted: Place, trained: Place
) -> None:
    (file,), (expected,) = interrupted.run("looking").glob("fid/*"), trained.statistics()
    assert torch.equal(read(file).covariance, read(expected).covariance), "interrupted or not"


# The recipe


def test_labels_are_withheld_together_as_often_as_told() -> None:
    torch.manual_seed(0)
    one = withheld(20_000, 0.2, 1, CPU)
    together = withheld(20_001, 0.2, 32, CPU)
    assert one.double().mean().item() == pytest.approx(0.2, abs=0.01)
    assert together.double().mean().item() == pytest.approx(0.2, abs=0.06)
    assert len(together) == 20_001
    assert all(len(part.unique()) == 1 for part in together.split(32))
