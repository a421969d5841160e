"""The packages: each top-level folder of code is installed as a part of `halfserve`, so that no user's module hides it."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("amp_core", "examples", "export", "protos", "serve")
inside = find_namespace_packages(
    include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")], exclude=["*.static", "*.__pycache__"]
)

setup(
    packages=["halfserve", *(f"halfserve.{name}" for name in inside)],
    package_dir={"halfserve": "halfserve", **{f"halfserve.{folder}": folder for folder in FOLDERS}},
)
