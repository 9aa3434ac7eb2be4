"""The project around the package: what importing costs, and that the papers agree with each other and with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparsebit
from tests.conftest import ROOT

README, README_ZH = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONAL = (
    "numpy", "scipy", "sklearn", "PIL", "torchvision", "timm", "transformers", "onnx", "onnxruntime", "onnxscript",
    "openvino",
)  # fmt: skip


def in_fresh_python(code: str) -> str:
    """Standard output of `code` in an interpreter of its own; no warnings, as torch gives one where it misses numpy."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(text: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub("", text)


def project_table(name: str) -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8").split(f"[{name}]\n", 1)[1].split("\n[", 1)[0]


class TestImport:
    def test_loads_nothing_heavy_and_leaves_the_state_of_torch_alone(self) -> None:
        """One process for all: what is loaded for a module is what those before it have not loaded."""
        heavy = (
            "torch.onnx",
            "triton",
            "typer",
            *(name for name in OPTIONAL if name != "numpy"),
        )  # numpy: torch loads it
        told = in_fresh_python(
            "import importlib, json, sys, torch; torch.manual_seed(7); loaded, states = {}, []\n"
            "for module in ('torch', 'sparsebit', 'sparsebit.quantization', 'sparsebit.sparse'):\n"
            "    before = set(sys.modules); importlib.import_module(module)\n"
            "    loaded[module] = sorted(set(sys.modules) - before)\n"
            "    states.append((torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),\n"
            "                   torch.initial_seed(), torch.cuda.is_initialized()))\n"
            "print(json.dumps([loaded, states]))"
        )
        loaded, states = json.loads(told)
        found = {
            module: [name for name in names if any(name == root or name.startswith(f"{root}.") for root in heavy)]
            for module, names in loaded.items()
        }
        assert found == {module: [] for module in loaded} and len(loaded["sparsebit.quantization"]) > 1
        assert states == [states[0]] * 4 and states[0][-2:] == [7, False]

    def test_whole_flow_needs_no_optional_package(self, tmp_path: Path) -> None:
        assert (
            in_fresh_python(
                f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # None: importing it is an ImportError\n"
                "import torch, sparsebit\n"
                "from sparsebit.quantization import QuantModel\n"
                "model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), torch.randn(8, 4)\n"
                "qmodel = sparsebit.quantize(model, [x], 'virtual')\n"
                f"qmodel.save({str(tmp_path)!r}); again = QuantModel.load({str(tmp_path)!r}, model)\n"
                "again.set_quant(w_quant=True, a_quant=True); print(torch.equal(again(x), qmodel(x)))"
            )
            == "True\n"
        )


class TestVersion:
    def test_is_the_one_in_pyproject(self) -> None:
        assert f'version = "{sparsebit.__version__}"' in project_table("project")

    def test_changelog_has_a_place_for_what_comes(self) -> None:
        assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned_for_set_up() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    tables = project_table("project").split("dependencies = ", 1)[1] + project_table("project.optional-dependencies")
    named = {name.lower() for name in re.findall(r'"([\w.-]+)(?:\[[\w,]+\])?(?:[<>=!~].*?)?"', tables)} - {"sparsebit"}
    assert named - pinned == set()


class TestReadme:
    def test_chinese_has_the_same_headings(self) -> None:
        levels = [
            re.findall(r"^(#+) ", without(file.read_text(encoding="utf-8"), FENCE), re.MULTILINE)
            for file in (README, README_ZH)
        ]
        assert levels[0] == levels[1]

    def test_chinese_has_the_same_code(self) -> None:
        assert FENCE.findall(README.read_text(encoding="utf-8")) == FENCE.findall(README_ZH.read_text(encoding="utf-8"))

    def test_chinese_has_the_same_links_and_table_rows(self) -> None:
        def bones(file: Path) -> tuple[set[str], int]:
            text = without(file.read_text(encoding="utf-8"), FENCE)
            return set(re.findall(r"\]\((.*?)\)", text)) - {README.name, README_ZH.name}, len(
                re.findall(r"^\|", text, re.MULTILINE)
            )

        assert bones(README) == bones(README_ZH)

    @pytest.mark.parametrize("marker", ["run", "test"])
    def test_command_is_a_script_of_ours(self, marker: str) -> None:
        found = re.search(rf"<!-- {marker} -->\n```bash\nbash (\S+)\n```", README.read_text(encoding="utf-8"))
        assert found and (ROOT / found[1]).is_file()


class TestPages:
    @pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
    def test_links_and_named_files_exist(self, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        links = [
            link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", without(text, FENCE)) if "://" not in link
        ]
        missing = [link for link in links if link and not (page.parent / link).exists()]
        named = re.findall(r"\b(?:examples|benchmarks|scripts)/[\w/.-]*\w\.(?:py|sh|yaml)\b", text)
        missing += [name for name in named if not (ROOT / name).is_file()]
        assert not missing


def test_the_site_loads_nothing_from_elsewhere() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    own = re.findall(r"^extra_(?:css|javascript): \[(\S+)\]", site, flags=re.MULTILINE)
    own += re.findall(r'^MERMAID = "(\S+)"', (ROOT / "scripts" / "docs_pages.py").read_text(), flags=re.MULTILINE)
    assert len(own) == 2 and all((ROOT / "docs" / file).is_file() for file in own)
    assert "font: false" in site and "http" not in re.sub(r"#.*", "", site)


def test_no_page_or_message_installs_the_other_project_of_this_name() -> None:
    """On the package index the name belongs to another project: install lines name the checkout, or the packages."""
    bare = re.compile(r"pip3? install[^`\n]*?(?<![/\w-])sparsebit(?![-\w/])")
    folders = ("sparsebit", "examples", "benchmarks", "scripts")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*PAGES, *sources]
        for line in path.read_text(encoding="utf-8").splitlines()
        if bare.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("version", ["0.0.1.dev0", "0.0.1", "2.0"])
def test_the_other_project_of_this_name_is_noticed(version: str, tmp_path: Path) -> None:
    folder = tmp_path / f"sparsebit-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sparsebit\nVersion: {version}\n")
    run = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import sparsebit", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "a package of another project" in run.stderr and "pip uninstall sparsebit" in run.stderr
