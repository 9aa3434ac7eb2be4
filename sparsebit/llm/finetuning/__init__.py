"""Fine-tuning of packed language models: adapters in float, the backbone packed."""

from __future__ import annotations
