"""The colours of all figures, from palette.json: each has one meaning, on light and dark pages."""

import json
from pathlib import Path

PALETTE = json.loads(Path(__file__).with_name("palette.json").read_text())
INKS, PAGES, PANELS = (PALETTE[name] for name in ("inks", "pages", "panels"))  # by theme
MEMORY, PHASES, COLLECTIVES = (PALETTE[name] for name in ("memory", "phases", "collectives"))


def text_on(colour: str) -> str:
    return "#ffffff" if colour in PALETTE["white_text"] else "#0d1117"
