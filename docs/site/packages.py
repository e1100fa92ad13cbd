"""docs/packages.svg, the packages in the order of the import contract: python docs/site/packages.py"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs/packages.svg"
WIDTH, HEIGHT, GAP, TOP = 640, 30, 6, 34  # pixels
PARTIES = {"protocol": "#bf8700", "training": "#0072b2"}  # the server's and the client's, which never import each other
STYLE = """text{font:14px ui-monospace,SFMono-Regular,Menlo,monospace;fill:#1f2328;text-anchor:middle}
.note{font:13px system-ui,sans-serif;fill:#59636e}rect{fill:#f6f8fa;stroke:#8c959f}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}rect{fill:#151b23;stroke:#656c76}}"""


def picture(layers: Sequence[str]) -> str:
    """An SVG of ``layers``, the highest first, each a name or several with | between them."""
    shapes = []
    for row, layer in enumerate(layers):
        names = [name.strip() for name in layer.split("|")]
        width = (WIDTH - GAP * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            x, y = column * (width + GAP), TOP + row * (HEIGHT + GAP)
            colour = f' style="stroke:{PARTIES[name]};stroke-width:2.5"' if name in PARTIES else ""
            shapes.append(f'<rect x="{x + 1:g}" y="{y}" width="{width:g}" height="{HEIGHT}" rx="5"{colour}/>')
            shapes.append(f'<text x="{x + 1 + width / 2:g}" y="{y + 20}">{name}</text>')
    height = TOP + len(layers) * (HEIGHT + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2} {height}" role="img">'
        f"<title>The packages of mpu_cli</title><style>{STYLE}</style>"
        f'<text class="note" x="{WIDTH / 2:g}" y="20">A package imports only from those below it.</text>'
        f"{''.join(shapes)}</svg>\n"
    )


def layers_of(project: Path) -> list[str]:
    """The layers of the import contract."""
    sys.path.insert(0, str(ROOT))
    from mpu_cli.toml import read_toml

    contract, *_ = read_toml(project)["tool"]["importlinter"]["contracts"]
    return contract["layers"]  # type: ignore[no-any-return]


if __name__ == "__main__":
    TARGET.write_text(picture(layers_of(ROOT / "pyproject.toml")), encoding="utf-8")
