"""The folder of a search: the ladder so far, a folder for each candidate, and the results.

`ladder.json` is replaced as a whole after every step, so a killed run continues after the last finished one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sparsebit.compress.climbing.goal import pareto
from sparsebit.errors import ConfigError
from sparsebit.folders import alone_in, exchange, put_in_place, replace_file, replace_text, staging_folder
from sparsebit.records.ladder import FORMAT, Ladder

log = logging.getLogger(__name__)

LADDER, CANDIDATES = "ladder.json", "candidates"


class RunFolder:
    """`identity`: a checksum of the model, the data and the goal. A folder of another run is an error."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().resolve()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other process works in this folder."""
        if self.path.exists() and (not self.path.is_dir() or (any(self.path.iterdir()) and not self._is_run())):
            raise ConfigError(f"folder={str(self.path)!r} exists and is not a run of compress; choose another folder")
        (self.path / CANDIDATES).mkdir(parents=True, exist_ok=True)
        try:
            with alone_in(self.path):
                yield
        except BlockingIOError:
            raise ConfigError(f"another process works in {self.path} now; wait, or choose another folder") from None

    def read(self, identity: str, minutes: float, best: str) -> Ladder | None:
        """The ladder of an earlier call, without folders of steps that were not finished; None at the first call.

        A finished search continues if it is given more minutes, or if its result, the file `best`, was deleted.
        """
        file, found = self.path / LADDER, None
        if file.exists():
            found = Ladder.from_json(file.read_bytes().decode(errors="replace"), str(file))
            if found.identity != identity:
                raise ConfigError(
                    f"{self.path} holds a run with another model, other data or another goal; choose another folder, "
                    "or repeat the call that began it"
                )
            found = self._continued(found, minutes, best)
        finished = set() if found is None else {step.folder for step in found.steps}
        for folder in (self.path / CANDIDATES).iterdir():
            if f"{CANDIDATES}/{folder.name}" not in finished and folder.is_dir():
                shutil.rmtree(folder)
        return found

    def _continued(self, ladder: Ladder, minutes: float, best: str) -> Ladder:
        has_more_time, has_result = minutes > ladder.goal.minutes, not ladder.best or (self.path / best).exists()
        if ladder.finished and has_result and not has_more_time:
            return ladder
        kept = list(ladder.steps)
        while has_more_time and kept and kept[-1].verdict == "out of time":
            kept.pop()
        gone = [place for place, step in enumerate(kept) if not (self.path / step.folder).is_dir()]
        # Later steps were proposed with the deleted one as known, so they are made again too.
        if gone:
            log.warning("%s was deleted: the search continues from before it", self.path / kept[gone[0]].folder)
            kept = kept[: gone[0]]
        lost = sum(step.seconds for step in ladder.steps[len(kept) :])
        return ladder.replace(
            goal=replace(ladder.goal, minutes=minutes),
            steps=tuple(kept),
            best=ladder.best if any(step.name == ladder.best for step in kept) else "",
            pareto=pareto(ladder.goal, tuple(kept)),
            seconds=max(0.0, ladder.seconds - lost),
            finished=False,
        )

    def write(self, ladder: Ladder) -> None:
        replace_text(self.path / LADDER, ladder.to_json())

    def step_folder(self, name: str) -> Path:
        """A new folder for a candidate."""
        folder = self.path / CANDIDATES / name
        folder.mkdir()
        return folder

    def relative(self, folder: Path) -> str:
        return folder.relative_to(self.path).as_posix()

    def copy_in(self, source: Path, name: str) -> Path:
        """Put a file or a folder at the top of the run, in one step, without using its space twice."""
        target = self.path / name
        if source.is_file():
            replace_file(target, lambda made: _linked(source, made))
            return target
        with staging_folder(target) as folder:
            made = folder / name
            shutil.copytree(source, made, copy_function=_linked)
            if target.exists() and not exchange(made, target):
                shutil.rmtree(target)
            if not target.exists():
                put_in_place(made, target)
        return target

    def _is_run(self) -> bool:
        file = self.path / LADDER  # a user may delete the candidates of a finished run
        return (self.path / CANDIDATES).is_dir() or (file.is_file() and FORMAT.encode() in file.read_bytes())


def _linked(source: object, target: object) -> object:
    """A second name for the file where the file system has hard links, else a copy: models may be many gigabytes."""
    made, path = Path(str(target)), Path(str(source))
    made.unlink(missing_ok=True)
    try:
        made.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, made)
    return target
