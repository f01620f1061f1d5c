"""Numbers in sentences and tables: counts with their noun, signed numbers, amounts with units, ranges and lists.

Everything that is printed for people uses these, so that there is no "1 rounds", "-0.0 points" or "0.00118 million".
"""

import shutil
import textwrap
from collections.abc import Sequence

IRREGULAR = {"reply": "replies", "class": "classes", "entry": "entries"}


def pluralize(number: float, word: str) -> str:
    """A count with its noun.

    Parameters
    ----------
    number : how many.
    word : the noun in the singular.

    Examples
    --------
    >>> pluralize(1, "round"), pluralize(1200, "reply")
    ('1 round', '1,200 replies')
    """
    return f"{number:,} {plural(word, number)}"


def plural(word: str, number: float) -> str:
    """A noun as it follows a number: "rounds", or "round" after 1.

    Parameters
    ----------
    word : the word in the singular.
    number : how many.
    """
    return word if number == 1 else IRREGULAR.get(word, f"{word}s")


def format_range(low: int, high: int, word: str) -> str:
    """A range of counts; one count if both ends are equal.

    Parameters
    ----------
    low, high : its ends.
    word : what is counted, in the singular.

    Examples
    --------
    >>> format_range(90, 100, "example"), format_range(100, 100, "example")
    ('90 to 100 examples', '100 examples')
    """
    return pluralize(high, word) if low == high else f"{low:,} to {pluralize(high, word)}"


def format_number(value: float, digits: str = ".1f", signed: bool = False) -> str:
    """A number; what rounds to zero has no sign.

    Parameters
    ----------
    value : the number.
    digits : how it is rounded, as a format specification.
    signed : whether positive numbers have a sign too.

    Examples
    --------
    >>> format_number(-0.04), format_number(0.06, signed=True)
    ('0.0', '+0.1')
    """
    text = f"{value:{'+' if signed else ''}{digits}}"
    return text.lstrip("+-") if float(text) == 0 else text


def format_points(value: float, digits: str = ".1f", signed: bool = False) -> str:
    """A difference of percentages.

    Parameters
    ----------
    value : the difference.
    digits, signed : as for `format_number`.

    Examples
    --------
    >>> format_points(1.0), format_points(2.5, signed=True)
    ('1.0 points', '+2.5 points')
    """
    return f"{format_number(value, digits, signed)} points"


def format_amount(count: float) -> str:
    """A large number with three digits and a unit: thousand (k), million (M), billion (G).

    Parameters
    ----------
    count : the number.

    Examples
    --------
    >>> format_amount(1180), format_amount(1_920_000)
    ('1.18 k', '1.92 M')
    """
    return _scale(count, ("", "k", "M", "G", "T")).rstrip()


def format_bytes(count: float) -> str:
    """A number of bytes in a readable unit.

    Parameters
    ----------
    count : the number of bytes.

    Examples
    --------
    >>> format_bytes(0), format_bytes(2_030_000)
    ('0 B', '2.03 MB')
    """
    return _scale(count, ("B", "kB", "MB", "GB", "TB"))


def _scale(count: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} {units[-1]}" if abs(count) < 999.5 else f"{count:,.0f} {units[-1]}"


def format_seconds(seconds: float) -> str:
    """A duration: in seconds, from 100 seconds on as hours, minutes and seconds.

    Parameters
    ----------
    seconds : the duration.

    Examples
    --------
    >>> format_seconds(42.3), format_seconds(3700)
    ('42 s', '1:01:40')
    """
    count = round(seconds)
    return f"{count} s" if count < 100 else f"{count // 3600}:{count // 60 % 60:02}:{count % 60:02}"


def join_words(parts: Sequence[str]) -> str:
    """An enumeration.

    Parameters
    ----------
    parts : at least one.

    Examples
    --------
    >>> join_words(["large", "medium", "small"])
    'large, medium and small'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def terminal_width() -> int:
    """Columns of the terminal; 80 where there is none and COLUMNS is not set."""
    return max(shutil.get_terminal_size().columns, 40)


def wrap(text: str, indent: str = "", hanging: str | None = None) -> str:
    """A paragraph, wrapped to the terminal.

    Parameters
    ----------
    text : one paragraph.
    indent : before its first line.
    hanging : before its other lines; None: the same.
    """
    rest = indent if hanging is None else hanging
    options = {"break_on_hyphens": False, "break_long_words": False}
    return textwrap.fill(text, terminal_width(), initial_indent=indent, subsequent_indent=rest, **options)  # type: ignore[arg-type]


def format_magnitude(value: float) -> str:
    """A number as a label of an axis: 500, 20k, 3M.

    Parameters
    ----------
    value : the number.

    Examples
    --------
    >>> format_magnitude(20_000), format_magnitude(500)
    ('20k', '500')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
