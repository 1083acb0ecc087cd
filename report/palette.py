"""The colours of all figures, from palette.json: each has one meaning, on light and dark pages."""

import json
from pathlib import Path

PALETTE = json.loads(Path(__file__).with_name("palette.json").read_text())
THEMES = PALETTE["themes"]  # of light and of dark pages: ink, page, panel
MEMORY = PALETTE["memory"]
PHASES = PALETTE["phases"]
COLLECTIVES = PALETTE["collectives"]


def theme_style() -> str:
    """The style of an SVG with the variables ``--ink``, ``--page`` and ``--panel``. A browser shows
    it in the theme of the page that has it (an older one: of the system), so each picture paints
    its own background, on which its text is legible either way."""
    dark = f"@media(prefers-color-scheme:dark){{svg{{{variables('dark')}}}}}"
    return f"<style>svg{{{variables('light')}}}{dark}</style>"


def variables(theme: str) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in THEMES[theme].items())


def text_on(colour: str) -> str:
    return "#ffffff" if colour in PALETTE["white_text"] else "#0d1117"
