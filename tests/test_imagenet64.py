"""The imagenet64 experiment: its recipe, model, method and data. That it trains is another test's subject."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from experiments.imagenet64 import data, sample_grid, write_png
from experiments.imagenet64.data import PackedImages, PngImages, open_images, split, to_uint8, to_unit
from experiments.imagenet64.digits import write_digits
from experiments.imagenet64.flow import (
    fixed_noise,
    guided,
    integrate,
    interpolate,
    loss_per_sample,
    random_times,
)
from experiments.imagenet64.unet import UNet
from jobkit.run.config import Config, load

RECIPE = Path(__file__).parents[1] / "experiments" / "imagenet64.yaml"


def recipe(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Config:
    for variable in ("IMAGENET_DIR", "IMAGENET_RES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    return load(RECIPE).config


def parameters(config: Config, classes: int) -> int:
    with torch.device("meta"):
        net = UNet(config.params["channels"], classes, **config.params["unet"])
    return sum(parameter.numel() for parameter in net.parameters())


def small_unet() -> UNet:
    torch.manual_seed(0)
    net = UNet(1, 10, width=8, multipliers=[1, 2], blocks=1, attention=[2], head=8, dropout=0.1)
    with torch.no_grad():
        for parameter in net.parameters():  # what starts at zero would hide mistakes
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of 4 x 4 grey images, 2 to 4 of them."""
    random = np.random.default_rng(0)
    for name, count in {"a": 2, "b": 3, "c": 4}.items():
        (tmp_path / "box" / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(random.integers(0, 256, (4, 4), np.uint8)).save(tmp_path / "box" / name / f"{i}.png")
    return tmp_path / "box"


# The recipe


def test_the_full_recipe_is_the_published_model_of_296_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(monkeypatch, IMAGENET_DIR="/data")
    assert config.params["data"] == "/data/train_64/box"
    assert config.inputs == ["/data/train_64/box"]
    assert config.resources.world_size == 64
    assert config.precision == "bf16"
    assert parameters(config, classes=1000) == 295_900_035


def test_resolution_and_blurred_release_are_chosen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe(monkeypatch, IMAGENET_DIR="/data", IMAGENET_RES="32")
    params = load(RECIPE, ["params.images=train_blurred"]).config.params
    assert params["res"] == 32
    assert params["data"] == "/data/train_blurred_32/box"


def test_without_imagenet_the_small_recipe_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(monkeypatch, IMAGENET_RES="64")
    assert config.params["digits"]
    assert config.params["res"] == 8
    assert config.inputs == []
    assert parameters(config, classes=10) == 827_745
    assert "IMAGENET_DIR is not set" in load(RECIPE).notes[0]


# The model


def test_velocity_has_the_shape_of_the_image_and_starts_at_zero() -> None:
    net = UNet(3, 10, width=8, multipliers=[1, 2, 3], blocks=2, attention=[2, 4], head=8, dropout=0.1)
    velocity = net(torch.randn(2, 3, 16, 16), torch.rand(2), torch.tensor([0, net.null_label]))
    assert velocity.shape == (2, 3, 16, 16)
    assert not velocity.any()


def test_velocity_depends_on_time_and_label_and_every_parameter_is_trained() -> None:
    net = small_unet()
    x, t, label = torch.randn(1, 1, 8, 8), torch.tensor([0.3]), torch.tensor([3])
    velocity = net(x, t, label)
    assert not torch.allclose(velocity, net(x, t + 0.1, label))
    assert not torch.allclose(velocity, net(x, t, label + 1))
    velocity.square().sum().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


# Flow matching


def test_the_path_leads_from_noise_to_data_at_the_target_velocity() -> None:
    x0, x1 = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    assert torch.equal(interpolate(x0, x1, torch.zeros(3))[0], x0)
    assert torch.equal(interpolate(x0, x1, torch.ones(3))[0], x1)
    x_t, velocity = interpolate(x0, x1, torch.tensor([0.0, 0.5, 1.0]))
    assert torch.equal(velocity, x1 - x0)
    assert torch.allclose(x_t[1], (x0[1] + x1[1]) / 2)
    true = loss_per_sample(lambda x, t, label: x1 - x0, x1, torch.zeros(3), x0, torch.rand(3))
    assert torch.equal(true, torch.zeros(3))


def test_times_are_uniform_or_skewed_towards_the_data() -> None:
    torch.manual_seed(0)
    uniform, skewed = (random_times(20_000, torch.device("cpu"), skewed) for skewed in (False, True))
    assert uniform.mean() == pytest.approx(0.5, abs=0.01)
    assert skewed.median() == pytest.approx(1 / (1 + math.exp(-1.2)), abs=0.01)
    assert 0 < skewed.min() < skewed.max() <= 1


def test_validation_noise_depends_on_the_sample_alone() -> None:
    images = torch.zeros(3, 1, 4, 4)
    x0, t = fixed_noise(torch.tensor([5, 6, 7]), images)
    state = torch.get_rng_state()
    again, t_again = fixed_noise(torch.tensor([7, 5]), images[:2])
    assert torch.equal(again, x0[[2, 0]])
    assert torch.equal(t_again, t[[2, 0]])
    assert len(t.unique()) == 3
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2), ("heun2", 2)])
def test_solvers_converge_at_their_order(method: str, order: int) -> None:
    # x' = x cos t from x(0) = 1 is exp(sin t).
    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * t.double().cos()[:, None]

    start, end = torch.ones(1, 1, dtype=torch.float64), math.exp(math.sin(1))
    coarse, fine = (abs(integrate(velocity, start, method, steps).item() - end) for steps in (20, 40))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)


def test_guidance_extrapolates_from_no_label_past_the_label() -> None:
    net = small_unet()
    x, t, label = torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([1, 2])
    with torch.no_grad():
        with_label, without = net(x, t, label), net(x, t, torch.full((2,), net.null_label))
        assert torch.allclose(guided(net, label, 0.0)(x, t), with_label, atol=1e-5)
        assert torch.allclose(guided(net, label, 0.2)(x, t), 1.2 * with_label - 0.2 * without, atol=1e-5)


def test_the_grid_of_samples_is_repeatable_and_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    net = small_unet()
    p = OmegaConf.create({"channels": 1, "res": 8, "guidance": 0.2, "solver": "euler", "solver_steps": 2})
    state = torch.get_rng_state()
    grid = sample_grid(net, p, torch.device("cpu"), columns=3)
    assert torch.equal(grid, sample_grid(net, p, torch.device("cpu"), columns=3))
    assert torch.equal(state, torch.get_rng_state())
    write_png(tmp_path / "samples" / "grid.png", grid)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["grid.png"]
    with Image.open(tmp_path / "samples" / "grid.png") as image:
        assert image.size == (3 * 34, 10 * 34)


# The data


def test_packed_images_equal_the_pngs(folder: Path) -> None:
    pngs, packed = PngImages(folder, 4, 1), open_images(folder, 4, 1)
    assert isinstance(packed, PackedImages)
    assert pngs.classes == packed.classes == ["a", "b", "c"]
    assert [label for _, label in packed] == [label for _, label in pngs] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert all(torch.equal(packed[i][0], pngs[i][0]) for i in range(9))
    with Image.open(folder / "b" / "1.png") as image:
        assert np.array_equal(packed[3][0][0], image)


def test_packing_in_several_processes_gives_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(data, "CHUNK", 4)
    pngs, packed = PngImages(folder, 4, 3), open_images(folder, 4, 3)
    assert isinstance(packed, PackedImages)
    assert all(torch.equal(packed[i][0], pngs[i][0]) for i in range(9))


def test_a_changed_folder_is_packed_anew_and_an_unchanged_one_is_not(folder: Path) -> None:
    first = open_images(folder, 4, 1)
    assert open_images(folder, 4, 1).folder == first.folder
    time.sleep(0.02)  # more than the clock of a file system steps by
    shutil.copy(folder / "a" / "0.png", folder / "a" / "new.png")
    second = open_images(folder, 4, 1)
    assert len(second) == 10
    time.sleep(0.02)
    temporary = folder / "c" / "0.tmp"
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(temporary, format="png")
    temporary.replace(folder / "c" / "0.png")
    assert not open_images(folder, 4, 1)[6][0].any()
    assert len(first) == 9  # what a running job has open stays as it was
    assert len({path.name for path in folder.with_name("box.uint8").iterdir()} - {"lock"}) == 3


def _open_in_process(folder: Path, barrier, results) -> None:
    barrier.wait()
    images = open_images(folder, 4, 1)
    results.put((type(images).__name__, len(images), (images.folder / "images.npy").stat().st_ino))


def test_processes_that_start_together_pack_once(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_open_in_process, args=(folder, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = {results.get(timeout=30) for _ in processes}
    for process in processes:
        process.join(timeout=30)
    assert len(answers) == 1  # one file: the same inode for all
    assert answers.pop()[0] == "PackedImages"
    assert not list(folder.with_name("box.uint8").glob("*.tmp"))


def test_what_a_killed_packer_left_behind_is_cleared_away(folder: Path) -> None:
    cache = folder.with_name("box.uint8")
    leftover = cache / f"{data.socket.gethostname()}.tmp"
    leftover.mkdir(parents=True)
    (leftover / "images.npy").write_bytes(b"half")
    assert len(open_images(folder, 4, 1)) == 9
    assert not leftover.exists()


def test_where_nothing_can_be_written_the_pngs_are_decoded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.with_name("box.uint8").write_text("a file where the packed copy would go")
    images = open_images(folder, 4, 1)
    assert isinstance(images, PngImages)
    assert images[3][0].shape == (1, 4, 4)
    assert "decoding the PNGs" in capsys.readouterr().out


def test_a_broken_image_a_wrong_size_and_an_empty_folder_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"a/0\.png: 4 x 4 pixels, expected 8 x 8"):
        open_images(folder, 8, 1)
    (folder / "b" / "2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"b/2\.png: not a whole image"):
        open_images(folder, 4, 1)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ValueError, match=r"no <class>/<name>\.png"):
        open_images(folder, 4, 1)


def test_packed_images_travel_to_a_loader_worker_as_a_path(folder: Path) -> None:
    images = open_images(folder, 4, 1)
    pickled = pickle.dumps(images)
    assert len(pickled) < 500
    assert torch.equal(pickle.loads(pickled)[3][0], images[3][0])


def test_held_out_images_are_not_trained_on_and_not_mirrored(folder: Path) -> None:
    images = open_images(folder, 4, 1)
    training, held_out = split(images, held_out=3, flip=True)
    assert sorted([*training.ids, *held_out.ids]) == list(range(9))
    assert len(held_out) == 3
    assert all(torch.equal(held_out[i][0], images[held_out.ids[i]][0]) for i in range(3))
    original = images[training.ids[0]][0]
    seen = [training[0][0] for _ in range(20)]
    mirrored = [torch.equal(image, original.flip(-1)) for image in seen]
    assert 0 < sum(mirrored) < 20
    assert all(m or torch.equal(image, original) for m, image in zip(mirrored, seen, strict=True))


def test_pixels_survive_the_way_to_the_unit_range_and_back() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(to_unit(pixels)), pixels)
    assert to_unit(pixels).min() == -1
    assert to_unit(pixels).max() == 1


def test_digits_are_written_once_in_imagenets_layout(tmp_path: Path) -> None:
    box = tmp_path / "train_8" / "box"
    write_digits(box)
    write_digits(box)
    assert sorted(path.name for path in box.iterdir()) == [str(digit) for digit in range(10)]
    assert len(PngImages(box, 8, 1)) == 1797
    assert [path.name for path in box.parent.iterdir()] == ["box"]
