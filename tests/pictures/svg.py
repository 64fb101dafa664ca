"""Parts of plain SVG pictures: no script, no font and no style from elsewhere."""

from xml.sax.saxutils import escape

from rich._export_format import CONSOLE_SVG_FORMAT

FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
INK, GREY, LINE = "#111827", "#6b7280", "#e5e7eb"


def text(x, y, words, **attributes):
    """Return a text element."""
    return f'<text x="{x:.1f}" y="{y:.1f}"{_written(attributes)}>{escape(words)}</text>'


def box(x, y, width, height, **attributes):
    """Return a rectangle with round corners."""
    named = {"rx": 4, **attributes}
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{_written(named)}/>'


def line(start, end, **attributes):
    """Return a line between two points."""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{_written(attributes)}/>'


def picture(width, height, title, parts):
    """Return a picture on a white card."""
    frame = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="{FONTS}" font-size="13"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            box(0.5, 0.5, width - 1, height - 1, rx=8, fill="#ffffff", stroke=LINE),
            *parts,
            "</svg>\n",
        )
    )


def terminal_format():
    """Return rich's template of a terminal without the fonts that it would load from the network."""
    before, _, rest = CONSOLE_SVG_FORMAT.partition("    @font-face {{")
    *_, after = rest.split("    }}\n\n", 1)
    return (before + after).replace("Fira Code, monospace", "'DejaVu Sans Mono', Menlo, Consolas, monospace")


def _written(attributes):
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
