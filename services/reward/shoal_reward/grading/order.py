"""What a grader is told at its start: settings, and the code of the scorers as the service has it.

Graders are replaced at any time, and files are edited while a service runs: the next version of a scorer, say, that another service is
to offer. So the service keeps the text of its scorers' files, and every grader imports that, wherever the files have gone since.
"""

from __future__ import annotations

import base64
import importlib.machinery
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shoal.config.reward_service import RewardServiceSettings
from shoal.fingerprint import freeze_sources, sources_of
from shoal.reward import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Settings, and the content of source files by their absolute paths."""

    settings: RewardServiceSettings
    sources: Mapping[Path, bytes]

    @classmethod
    def for_scorers(cls, settings: RewardServiceSettings, scorers: Iterable[Scorer]) -> Self:
        """Order what these scorers need; definitions of others are left out."""
        wanted = list(scorers)
        names = {scorer.name for scorer in wanted}
        definitions = {name: definition for name, definition in settings.scorers.items() if name in names}
        sources = {path: content for scorer in wanted for path, content in sources_of(scorer.function).items()}
        return cls(settings=settings.model_copy(update={"scorers": definitions}), sources=sources)

    def to_bytes(self) -> bytes:
        """Write it as JSON."""
        sources = {str(path): base64.b64encode(content).decode() for path, content in self.sources.items()}
        return json.dumps({"settings": self.settings.model_dump(mode="json"), "sources": sources}).encode()

    @classmethod
    def from_bytes(cls, written: bytes) -> Self:
        """Read what `to_bytes` wrote."""
        read = json.loads(written)
        sources = {Path(path): base64.b64decode(content) for path, content in read["sources"].items()}
        return cls(settings=RewardServiceSettings.model_validate(read["settings"]), sources=sources)

    def freeze(self) -> None:
        """Let this process import the sources as they are here."""
        freeze_sources(self.sources)
        loader: Any = importlib.machinery.SourceFileLoader
        read, status = loader.get_data, loader.path_stats

        def get_data(self: object, path: str) -> bytes:
            return frozen[place] if (place := Path(path)) in frozen else read(self, path)

        def path_stats(self: object, path: str) -> Any:  # noqa: ANN401 - the loader's own
            if Path(path) in frozen:
                # So no compiled file is used, which may be of other text.
                raise OSError(f"{path} is frozen")
            return status(self, path)

        frozen = self.sources
        loader.get_data, loader.path_stats = get_data, path_stats
