"""Text from files, made safe for a terminal."""

import re

# C0, DEL and C1; marks and overrides of direction; separators of lines; halves of characters, which cannot be encoded.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, lines: bool = False) -> str:
    """`text` without what steers a terminal or turns a line around: such characters are written as `\\x1b`, `\\n`, `\\u202e`.
    Where it may have `lines`, those stay."""
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
