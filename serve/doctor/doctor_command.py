"""`halfserve doctor`."""

from __future__ import annotations

import json
import platform
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer

from halfserve.compiled_build import build_in_use
from halfserve.installation import code_in_use, install_hint
from halfserve.nvidia_libraries import cuda_major
from halfserve.serve.doctor.examination import PARTS, Facts, examine

EXIT_CODES: dict[type[Exception], int] = {OSError: 1}  # for example: too many processes
WIDTH, INDENT = 79, 14
# What serving and converting depend on beside the packages that halfserve's metadata requires.
OPTIONAL_PACKAGES = ("openvino", "torch", "onnxscript", "transformers", "tokenizers", "nvidia-ml-py")
ALTERNATIVES = ("onnxruntime", "onnxruntime-gpu")  # both hold the folder onnxruntime
CUDA, GIB = "CUDAExecutionProvider", 1 << 30
NEEDED_DRIVERS = {12: "525", 13: "580"}  # first driver of each CUDA version, for Linux


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Something that is wrong or missing."""

    problem: str  # description of the fault
    remedy: str  # command or step that mends it
    is_broken: bool  # whether serving as installed does not work, or uses less than the machine has


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine computes fast, which devices and libraries are found, and what is missing.

    The exit status is 1 if serving does not work here as installed: a required package is missing or too old, ONNX Runtime does
    not compute, or there is an NVIDIA device that models are not served on. A missing extra is no fault.

    Example: halfserve doctor --json > doctor.json
    """
    with ThreadPoolExecutor() as pool:
        facts = {"halfserve": _halfserve(), "packages": _packages(), **dict(zip(PARTS, pool.map(examine, PARTS), strict=True))}
    findings = list(find(facts))
    broken = any(finding.is_broken for finding in findings)
    if as_json:
        listed = [vars(finding) for finding in findings]
        typer.echo(json.dumps({**facts, "findings": listed, "works": not broken}))
    else:
        typer.echo("\n".join(_report(facts, findings)))
    if broken:
        raise typer.Exit(1)


def find(facts: dict[str, Facts]) -> Iterator[Diagnosis]:
    """Yield what is wrong or missing according to the facts of each part."""
    packages = facts["packages"]
    for requirement in packages["unmet"]:
        yield Diagnosis(problem=f"{requirement} is not installed", remedy=f"pip install '{requirement}'", is_broken=True)
    runtime = facts["onnx_runtime"]
    if "error" in runtime:
        yield Diagnosis(
            problem=f"ONNX Runtime does not compute: {runtime['error']}",
            remedy="pip install --force-reinstall onnxruntime-gpu, or onnxruntime where there is no such wheel",
            is_broken=True,
        )
    if "error" in facts["openvino"] and packages["versions"].get("openvino"):
        remedy = "pip install --force-reinstall openvino"
        yield Diagnosis(problem=f"OpenVINO does not compute: {facts['openvino']['error']}", remedy=remedy, is_broken=True)
    elif facts["processor"].get("fast_halves") and not packages["versions"].get("openvino"):
        halves = " and ".join(facts["processor"]["fast_halves"])
        problem = f"this processor computes {halves} faster than float32, and OpenVINO is not installed"
        yield Diagnosis(problem=problem, remedy=install_hint("openvino"), is_broken=False)
    yield from _of_cuda(facts)


def _of_cuda(facts: dict[str, Facts]) -> Iterator[Diagnosis]:
    """Yield why no model is served on CUDA, if there is a device."""
    devices, runtime = facts["devices"], facts["onnx_runtime"]
    reason = devices.get("error") or devices.get("reason", "")
    if not devices.get("devices"):
        if devices.get("on_bus") or devices.get("kernel_module"):
            yield Diagnosis(
                problem=f"there is an NVIDIA device, and its driver does not work: {reason}",
                remedy="install NVIDIA's driver and restart; in a container, start it with `--gpus all`",
                is_broken=True,
            )
        return
    if "error" in runtime:
        return
    if CUDA not in runtime["providers"]:
        both = all(facts["packages"]["versions"].get(name) for name in ALTERNATIVES)
        yield Diagnosis(
            problem=f"this ONNX Runtime has no CUDA provider{' (two of its packages are installed)' if both else ''}",
            remedy=f"pip uninstall {' '.join(ALTERNATIVES)}; pip install onnxruntime-gpu",
            is_broken=True,
        )
        return
    needed = cuda_major(runtime["cuda"])
    if cuda_major(devices["cuda"]) < needed:
        yield Diagnosis(
            problem=f"the driver supports CUDA {devices['cuda']}, and ONNX Runtime needs CUDA {needed}",
            remedy=f"install NVIDIA's driver {NEEDED_DRIVERS.get(needed, '')} or newer",
            is_broken=True,
        )
        return
    tried = facts["cuda"].get("tried", {"a model": facts["cuda"].get("error", "")})
    for operator, failure in tried.items():
        if failure:
            problem = failure.removeprefix("a GPU is required, but ").partition("; allow the CPU")[0]
            yield Diagnosis(
                problem=f"{operator} is not computed on CUDA: {problem}", remedy=install_hint("cuda"), is_broken=True
            )


def _halfserve() -> Facts:
    facts = {"build": str(build_in_use()), "code": code_in_use(), "python": platform.python_version()}
    try:
        version = metadata.version("halfserve")
    except metadata.PackageNotFoundError:
        version = "of a folder that is not installed"
    return {"version": version, **facts, "executable": sys.executable, "system": platform.platform()}


def _packages() -> Facts:
    """Return the versions of packages by name, None for a missing one, and the requirements of halfserve that are not met."""
    versions: dict[str, str | None] = {}
    unmet = []
    for requirement in _requirements():
        versions[requirement.name] = _version(requirement.name)
        names = ALTERNATIVES if requirement.name in ALTERNATIVES else (requirement.name,)
        if not any(requirement.specifier.contains(_version(name) or "0", prereleases=True) for name in names):
            unmet.append(f"{requirement.name}{requirement.specifier}")
    versions.update((name, _version(name)) for name in (*ALTERNATIVES, *OPTIONAL_PACKAGES))
    return {"versions": versions, "unmet": unmet}


def _requirements() -> Iterator[Any]:
    try:
        from packaging.requirements import Requirement  # noqa: PLC0415  (ONNX Runtime brings it, and may be missing)

        required = metadata.requires("halfserve") or []
    except (ModuleNotFoundError, metadata.PackageNotFoundError):
        return
    for requirement in map(Requirement, required):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _report(facts: dict[str, Facts], findings: list[Diagnosis]) -> Iterator[str]:
    """Yield the lines of the report, at most WIDTH characters wide except for paths and commands."""
    own, versions = facts["halfserve"], facts["packages"]["versions"]
    yield from _entry("halfserve", f"{own['version']}, {own['build']}; {own['code']}")
    yield from _entry("Python", f"{own['python']} ({own['executable']}) on {own['system']}")
    yield from _entry("Processor", _processor(facts["processor"]))
    yield from _entry("Packages", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version))
    yield from _entry("ONNX Runtime", _runtime(facts["onnx_runtime"]))
    yield from _entry("OpenVINO", _openvino(facts["openvino"]) if versions.get("openvino") else "not installed")
    yield from _entry("CUDA driver", _driver(facts["devices"]))
    for number, device in enumerate(facts["devices"].get("devices", [])):
        memory = f"{device['memory_bytes'] / GIB:.0f} GiB"
        yield from _entry(f"Device {number}", f"{device['name']}, compute capability {device['compute_capability']}, {memory}")
    if facts["devices"].get("devices"):
        for library in facts["libraries"].get("libraries", []):
            found = f"{library['file']} {library['version']} {library['path'] or ''}".replace("  ", " ")
            yield from _entry(library["title"], found if not library["problem"] else f"missing: {library['problem']}")
    for finding in findings:
        yield ""
        yield from _entry("Broken" if finding.is_broken else "Missing", finding.problem)
        yield from _entry("To mend it", finding.remedy)
    yield ""
    yield _verdict(facts, findings)


def _verdict(facts: dict[str, Facts], findings: list[Diagnosis]) -> str:
    if any(finding.is_broken for finding in findings):
        return "Not everything works here as installed."
    count = len(facts["devices"].get("devices", []))
    return f"Serving works here, on {f'{count} CUDA device(s) and ' if count else ''}the CPU."


def _entry(title: str, text: str) -> Iterator[str]:
    """Yield a title and its text beside it."""
    first = f"{title:<{INDENT - 1}} "
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _processor(facts: Facts) -> str:
    if "error" in facts:
        return f"not examined: {facts['error']}"
    fast = ", ".join(facts["fast_halves"]) or "none; half models are computed in float32"
    arithmetic = ", ".join(facts["arithmetic"]) or "no vector instructions that are known here"
    return f"{facts['name']}, {facts['cores']} usable core(s); {arithmetic}; half arithmetic that is fast here: {fast}"


def _runtime(facts: Facts) -> str:
    if "error" in facts:
        return f"does not compute: {facts['error']}"
    built = f"for CUDA {facts['cuda']}" if facts["cuda"] else "without CUDA"
    return f"{facts['version']} {built}; {', '.join(facts['providers'])}"


def _openvino(facts: Facts) -> str:
    return f"does not compute: {facts['error']}" if "error" in facts else f"{facts['version']}; {', '.join(facts['devices'])}"


def _driver(facts: Facts) -> str:
    if not facts.get("devices"):
        return f"none ({facts.get('error') or facts.get('reason') or 'it lists no device'})"
    version = f"{facts['kernel_module']}, " if facts["kernel_module"] else ""
    return f"{version}supports CUDA up to {facts['cuda']}" if version else f"supports CUDA up to {facts['cuda']}"
