"""Tar shards: names, indices, contents, order."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.amp_core.data import DataError, TarShards, tar_shards
from halfserve.amp_core.data.tar_index import expand_braces, shard_paths
from tests.amp_core.data.sets import assert_same, batches, flat, noise, read


def write_tar(path: Path, content: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> Path:
    entries = content.items() if isinstance(content, Mapping) else content
    with tarfile.open(path, "w") as tar:
        for name, data in entries:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def npy(value: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([value, -value], dtype=np.float32))
    return file.getvalue()


def sample(item: int) -> dict[str, bytes]:
    return {f"{item:04d}.image.npy": npy(item), f"{item:04d}.label.cls": str(item).encode()}


def write_shard(path: Path, numbers: Iterable[int]) -> Path:
    """Each sample is ([i, -i], i)."""
    return write_tar(path, [entry for item in numbers for entry in sample(item).items()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 7, 1 and 12 samples."""
    folder = tmp_path_factory.mktemp("shards")
    for shard, numbers in enumerate((range(7), range(7, 8), range(8, 20))):
        write_shard(folder / f"{shard:03d}.tar", numbers)
    return folder


@pytest.fixture(scope="module")
def shards(folder: Path) -> TarShards:
    return tar_shards(folder / "{000..002}.tar")


def test_samples_come_in_the_order_of_the_shards(shards: TarShards) -> None:
    assert len(shards) == 20
    assert [target for _, target in (shards[item] for item in range(20))] == list(range(20))
    assert shards[7][0].tolist() == [7.0, -7.0]
    with pytest.raises(IndexError, match="there is no sample 20; the shards have 20"):
        shards[20]


@settings(deadline=None, max_examples=50)
@given(world=st.integers(1, 5), epoch=st.integers(0, 3))
def test_no_sample_is_lost_or_comes_twice_over_ranks(shards: TarShards, world: int, epoch: int) -> None:
    ranks = [read(shards, size=2, shuffle=False, epoch=epoch, rank=rank, world_size=world) for rank in range(world)]
    assert Counter(item for rank in ranks for item in flat(rank)) == Counter(range(20))


def test_fewer_shards_than_workers_still_give_each_sample_once(folder: Path) -> None:
    one = tar_shards(folder / "002.tar")
    with batches(one, size=2, workers=2) as loader:
        pairs = list(loader.epoch(0))
        assert_same(list(loader.epoch(0, skip=3)), pairs[3:])
    assert sorted(flat(pairs)) == list(range(8, 20))
    assert_same(pairs, read(one, size=2))


@settings(deadline=None, max_examples=50)
@given(window=st.integers(1, 30), seed=st.integers(0, 1000))
def test_an_epoch_is_a_permutation_within_the_window(folder: Path, window: int, seed: int) -> None:
    shards = tar_shards(folder / "*.tar", shuffle_window=window)
    order = shards.epoch_order(torch.Generator().manual_seed(seed)).tolist()
    assert sorted(order) == list(range(20))
    if window == 1:
        parts = [list(range(7)), [7], list(range(8, 20))]
        starts = sorted(order.index(part[0]) for part in parts)
        assert all(order[order.index(part[0]) :][: len(part)] == part for part in parts)
        assert starts[0] == 0


def test_shards_and_samples_are_mixed(shards: TarShards) -> None:
    orders = {tuple(shards.epoch_order(torch.Generator().manual_seed(seed)).tolist()) for seed in range(5)}
    assert len(orders) == 5
    assert tuple(range(20)) not in orders


def test_a_large_window_moves_samples_no_further_than_it_reaches(folder: Path) -> None:
    shards = tar_shards(folder / "002.tar", shuffle_window=4)
    order = shards.epoch_order(torch.Generator().manual_seed(0)).tolist()
    assert order != sorted(order)
    assert all(abs(place - item) < 4 for place, item in enumerate(order))


def test_own_decoders_transforms_and_alternatives(tmp_path: Path) -> None:
    content = {"a.x.raw": b"\x05", "a.y.json": b"2", "b.x.npy": npy(3), "b.y.json": b"4", "b.extra": b""}
    write_tar(tmp_path / "a.tar", content)
    shards = tar_shards(
        tmp_path / "a.tar",
        fields=("x.raw;x.npy", "y.json"),
        decode={"raw": lambda data: np.array([data[0], 0], dtype=np.float32)},
        transform=lambda image, label: (image + 1, label * 10),
    )
    assert [(image.tolist(), label) for image, label in (shards[0], shards[1])] == [([6.0, 1.0], 20), ([4.0, -2.0], 40)]


def test_augmentation_is_the_same_with_workers_and_after_a_resume(folder: Path) -> None:
    shards = tar_shards(folder / "*.tar", transform=_augment)
    whole = read(shards)
    assert_same(read(shards, workers=2, skip=2), whole[2:])
    assert not torch.equal(whole[0][0], read(shards, epoch=1)[0][0])


def _augment(_: np.ndarray[tuple[int], np.dtype[np.float32]], label: int) -> tuple[torch.Tensor, int]:
    return noise(), label


def test_images_text_and_tensors_are_decoded(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    files = {mode: io.BytesIO() for mode in ("RGB", "L", "RGBA")}
    for mode, file in files.items():
        image.fromarray(pixels).convert(mode).save(file, "png")
    tensor = io.BytesIO()
    torch.save(torch.tensor([1.5]), tensor)
    content = {f"{mode}.png": file.getvalue() for mode, file in files.items()}
    write_tar(tmp_path / "a.tar", content)
    write_tar(tmp_path / "b.tar", {"k.pt": tensor.getvalue(), "k.txt": "ä".encode()})
    shards = tar_shards(tmp_path / "a.tar", fields=("png", "png"))
    assert [shards[item][0].shape for item in range(3)] == [(3, 2, 4), (1, 2, 4), (3, 2, 4)]
    assert torch.equal(shards[0][0], torch.from_numpy(pixels).permute(2, 0, 1))
    value, text = tar_shards(tmp_path / "b.tar", fields=("pt", "txt"))[0]
    assert (value.tolist(), text) == ([1.5], "ä")


def test_what_belongs_to_no_sample_is_left_out(tmp_path: Path) -> None:
    more = {"__index__/0.image.npy": b"", ".hidden": b"", "readme": b"", "._0000.image.npy": b""}
    assert len(tar_shards(write_tar(tmp_path / "a.tar", more | sample(0)))) == 1


def test_long_names_and_folders_are_read(tmp_path: Path) -> None:
    key = "./" + "folder.with.dots/" * 12 + "k" * 90
    shards = tar_shards(write_tar(tmp_path / "a.tar", {f"{key}.image.npy": npy(3), f"{key}.label.cls": b"3"}))
    assert shards[0][1] == 3


def _cut(path: Path, length: int) -> None:
    os.truncate(path, length)


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# A header and its content take 512 bytes each here, so member m begins at 1024 * m; then come zeros to 10240.
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: _cut(path, 0), "is damaged or truncated .empty file.; write it again"),
        (lambda path: _cut(path, 700), "is damaged or truncated .unexpected end of data."),
        (lambda path: _cut(path, 1024), "is truncated: it stops at byte 1024 without tar's end mark"),
        (lambda path: _cut(path, 1100), "is truncated: it stops at byte 1100 without tar's end mark"),
        (lambda path: _cut(path, 4096), "is truncated: it stops at byte 4096 without tar's end mark"),
        (lambda path: _overwrite(path, 0, b"x" * 600), "is damaged or truncated"),
        (lambda path: _overwrite(path, 1024, b"x" * 600), "is damaged at byte 1024: there is no tar header"),
        (
            lambda path: _append(path, path.read_bytes()),
            "goes on after tar's end mark .* join tar files by `tar --concatenate`",
        ),
        (lambda path: path.write_bytes(gzip.compress(path.read_bytes())), r"is compressed \(gzip\), .* decompress it"),
        (lambda path: path.write_bytes(b"hello"), "is damaged or truncated"),
    ],
)
def test_a_harmed_shard_is_named_at_once(tmp_path: Path, harm: object, message: str) -> None:
    path = write_shard(tmp_path / "a.tar", range(2))
    assert callable(harm)
    harm(path)
    with pytest.raises(DataError, match=rf"the shard {path} {message}"):
        tar_shards(path)


def test_missing_and_doubled_fields_are_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", sample(0) | {"0001.image.npy": npy(1), "0001.txt": b""})
    with pytest.raises(DataError, match=rf"{path}: the sample '0001' has no 'label.cls'; it has image.npy, txt"):
        tar_shards(path)
    write_tar(path, [*sample(0).items(), *sample(0).items()])
    with pytest.raises(DataError, match=rf"{path}: the sample '0000' has 'image.npy' twice"):
        tar_shards(path)


def test_a_field_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", sample(0) | {"0001.image.npy": npy(1), "0001.label.cls": b"cat"})
    with pytest.raises(DataError, match=rf"^{path}: '0001.label.cls' cannot be decoded: ValueError: invalid literal for int"):
        read(tar_shards(path), workers=1)


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    path = write_tar(tmp_path / "a.tar", {"0.image.npy": file.getvalue(), "0.label.cls": b"0"})
    with pytest.raises(DataError, match="'0.image.npy' cannot be decoded: ValueError: Object arrays cannot be loaded"):
        read(tar_shards(path))


def test_a_shard_that_goes_away_or_shrinks_later_is_named(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", range(2))
    shards = tar_shards(path)
    _cut(path, 2000)
    with pytest.raises(DataError, match=rf"the shard {path} has become shorter since training began"):
        shards[1]
    path.unlink()
    with pytest.raises(DataError, match=rf"cannot read the shard {path}: No such file or directory"):
        shards[0]


def test_wrong_settings_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no decoder for the field 'x.flac'; known are npy, .* decode=\{'flac': function of"):
        tar_shards(folder / "*.tar", fields=("x.flac", "label.cls"))
    with pytest.raises(DataError, match="shuffle_window must be at least 1"):
        tar_shards(folder / "*.tar", shuffle_window=0)
    with pytest.raises(DataError, match="fields must be two, of the input and of the target, got 1"):
        tar_shards(folder / "*.tar", fields=("image.npy",))  # type: ignore[arg-type]  # the mistake in question
    with pytest.raises(DataError, match="the data set TarShards has no items"):
        read(tar_shards(write_tar(folder / "empty.tar", {})))


TEXT = st.text("ab/-", max_size=3)
BRACES = st.one_of(
    st.tuples(st.integers(0, 3), st.integers(0, 12)).map(lambda pair: f"{{{pair[0]:02d}..{pair[0] + pair[1]:02d}}}"),
    st.lists(TEXT, min_size=2, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}"),
)


@settings(deadline=None, max_examples=25)
@given(parts=st.lists(st.tuples(TEXT, BRACES), max_size=2))
def test_braces_mean_what_they_mean_to_the_shell(parts: list[tuple[str, str]]) -> None:
    pattern = "x" + "x".join(text + braces for text, braces in parts) + "x"
    shell = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True, check=True)
    assert " ".join(expand_braces(pattern)) == shell.stdout.strip("\n")


def test_patterns_and_lists_name_files(tmp_path: Path) -> None:
    for name in ("a-00.tar", "a-01.tar", "b-00.tar", "c[1].tar"):
        (tmp_path / name).touch()
    assert [path.name for path in shard_paths(str(tmp_path / "{a,b}-*.tar"))] == ["a-00.tar", "a-01.tar", "b-00.tar"]
    assert [path.name for path in shard_paths([tmp_path / "b-00.tar", str(tmp_path / "a-{00..01}.tar")])] == [
        "b-00.tar",
        "a-00.tar",
        "a-01.tar",
    ]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x-{00..11.tar", r"the braces in 'x-\{00..11.tar' do not close; expected such as 'train-\{0000..0011\}.tar'"),
        ("x-{00-11}.tar", r"\{00-11\} in 'x-\{00-11\}.tar' is neither a range such as \{00..11\} nor alternatives"),
        ("x-{5..2}.tar", r"the range \{5..2\} in 'x-\{5..2\}.tar' is empty or too long"),
        ("x-{0..1}.tar", r"there is no shard x-0.tar; expected a .tar file"),
        ("nowhere/*.tar", r"no file matches 'nowhere/\*.tar'; expected .tar files"),
        ("pipe:cat x.tar", r"'pipe:cat x.tar' is no local file; .* use webdataset.WebDataset"),
        ("s3://bucket/x.tar", r"'s3://bucket/x.tar' is no local file"),
        ([], r"no shards are named; expected a pattern"),
    ],
)
def test_other_names_are_refused(pattern: str | list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shard_paths(pattern)


def test_a_shard_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    with pytest.raises(DataError, match=r"the shard .*a.tar is named twice: each of its samples would come twice"):
        shard_paths([tmp_path / "a.tar", str(tmp_path / "*.tar")])
