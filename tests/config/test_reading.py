"""Reading: paths, mappings and text; line numbers; and text that means harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebit.config.reading import MAX_BYTES, Document, read
from sparsebit.errors import ConfigError
from tests.parameters import listed

TEXT = "BACKEND: virtual\nW:\n  QUANTIZER: {BIT: 8}\n  SPECIFIC:\n    - {fc: [QUANTIZER.BIT, 4]}\n"
VALUES = {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 8}, "SPECIFIC": [{"fc": ["QUANTIZER.BIT", 4]}]}}


def told(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(source)  # type: ignore[arg-type]
    return str(caught.value)


class TestSources:
    @pytest.mark.parametrize("kind", [str, Path], ids=["path as text", "path"])
    def test_file(self, tmp_path: Path, kind: type) -> None:
        file = tmp_path / "q.yaml"
        file.write_text(TEXT, encoding="utf-8")
        document = read(kind(file))
        assert document == VALUES and document.origin == str(file)

    def test_file_with_byte_order_mark(self, tmp_path: Path) -> None:
        file = tmp_path / "q.yaml"
        file.write_bytes(b"\xef\xbb\xbfBACKEND: virtual\n")
        assert read(file) == {"BACKEND": "virtual"}

    def test_file_whose_name_looks_like_yaml(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("a: b").write_text("BACKEND: tensorrt", encoding="utf-8")
        assert read("a: b") == {"BACKEND": "tensorrt"}

    @pytest.mark.parametrize(
        "text", [TEXT, "BACKEND: virtual", "{BACKEND: virtual}", "BACKEND:"], ids=["lines", "key", "braces", "bare key"]
    )
    def test_text(self, text: str) -> None:
        assert "BACKEND" in read(text)

    def test_mapping_is_copied(self) -> None:
        values = {"W": {"QUANTIZER": {"BIT": 8}}}
        document = read(values)
        values["W"]["QUANTIZER"]["BIT"] = 4
        assert document == {"W": {"QUANTIZER": {"BIT": 8}}} and document.lines == {}

    def test_document_is_itself(self) -> None:
        document = read(TEXT)
        assert read(document) is document

    def test_numbers_without_a_point(self) -> None:
        assert read("{a: 1e-3, b: 1E3, c: 2.5e+1, d: e3}") == {"a": 0.001, "b": 1000.0, "c": 25.0, "d": "e3"}

    def test_anchors_and_merge_keys(self) -> None:
        document = read("W: &same {QUANTIZER: {BIT: 8}}\nA: {<<: *same, QSCHEME: per-tensor-affine}\n")
        assert document["A"] == {"QUANTIZER": {"BIT": 8}, "QSCHEME": "per-tensor-affine"}


class TestLines:
    def test_every_key_has_its_line(self) -> None:
        assert read(TEXT).lines == {
            ("BACKEND",): 1,
            ("W",): 2,
            ("W", "QUANTIZER"): 3,
            ("W", "QUANTIZER", "BIT"): 3,
            ("W", "SPECIFIC"): 4,
            ("W", "SPECIFIC", "fc"): 5,
        }

    def test_missing_key_stands_on_the_line_of_its_section(self) -> None:
        document = read(TEXT)
        assert document.line_of(("W", "QUANTIZER", "TYPE")) == 3
        assert document.line_of(("SCHEDULE",)) is None
        assert Document({}).line_of(()) is None


class TestFaults:
    def test_missing_file_is_named(self) -> None:
        assert "no config file at 'qconfg.yaml'" in told("qconfg.yaml")

    def test_folder(self, tmp_path: Path) -> None:
        assert "cannot be read" in told(tmp_path)

    def test_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "weights.pt").write_bytes(b"PK\xff\xfe\x00")
        assert "not a text file in UTF-8" in told(tmp_path / "weights.pt")

    @pytest.mark.parametrize("source", [None, 3, b"W: 1", ["W"]], ids=["nothing", "number", "bytes", "list"])
    def test_no_source(self, source: object) -> None:
        assert "allowed: the path of a YAML file, a dict, YAML text" in told(source)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("W: 1\nA: 2\nW: 3\n", "line 3: W is given twice (first on line 1); keep one of them"),
            ("W:\n  QUANTIZER: {BIT: 8, BIT: 4}\n", "line 2: W.QUANTIZER.BIT is given twice (first on line 2)"),
            ("W:\n  SPECIFIC: [{fc: [], fc: []}]\n", "line 2: W.SPECIFIC.fc is given twice"),
        ],
        ids=["top", "nested", "glob"],
    )
    def test_key_given_twice(self, text: str, expected: str) -> None:
        assert expected in told(text)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("\n", "the config is empty; it needs at least W.QUANTIZER.BIT and A.QUANTIZER.BIT"),
            ("- W\n- A\n", "a config is a mapping of keys (BACKEND, W, A, ...), but this is a list"),
            ("just\ntext\n", "but this is text"),
            ("W: {BIT: 8\n", "not valid YAML: line 2, column 1: "),
            (
                "W:\n\tBIT: 8\n",
                "line 2, column 1: found character '\\t' that cannot start any token; indent with spaces",
            ),
            ("A:\n  SPECIFIC: [{*norm: [QUANTIZER.BIT, 8]}]\n", 'a glob that starts with * must be quoted: "*.fc"'),
            ("W: {A: 1}\n1: 2\n", "line 2: a key must be text; put 1 in quotes"),
            ("no: 2\nW: 1\n", "line 1: a key must be text; put no in quotes"),
            ("? [a]\n: 3\n", "line 1: a key must be text, not a list or a mapping"),
            ("W: 1\n---\nA: 1\n", "but found another document"),
            ("W: 2020-13-45\n", "month must be in 1..12"),
        ],
        ids=listed("""
            empty | list | text | open brace | tab | bare star | number | YAML 1.1 no | list key | two | date
        """),
    )
    def test_yaml(self, text: str, expected: str) -> None:
        assert expected in told(text)

    def test_file_is_named_with_the_line(self, tmp_path: Path) -> None:
        (tmp_path / "q.yaml").write_text("W: 1\nW: 2\n", encoding="utf-8")
        assert told(tmp_path / "q.yaml").startswith(f"{tmp_path / 'q.yaml'}: line 2: W is given twice")

    def test_mapping_with_a_number_for_a_key(self) -> None:
        assert told({"W": {8: 8}}) == "a key must be text, but 8 is int"


class TestHostile:
    """A config from a stranger may be refused, but runs nothing, and ends soon in a ConfigError."""

    @pytest.mark.parametrize(
        "value",
        ["!!python/object/apply:os.mkdir [HERE]", "!!python/name:os.system", "!!python/module:os", "!custom 3"],
        ids=["call", "function", "module", "unknown tag"],
    )
    def test_tags_are_refused_and_run_nothing(self, value: str, tmp_path: Path) -> None:
        text = f"W: {value}\n".replace("HERE", str(tmp_path / "made"))
        assert "tags (!...) are not allowed" in told(text)
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize("merge", [False, True], ids=["lists", "merge keys"])
    def test_aliases_that_multiply(self, merge: bool) -> None:
        lines = ["k0: &k0 {x: 1}"]
        for n in range(12):
            many = ", ".join([f"*k{n}"] * 9)
            lines.append(f"k{n + 1}: &k{n + 1} " + (f"{{<<: [{many}]}}" if merge else f"[{many}]"))
        assert "the aliases unfold to more than 100,000 values" in told("\n".join(lines))

    def test_alias_inside_itself(self) -> None:
        assert "line 1: an alias that contains itself" in told("W: &w\n  A: *w\n")

    def test_nested_without_end(self) -> None:
        assert "nested too deeply" in told("W: " + "[" * 2000)
        values: dict[str, object] = {}
        values["W"] = values
        assert "nested more than 32 deep" in told(values)

    def test_too_long(self, tmp_path: Path) -> None:
        text = "#" * MAX_BYTES + "\nW: 1\n"
        (tmp_path / "q.yaml").write_text(text, encoding="utf-8")
        for source in (text, tmp_path / "q.yaml"):
            assert "a config has at most" in told(source)

    def test_number_of_a_million_digits(self) -> None:
        assert "not valid YAML" in told(f"W: {'9' * 10_000}\n")
