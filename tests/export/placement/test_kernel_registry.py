from __future__ import annotations

from types import SimpleNamespace

import pytest

from export.placement.cuda_kernels import cuda_kernels
from export.placement.kernel_registry import Kernel, format_table, parse_table, registry_of

ANY = 2**31 - 1


def definition(op_name: str, versions: tuple[int, int], domain: str = "", **types: list[str]) -> SimpleNamespace:
    return SimpleNamespace(provider="P", domain=domain, op_name=op_name, version_range=versions, type_constraints=types)


def test_kernels_of_one_opset_are_put_together_and_equal_ranges_joined() -> None:
    definitions = [
        definition("Clip", (6, 10), T=["tensor(float)"]),
        definition("Clip", (11, 11), T=["tensor(float)"]),
        definition("Clip", (12, ANY), T=["tensor(float)"]),
        definition("Clip", (12, ANY), T=["tensor(float16)", "tensor(int8)"]),
        definition("SequenceAt", (11, ANY), S=["seq(tensor(float16))"], I=["tensor(int64)"]),
        definition("Gelu", (1, ANY), domain="com.microsoft", T=["tensor(double)", "tensor(bfloat16)"]),
        definition("Conv", (1, ANY), domain="com.ms.internal.nhwc", T=["tensor(float)"]),
        SimpleNamespace(provider="Q", domain="", op_name="Tan", version_range=(7, ANY), type_constraints={}),
    ]
    registry = registry_of(definitions, "P")
    assert registry == {
        ("", "Clip"): (Kernel(first=6, last=11, types="f"), Kernel(first=12, last=ANY, types="hfn")),
        ("", "SequenceAt"): (Kernel(first=11, last=ANY, types="hn"),),
        ("com.microsoft", "Gelu"): (Kernel(first=1, last=ANY, types="db"),),
    }
    text = format_table(registry)
    assert text == "Clip 6-11 f; 12+ hfn\nSequenceAt 11+ hn\ncom.microsoft:Gelu 1+ db\n"
    assert parse_table(text) == registry


@pytest.mark.parametrize("line", ["Clip", "Clip 6", "Clip 6-11 f, 12+ h", "Clip 6..11 f"])
def test_lines_of_another_form_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is no line of a kernel table"):
        parse_table(line)


def test_the_table_holds_what_is_known_of_cuda() -> None:
    table = cuda_kernels()
    assert len(table) > 200
    assert table == parse_table(format_table(table))
    only_fp32 = {"GridSample", "Range", "EyeLike"}
    assert not [name for name in only_fp32 if any("h" in kernel.types for kernel in table["", name])]
    for name in ("Tan", "Asin", "Det", "LpPool", "Hardmax", "AffineGrid", "MaxUnpool", "Multinomial", "Col2Im", "STFT"):
        assert ("", name) not in table
    for name in ("Conv", "MatMul", "LayerNormalization", "Softmax", "Resize", "LSTM"):
        assert "h" in table["", name][-1].types
