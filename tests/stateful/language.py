"""The verbs of `sparsebit.llm` on a tiny random Llama, in any order: quantize, load, convert, copy."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule
from torch import Tensor, nn

from sparsebit.llm import Recipe, convert, load, quantize
from tests.llm.tiny_models import saved, tiny_model

FORMATS = ["compressed-tensors", "gptq"]
TOKENS = torch.arange(3, 15)[None]


@functools.cache
def float_folder() -> Path:
    """The folder of the float model, which is made once for each process."""
    folder = Path(tempfile.mkdtemp(prefix="stateful-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return saved(tiny_model(num_hidden_layers=2), folder / "model")


class LanguageLife(RuleBasedStateMachine):
    folders: Bundle[tuple[Path, str]] = Bundle("folders")  # with the name of the recipe that it was made by

    @initialize()
    def build(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.num_folders = 0
        self.expected: dict[str, Tensor] = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    def new_folder(self) -> Path:
        self.num_folders += 1
        return self.folder / f"packed{self.num_folders}"

    @rule(target=folders, bits=st.sampled_from([4, 8]), group_size=st.sampled_from([32, 64]))
    def quantize(self, bits: int, group_size: int) -> object:
        """The same recipe makes the same files."""
        if self.num_folders >= 3:
            return multiple()
        recipe = Recipe(method="rtn", scale_search="none", bits=bits, group_size=group_size, symmetric=True)
        made = quantize(float_folder(), self.new_folder(), recipe, check=False)
        name = f"{bits} bits, groups of {group_size}"
        logits = logits_of(load(made.folder))
        assert torch.equal(logits, self.expected.setdefault(name, logits)), f"{name}: another model than before"
        self.whole(made.folder)
        return made.folder, name

    @rule(target=folders, source=folders, form=st.sampled_from(FORMATS))
    def convert(self, source: tuple[Path, str], form: str) -> object:
        """A folder in another format computes the same."""
        if self.num_folders >= 5:
            return multiple()
        folder, name = source
        made = convert(folder, self.new_folder(), form, check=False).output
        self.whole(made)
        assert torch.equal(logits_of(load(made)), self.expected[name]), f"{name} as {form}: other logits"
        return made, name

    @rule(source=folders)
    def load_and_copy(self, source: tuple[Path, str]) -> None:
        folder, name = source
        model = load(folder)
        twin = copy.deepcopy(model)
        for what, one in (("loaded", model), ("a deep copy", twin)):
            assert torch.equal(logits_of(one), self.expected[name]), f"{name}, {what}: other logits"
        held = set(twin.state_dict())
        assert held == set(model.state_dict()) and held, "a deep copy has other names in its state"

    @rule(source=folders)
    def copy_folder(self, source: tuple[Path, str]) -> None:
        """A folder can be moved to another place."""
        folder, name = source
        moved = shutil.copytree(folder, self.folder / "moved")
        assert torch.equal(logits_of(load(moved)), self.expected[name]), f"{name}, copied: other logits"
        shutil.rmtree(moved)

    def whole(self, folder: Path) -> None:
        """Nothing but results is left beside a result."""
        others = [path.name for path in self.folder.iterdir() if not path.name.startswith("packed")]
        assert not others and not list(self.folder.glob("*.partial")), others
        assert not list(folder.glob(".*"))


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found
