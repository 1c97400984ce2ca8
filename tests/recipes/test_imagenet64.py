"""The imagenet64 experiment: recipes, models, methods, data, samples, and that an interruption changes nothing."""

from __future__ import annotations

import io
import math
import multiprocessing
import pickle
import re
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.experiment_folder import Folder
from harness.project import status, weights
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file, save_file

from experiments.imagenet64 import data
from experiments.imagenet64.check import check
from experiments.imagenet64.data import PackedImages, PngImages, open_images, split, write_png
from experiments.imagenet64.digits import write_digits
from experiments.imagenet64.discrete import DiscreteFlowMatching
from experiments.imagenet64.flow import FlowMatching, fixed_noise, guided, integrate, random_times, to_uint8, to_unit
from experiments.imagenet64.scores import pixel_frechet_distance, recognised
from experiments.imagenet64.train import errors, method_of, rows, tiled
from experiments.imagenet64.unet import UNet
from jobkit.errors import InvalidValue, UsageError
from jobkit.run.config import Config
from jobkit.run.experiment import load
from jobkit.train.evaluate import evaluate

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "experiments" / "imagenet64.yaml"
SAMPLING = ROOT / "experiments" / "imagenet64_sample.yaml"


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
    assert config.params["data"] == "/data/train_blurred_64/box"
    assert config.inputs == ["/data/train_blurred_64/box", ""]
    assert config.resources.world_size == 64
    assert parameters(config, classes=1000) == 295_900_035


def test_the_full_recipe_has_the_published_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the row ImageNet64 (Blurred) in flow_matching's examples/image/README.md; where its command is silent,
    the defaults of train_arg_parser.py and submitit_train.py, and models/model_configs.py."""
    config = recipe(monkeypatch, IMAGENET_DIR="/data")
    p = config.params
    assert (p["images"], p["held_out"], p["flip"]) == ("train_blurred", 0, True)  # get_train_transform
    assert config.resources.world_size == 8 * 8  # --nodes=8, --ngpus of 8
    assert (p["batch"], p["micro_batch"]) == (32 * 64, 32)  # --batch_size=32 --accum_iter=1
    epoch = 1_281_167 // 64 // 32  # batches of a rank, the last one dropped
    assert p["steps"] == 900 * epoch  # checkpoint-899
    assert (p["lr"], p["betas"], p["weight_decay"]) == (1e-4, [0.9, 0.95], 0.01)  # the last is torch's AdamW's
    assert p["floor"] == pytest.approx(1 - (1 - 1e-8 / 1e-4) * 900 / 921, abs=1e-6)  # --decay_lr over --epochs of 921
    assert p["ema_decay"] is None  # no --use_ema
    assert (p["drop_label"], p["drop_together"]) == (0.2, 32)  # --class_drop_prob, of a rank's batch
    assert not p["skewed"]
    assert config.precision == "fp16"  # torch.cuda.amp.autocast and GradScaler
    assert (p["fid_every"], p["fid_samples"], p["fid_batch"]) == (100, 50_000, 32)  # --eval_frequency=100
    assert (p["guidance"], p["solver"]) == (0.2, "dopri5")
    unet = {"width": 192, "multipliers": [1, 2, 3, 4], "blocks": 3, "attention": [2, 4, 8], "head": 64, "dropout": 0.1}
    assert p["unet"] == {**unet, "time_scale": 1, "learn_null": False}
    sampling = load(SAMPLING, ["params.run=a"], demo=False).config
    same = {"samples": 50_000, "batch": 32, "guidance": 0.2, "solver": "dopri5"}
    assert {key: sampling.params[key] for key in same} == same and sampling.precision == "fp16"


def test_a_label_that_is_withheld_adds_nothing_where_it_has_no_embedding() -> None:
    net = UNet(1, 10, 8, [1], 1, [], 8, 0.0, learn_null=False)
    assert not net.embed_label(torch.tensor([net.null_label])).any()


def test_resolution_and_blurred_release_are_chosen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe(monkeypatch, IMAGENET_DIR="/data", IMAGENET_RES="32")
    params = load(RECIPE, ["params.images=train"]).config.params
    assert params["res"] == 32
    assert params["data"] == "/data/train_32/box"


def test_without_imagenet_the_small_recipe_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(monkeypatch, IMAGENET_RES="64")
    assert config.params["digits"]
    assert config.params["res"] == 8
    assert not any(config.inputs)
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


def test_blocks_to_be_sharded_hold_nearly_all_parameters_and_none_of_them_twice() -> None:
    net = small_unet()
    units = [parameter for unit in net.shard_units() for parameter in unit.parameters()]
    assert len({id(parameter) for parameter in units}) == len(units)
    assert sum(p.numel() for p in units) > 0.8 * sum(p.numel() for p in net.parameters())


# Flow matching


def test_the_path_leads_from_noise_to_data_at_the_target_velocity() -> None:
    method = FlowMatching()
    x0, image = torch.randn(3, 2, 4, 4), torch.randint(0, 256, (3, 2, 4, 4), dtype=torch.uint8)
    x1 = to_unit(image)
    assert torch.equal(method.path(image, x0, torch.zeros(3))[0], x0)
    assert torch.equal(method.path(image, x0, torch.ones(3))[0], x1)
    x_t, velocity = method.path(image, x0, torch.tensor([0.0, 0.5, 1.0]))
    assert torch.equal(velocity, x1 - x0)
    assert torch.allclose(x_t[1], (x0[1] + x1[1]) / 2)
    wrong = torch.tensor([0.0, 1.0, 2.0])
    assert torch.allclose(method.error(velocity + wrong[:, None, None, None], velocity), wrong.square())


def test_times_are_uniform_or_skewed_towards_the_data() -> None:
    torch.manual_seed(0)
    uniform, skewed = (random_times(20_000, torch.device("cpu"), skewed) for skewed in (False, True))
    assert uniform.mean() == pytest.approx(0.5, abs=0.01)
    assert skewed.median() == pytest.approx(1 / (1 + math.exp(-1.2)), abs=0.01)
    assert 0 < skewed.min() < skewed.max() <= 1


@pytest.mark.parametrize("method", [FlowMatching(), DiscreteFlowMatching(17)])
def test_validation_noise_depends_on_the_sample_alone(method: FlowMatching | DiscreteFlowMatching) -> None:
    state = torch.get_rng_state()
    x0, t = fixed_noise(torch.tensor([5, 6, 7]), (1, 4, 4), method.noise)
    again, t_again = fixed_noise(torch.tensor([7, 5]), (1, 4, 4), method.noise)
    assert torch.equal(again, x0[[2, 0]])
    assert torch.equal(t_again, t[[2, 0]])
    assert len(t.unique()) == 3
    assert torch.equal(state, torch.get_rng_state())


def growth(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """x' = x cos t, which from x(0) = 1 is exp(sin t)."""
    return x * t.cos()[:, None]


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("heun2", 2)])
def test_solvers_converge_at_their_order(solver: str, order: int) -> None:
    start, end = torch.ones(1, 1, dtype=torch.float64), math.exp(math.sin(1))
    coarse, fine = (abs(integrate(growth, start, solver, steps).item() - end) for steps in (20, 40))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)


def test_solvers_evaluate_the_velocity_as_often_as_they_say() -> None:
    for solver, expected in {"euler": 7, "midpoint": 14, "heun2": 14}.items():
        times: list[float] = []

        def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            times.append(t[0].item())  # noqa: B023
            return torch.ones_like(x)

        assert integrate(velocity, torch.zeros(2, 1), solver, 7).flatten().tolist() == pytest.approx([1.0, 1.0])
        assert len(times) == expected and min(times) == 0 and max(times) <= 1


def test_dopri5_takes_more_steps_where_the_velocity_changes_faster_and_keeps_its_tolerance() -> None:
    counts = []
    for rate in (1, 40):
        calls = 0

        def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * rate * (rate * t).cos()[:, None]  # noqa: B023

        end = integrate(velocity, torch.ones(3, 1), "dopri5", steps=0)
        assert end.dtype == torch.float32
        assert end.flatten().tolist() == pytest.approx([math.exp(math.sin(rate))] * 3, rel=1e-3 if rate > 1 else 1e-4)
        counts.append(calls)
    assert counts[0] * 3 < counts[1]


def test_an_unknown_solver_or_method_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"solver: found 'rk45', allowed: euler, midpoint, heun2, dopri5"):
        integrate(growth, torch.ones(1, 1), "rk45", 2)
    with pytest.raises(UsageError, match=r"method: found 'discreet', allowed: continuous, discrete"):
        method_of(OmegaConf.create({"method": "discreet"}))


def test_guidance_extrapolates_from_no_label_past_the_label() -> None:
    net = small_unet()
    x, t, label = torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([1, 2])
    with torch.no_grad():
        with_label, without = net(x, t, label), net(x, t, torch.full((2,), net.null_label))
        assert torch.allclose(guided(net, label, 0.0)(x, t), with_label, atol=1e-5)
        assert torch.allclose(guided(net, label, 0.2)(x, t), 1.2 * with_label - 0.2 * without, atol=1e-5)


# Discrete flow matching


def test_tokens_are_the_greys_of_the_digits_and_the_bytes_of_photographs() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    photographs, digits = DiscreteFlowMatching(256), DiscreteFlowMatching(17)
    assert torch.equal(photographs.to_pixels(photographs.to_tokens(pixels)), pixels)
    greys = torch.from_numpy(np.round(np.arange(17) * 255 / 16).astype(np.uint8))
    assert digits.to_tokens(greys).tolist() == list(range(17))
    assert torch.equal(digits.to_pixels(digits.to_tokens(greys)), greys)


def test_a_part_t_of_the_tokens_is_seen_at_time_t() -> None:
    method = DiscreteFlowMatching(256)
    image = torch.randint(0, 256, (3, 1, 64, 64), dtype=torch.uint8)
    tokens, target = method.path(image, method.noise(image.shape), torch.tensor([0.0, 0.3, 1.0]))
    seen = tokens != 256
    assert torch.equal(tokens[seen], image.long()[seen]) and torch.equal(target, image.long())
    assert seen.flatten(1).double().mean(1).tolist() == pytest.approx([0, 0.3, 1], abs=0.05)


def test_sampling_unmasks_every_token_once_by_what_the_network_predicts() -> None:
    method, levels = DiscreteFlowMatching(5), 5
    masked = []

    class Predicts(torch.nn.Module):
        """Even labels: token 3 for certain. Odd ones: 0 and 4 equally likely. Nothing is known without a label."""

        null_label = 10

        def forward(self, tokens: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            masked.append((tokens[: len(tokens) // 2] == levels).double().mean().item())
            certain, either = torch.tensor([-99.0, -99, -99, 0, -99]), torch.tensor([0.0, -99, -99, -99, 0])
            logits = torch.where((label % 2 == 0)[:, None], certain, either) * (label < 10)[:, None]
            return logits[:, :, None, None, None].expand(-1, -1, *tokens.shape[1:])

    p = OmegaConf.create({"guidance": 0.5, "solver_steps": 4})
    generator = torch.Generator().manual_seed(0)
    images = method.sample(Predicts(), torch.tensor([2, 3]), (3, 16, 16), p, generator)
    assert masked == pytest.approx([1, 0.75, 0.5, 0.25], abs=0.06)
    assert images.dtype == torch.uint8 and images.shape == (2, 3, 16, 16)
    assert set(images[0].unique().tolist()) == {round(3 * 255 / 4)}
    assert set(images[1].unique().tolist()) == {0, 255}
    assert (images[1] == 255).double().mean().item() == pytest.approx(0.5, abs=0.06)


def test_the_discrete_model_learns(folder: Path) -> None:
    torch.manual_seed(0)
    method = DiscreteFlowMatching(17)
    unet = {"width": 16, "multipliers": [1, 2], "blocks": 1, "attention": [2], "head": 16, "dropout": 0.0}
    net = method.network(1, 3, OmegaConf.create(unet))
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    image, label = torch.utils.data.default_collate(list(open_images(folder, 4, 1)))
    losses = []
    for _ in range(60):
        tokens, target = method.path(image, method.noise(image.shape), random_times(len(image), image.device, False))
        loss = method.error(net(tokens, torch.zeros(len(image)), label), target).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(17), abs=1e-4)  # it starts at "each token is equally likely"
    assert np.mean(losses[-10:]) < 0.75 * losses[0]


# The grid of samples


@pytest.mark.parametrize("name", ["continuous", "discrete"])
def test_the_grid_of_samples_is_repeatable_and_leaves_the_random_numbers_alone(name: str, tmp_path: Path) -> None:
    p = OmegaConf.create(
        {"channels": 1, "res": 8, "guidance": 0.2, "solver": "euler", "solver_steps": 2, "method": name, "levels": 17}
    )
    method = method_of(p)
    unet = {"width": 8, "multipliers": [1, 2], "blocks": 1, "attention": [2], "head": 8, "dropout": 0.0}
    net = method.network(1, 10, OmegaConf.create(unet)).eval()
    state = torch.get_rng_state()
    draw, labels = rows(method, net, p, columns=3), torch.arange(10)
    images = draw(labels, labels)
    assert torch.equal(images[4:6], draw(labels[4:6], labels[4:6]))  # whichever rows a rank draws
    assert torch.equal(state, torch.get_rng_state())
    write_png(tmp_path / "samples" / "grid.png", tiled(images.flatten(0, 1), 3))
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["grid.png"]
    with Image.open(tmp_path / "samples" / "grid.png") as image:
        assert image.size == (3 * 34, 10 * 34)


# SampleScores


def test_real_digits_are_recognised_and_wrongly_labelled_ones_are_not(tmp_path: Path) -> None:
    write_digits(tmp_path / "box")
    images, label = torch.utils.data.default_collate(list(PngImages(tmp_path / "box", 8, 1))[::5])
    assert recognised(images, label) > 0.98
    assert recognised(images, (label + 1) % 10) < 0.02


def test_the_pixel_distance_is_that_of_the_gaussians() -> None:
    torch.manual_seed(0)
    images = torch.randint(100, 156, (4000, 1, 2, 2), dtype=torch.uint8)
    assert pixel_frechet_distance(images, images) == pytest.approx(0, abs=1e-6)
    brighter = pixel_frechet_distance(images, images + 51)
    assert brighter == pytest.approx(4 * 0.4**2, abs=1e-4)  # four pixels, each 51 / 127.5 brighter
    wider = ((images.double() - 128) * 2 + 128).to(torch.uint8)
    deviation = to_unit(images).std().item()
    assert pixel_frechet_distance(images, wider) == pytest.approx(4 * deviation**2, rel=0.05)
    photographs = torch.randint(0, 256, (50, 3, 64, 64), dtype=torch.uint8)
    assert pixel_frechet_distance(photographs, photographs.flip(0)) == pytest.approx(0, abs=1e-6)


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
    assert len({path.name for path in folder.with_name("box.uint8").iterdir()} - {".lock"}) == 3


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
    leftover = cache / f".{socket.gethostname()}.tmp"
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
    assert {path.name for path in box.parent.iterdir()} == {".lock", "box"}


# Whole runs, of a tiny model


TRAINING = (
    "params={steps: 12, batch: 14, micro_batch: 4, held_out: 30, validate_every: 4, validate_batch: 8, "
    "solver_steps: 2, unet: {width: 8, multipliers: [1, 2], blocks: 1, attention: [2], head: 8, dropout: 0.1}}"
)
DRAWING = "params={samples: 21, batch: 4, solver: dopri5}"


def folder_in(path: Path) -> Folder:
    return Folder(path, "imagenet64", "write_png")


def pictures(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run / "samples")): file.read_bytes() for file in run.glob("samples/**/*.png")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder with a finished training that nothing interrupted."""
    folder = folder_in(tmp_path_factory.mktemp("trained") / "folder")
    folder.submit(RECIPE, TRAINING, "resources.tasks_per_node=1")
    return folder


def test_an_interrupted_training_ends_with_the_same_weights_and_images(trained: Folder, tmp_path: Path) -> None:
    folder, uninterrupted = folder_in(tmp_path / "folder"), trained.run("imagenet64")
    run = folder.script("train", RECIPE, TRAINING, stop_after=2)
    assert status(run)["step"] in (4, 5)
    folder.script("train", RECIPE, TRAINING)
    stopped, continued = status(run)["attempts"]
    assert continued["first_step"] == stopped["last_step"]
    assert weights(run) == weights(uninterrupted)
    assert status(run)["result"] == status(uninterrupted)["result"]
    assert pictures(run) == pictures(uninterrupted)
    assert sorted(pictures(run)) == [f"step_{number:08d}.png" for number in (0, 4, 8, 12)]


def test_what_is_validated_and_exported_is_the_average_of_the_weights(trained: Folder) -> None:
    run = trained.run("imagenet64")
    images = open_images(trained.path / "data" / "digits" / "train_8" / "box", 8, 1)
    p = OmegaConf.create(load(RECIPE, [TRAINING], demo=True).config.params)
    net = FlowMatching().network(1, 10, p.unet).eval()
    net.load_state_dict(load_file(run / "final" / "model.safetensors"))
    _, held_out = split(images, 30, flip=False)
    with torch.no_grad():
        loss = evaluate(errors(FlowMatching(), net), held_out, batch_size=8)
    assert loss == pytest.approx(status(run)["result"]["validation_loss"], rel=1e-5)


def test_samples_are_the_same_on_one_rank_or_two_and_those_there_are_not_drawn_again(
    trained: Folder, tmp_path: Path
) -> None:
    run = trained.run("imagenet64")
    trained.submit(SAMPLING, DRAWING, f"params.run={run}")
    drawn = trained.run("imagenet64_sample")
    assert sorted(pictures(drawn)) == sorted(f"{number % 10}/{number:06d}.png" for number in range(21))
    result = status(drawn)["result"]
    assert result["validation_loss"] == pytest.approx(status(run)["result"]["validation_loss"], rel=1e-6)
    assert 0 <= result["recognised"] <= 1
    assert result["pixel_frechet_distance"] > result["pixel_frechet_distance_of_training_images"] > 0

    folder = folder_in(tmp_path / "folder")
    shutil.copytree(trained.path / "data", folder.path / "data")
    again = folder.script("sample", SAMPLING, DRAWING, f"params.run={run}", stop_after=7)
    assert len(pictures(again)) == 8  # the batch of 4 in which it was told to stop is the last one
    written = {file: file.stat().st_mtime_ns for file in again.glob("samples/*/00000[0-3].png")}
    (again / "samples" / "5" / "000005.png").write_bytes(b"")  # as after a power failure: its batch is drawn again
    folder.script("sample", SAMPLING, DRAWING, f"params.run={run}")
    assert pictures(again) == pictures(drawn)
    assert all(file.stat().st_mtime_ns == when for file, when in written.items())
    assert status(again)["result"] == result


def test_images_of_weights_that_the_run_has_no_more_are_drawn_again(trained: Folder, tmp_path: Path) -> None:
    run, found = shutil.copytree(trained.run("imagenet64"), tmp_path / "run"), []
    for name in ("begun before", "begun after"):
        folder = folder_in(tmp_path / name)
        shutil.copytree(trained.path / "data", folder.path / "data")
        if name == "begun before":
            folder.script("sample", SAMPLING, DRAWING, f"params.run={run}", stop_after=7)
            train_again(run / "final" / "model.safetensors")
        drawn = folder.script("sample", SAMPLING, DRAWING, f"params.run={run}")
        found.append((pictures(drawn), status(drawn)["result"]))
    assert found[0] == found[1]


def train_again(weights: Path) -> None:
    """Other weights in a file."""
    state = {name: value + 0.01 * torch.randn_like(value) for name, value in load_file(weights).items()}
    save_file(state, weights, metadata={"format": "pt"})


def test_what_no_job_could_train_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    folder = folder_in(tmp_path / "folder")
    (folder.path / "mine" / "a class").mkdir(parents=True)
    for overrides, says in [
        (["params.method=discreet"], "params.method: found 'discreet', allowed: continuous, discrete; did you mean"),
        (
            ["params.solver=dopri"],
            "params.solver: found 'dopri', allowed: euler, midpoint, heun2, dopri5; did you mean",
        ),
        (["params.digits=false", "params.data=mine"], "params.classes: found 10, and mine has 1 folders of classes"),
        (["params.digits=false", "params.data=none"], "params.data: none cannot be read: No such file"),
    ]:
        assert says in folder.submit(RECIPE, *overrides, expect=2)
    assert not (folder.path / "runs").exists()


def test_the_small_model_trains_on_ones_own_images(tmp_path: Path) -> None:
    place, random = folder_in(tmp_path / "folder"), np.random.default_rng(0)
    for number in range(36):
        file = place.path / "mine" / "abc"[number % 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(file)
    own = ("params.data=mine", "params.digits=false", "params.res=16", "params.channels=3", "params.classes=3")
    few = ("params.steps=1", "params.batch=8", "params.micro_batch=8", "params.solver_steps=1")
    place.submit(RECIPE, *own, "params.held_out=6", *few, "params.validate_batch=6", "resources.tasks_per_node=1")
    run = place.run("imagenet64")
    assert status(run)["step"] == 1 and status(run)["result"]["validation_loss"] > 0
    options = ("params.samples=30", "params.solver_steps=1", "params.batch=30", "resources.tasks_per_node=1")
    place.submit(SAMPLING, f"params.run={run}", *options)
    drawn = pictures(place.run("imagenet64_sample"))
    assert sorted(drawn) == sorted(f"{'abc'[number % 3]}/{number:06d}.png" for number in range(30))


def test_images_that_are_not_as_the_params_say_are_refused_before_anything_is_queued(folder: Path) -> None:
    params = {"digits": False, "data": str(folder), "classes": 3, "res": 4, "held_out": 8, "fid_every": 0}
    params["unet"] = {"multipliers": [1, 2]}
    check(params)

    def refused(says: str, **changes: object) -> None:
        with pytest.raises(InvalidValue, match=re.escape(says)):
            check(params | changes)

    (first,) = (folder / "a").glob("1.png")
    (folder / "a" / "0.png").unlink()
    refused(f"params.held_out: found 8, expected 0 to 7: {folder} has 8 images")
    refused("params.held_out: found -1, expected 0 or more", held_out=-1)
    params["held_out"] = 0
    refused(f"params.res: found 64, and {first} has 4 x 4 pixels", res=64)
    refused(
        "params.res: found 4, expected a multiple of 8: params.unet.multipliers halve it 3 times",
        unet={"multipliers": [1, 2, 3, 4]},
    )
    Image.new("RGB", (5, 4)).save(first)
    refused(f"params.data: {first}: 5 x 4 pixels, expected as many rows as columns")
    for image in folder.glob("*/*"):
        image.unlink()
    refused(f"params.data: {folder}: no <class>/<name>.png in it")

    digits = params | {"digits": True, "classes": 10, "res": 8}
    check(digits)
    for key in ("classes", "res"):
        with pytest.raises(InvalidValue, match=f"params.{key}: found 64, and the digits have"):
            check(digits | {key: 64})
    with pytest.raises(InvalidValue, match=r"params.held_out: found 1797, expected 0 to 1796: there are 1797 digits"):
        check(digits | {"held_out": 1797})


def test_the_discrete_model_is_trained_and_sampled_by_the_same_recipes(tmp_path: Path) -> None:
    folder = folder_in(tmp_path / "folder")
    run = folder.script("train", RECIPE, TRAINING, "params.method=discrete")
    assert 0 < status(run)["result"]["validation_loss"] < math.log(17)  # nats: better than knowing nothing
    few = "params={samples: 12, batch: 9, solver_steps: 4}"
    images = pictures(folder.script("sample", SAMPLING, few, f"params.run={run}"))
    assert len(images) == 12
    greys = {round(level * 255 / 16) for level in range(17)}
    for image in images.values():
        with Image.open(io.BytesIO(image)) as opened:
            assert set(np.unique(opened).tolist()) <= greys


def test_sampling_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    folder = folder_in(tmp_path / "folder")
    assert "params.run" in folder.submit(SAMPLING, expect=2)
    printed = folder.submit(SAMPLING, "params.run=nowhere", expect=2)
    assert "nowhere/config.yaml" in printed and "new parameter" not in printed
