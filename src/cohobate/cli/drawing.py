# SPDX-License-Identifier: Apache-2.0
"""Two segmentations of one text above each other: chunks as columns, for the terminal and as SVG.

A chunk's columns are as wide as its wider side, so a boundary that both share stands under itself, and a boundary that
only one has stands alone. Spaces and line ends are made visible; bytes that are no text alone are shown as `<e2>`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.text import Text

_VISIBLE = {" ": "·", "\n": "↵", "\t": "→", "\r": "←"}
_SHADES = ("on grey23", "on dark_blue")
_FILLS = ("#dbe7f6", "#f6e7d2")  # alternate from chunk to chunk
_CHARACTER, _ROW, _MARGIN = 8.4, 26, 12  # SVG units


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One chunk, or a token that stands in none (then one side is empty): the shown text of its tokens."""

    student: tuple[str, ...]
    teacher: tuple[str, ...]

    @property
    def width(self) -> int:
        return max(_width(self.student), _width(self.teacher))


def shown(piece: bytes) -> str:
    """A token's bytes as people can tell them apart."""
    text = piece.decode("utf-8", "surrogateescape")
    return "".join(
        f"<{ord(c) - 0xDC00:02x}>"
        if "\udc80" <= c <= "\udcff"
        else _VISIBLE.get(c, c if c.isprintable() else f"<{ord(c):02x}>")
        for c in text
    )


def columns(
    student: Sequence[str], teacher: Sequence[str], chunks: Sequence[tuple[int, int, int, int]]
) -> list[Column]:
    """Chunks in order, and between them the tokens that stand in none."""
    found: list[Column] = []
    at_s = at_t = 0
    for s0, s1, t0, t1 in [*chunks, (len(student), len(student), len(teacher), len(teacher))]:
        found += [Column(student=(token,), teacher=()) for token in student[at_s:s0]]
        found += [Column(student=(), teacher=(token,)) for token in teacher[at_t:t0]]
        if s1 > s0:
            found.append(Column(student=tuple(student[s0:s1]), teacher=tuple(teacher[t0:t1])))
        at_s, at_t = s1, t1
    return found


def lines(found: Sequence[Column], width: int) -> list[list[Column]]:
    """Columns broken into lines of at most `width` characters, labels and separators included."""
    broken: list[list[Column]] = [[]]
    used = 0
    for column in found:
        if broken[-1] and used + column.width + 1 > width - 10:
            broken.append([])
            used = 0
        broken[-1].append(column)
        used += column.width + 1
    return broken


def terminal(found: Sequence[Column], width: int) -> list[Text]:
    """Two lines of text for each line of chunks, and an empty one; tokens are divided by `│`, chunks by `┃`."""
    drawn: list[Text] = []
    number = 0
    for line in lines(found, width):
        for side in ("student", "teacher"):
            text = Text(f"{side:<9}")
            for i, column in enumerate(line):
                tokens = getattr(column, side)
                text.append("│".join(tokens).ljust(column.width), style=_SHADES[(number + i) % 2])
                text.append("┃")
            drawn.append(text)
        number += len(line)
        drawn.append(Text(""))
    return drawn[:-1]


def svg(found: Sequence[Column], *, student: str, teacher: str, width: int = 96) -> str:
    """The same as a picture that needs no font but monospace: chunks as bands, tokens as boxes."""
    broken = lines(found, width)
    label = max(len(student), len(teacher), 7) * _CHARACTER + 2 * _MARGIN
    widest = max(sum(column.width + 2 for column in line) for line in broken) * _CHARACTER
    height = len(broken) * (2 * _ROW + 22) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{label + widest + _MARGIN:.0f}" height="{height:.0f}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        "<title>Two segmentations of one text</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    number = 0
    for row, line in enumerate(broken):
        top = _MARGIN + row * (2 * _ROW + 22)
        for i, name in enumerate((student, teacher)):
            parts.append(f'<text x="{_MARGIN}" y="{top + i * _ROW + 18:.1f}" fill="#444">{escape(name)}</text>')
        x = label
        for column in line:
            span = (column.width + 1.4) * _CHARACTER
            whole = bool(column.student and column.teacher)
            if whole:
                fill = _FILLS[number % 2]
                parts.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{span:.1f}" height="{2 * _ROW}" rx="4" fill="{fill}"/>'
                )
            for i, tokens in enumerate((column.student, column.teacher)):
                parts += _boxes(tokens, x, top + i * _ROW, span, "#345" if whole else "#b33")
            x += span + 0.6 * _CHARACTER
            number += 1
    return "\n".join([*parts, "</svg>\n"])


def _boxes(tokens: Sequence[str], x: float, y: float, span: float, stroke: str) -> list[str]:
    """Boxes that fill `span`, each as wide as its token's share of the characters."""
    total = sum(max(len(token), 1) for token in tokens)
    drawn = []
    for token in tokens:
        width = span * max(len(token), 1) / total
        drawn.append(
            f'<rect x="{x + 1:.1f}" y="{y + 2}" width="{width - 2:.1f}" height="{_ROW - 4}" rx="3" fill="none" '
            f'stroke="{stroke}" stroke-width="1"/>'
        )
        middle = f'x="{x + width / 2:.1f}" y="{y + 18}" text-anchor="middle"'
        drawn.append(f'<text {middle} xml:space="preserve">{escape(token)}</text>')
        x += width
    return drawn


def _width(tokens: Sequence[str]) -> int:
    return sum(len(token) for token in tokens) + max(0, len(tokens) - 1)
