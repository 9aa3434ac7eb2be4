from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.errors import MissingExtraError, install_command


def error_of(module: str) -> str:
    try:
        __import__(module)
    except ImportError:
        return str(MissingExtraError("a-package", "extra", "this"))
    raise AssertionError("it was imported")


def test_a_package_that_is_not_there() -> None:
    assert error_of("no_such_package_anywhere") == (
        "this needs the package 'a-package', which is not installed: pip install a-package"
    )


def test_a_package_that_fails_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('needs libfoo 3\\nand more')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = error_of("broken_package")
    assert "which cannot be imported (needs libfoo 3):" in told and "not installed" not in told


def test_an_extra_is_installed_by_the_names_of_its_packages() -> None:
    onnx = install_command("onnx", "onnx")
    assert [name in onnx for name in ("'onnx>=", "'onnxruntime>=", "'onnxscript>=", "'onnx-ir>=")] == [True] * 4
    gguf = install_command("gguf", "gguf")  # holds the packages of the extra that it is built on
    assert "'gguf>=" in gguf and "'transformers>=" in gguf and "sparsebit" not in gguf


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise RuntimeError('operator v::nms does not exist')", "RuntimeError: operator v::nms does not exist"),
        ("raise OSError('undefined symbol')", "OSError: undefined symbol"),
        ("import no_such_package_anywhere", "No module named 'no_such_package_anywhere'"),
        ("raise ImportError", "ImportError"),
        ("import torch; torch.ops.load_library('/no/such/library')", "OSError: /no/such/library"),  # in torch's code
    ],
)
@pytest.mark.parametrize("is_lazy", [False, True])
def test_the_cause_is_named_where_another_package_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, cause: str, is_lazy: bool
) -> None:
    outer = "import broken_vision"
    if is_lazy:  # as transformers does
        outer = "try:\n    import broken_vision\nexcept Exception as e:\n    raise ModuleNotFoundError('lazy') from e"
    (tmp_path / "outer_package.py").write_text(outer)
    (tmp_path / "broken_vision.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        __import__("outer_package")
    except Exception:
        told = str(MissingExtraError("outer-package", "extra", "this"))
    assert f"cannot be imported ({cause}" in told and "): repair the package 'broken_vision', or pip install" in told
