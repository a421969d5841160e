"""Names of shards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.data import DataError
from amp_core.data.shard_paths import expand_braces, shard_paths

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
