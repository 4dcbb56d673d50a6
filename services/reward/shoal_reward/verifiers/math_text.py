"""Rewrites the text of a mathematical answer into LaTeX that the parser reads as people do, and refuses what would take it forever."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

Percent = Literal["sign_dropped", "hundredth"]

# The parser's time grows fast with nested parentheses, slowly with nested fractions.
MAX_BRACKET_DEPTH = 8
MAX_BRACE_DEPTH = 10
MAX_OPERATORS = 3
MAX_EXPONENT_DIGITS = 6
MAX_FACTORIAL_DIGITS = 5
MAX_COUNT_DIGITS = 4
MAX_NUMBER_CHARS = 1000

_SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "²": "^2",
        "³": "^3",
        "°": "",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "£": "",
        "€": "",
        "¥": "",
    }
)
_REWRITES = (
    (re.compile(r"√\s?\(?(\d+)\)?"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), ","),
    (re.compile(r"(?<=\d)(?:\\[,!;: ]|~)(?=\d{3})"), ","),
    (re.compile(r"\\[,!;:](?!\w)|\\[,!;:]|~"), " "),
    (re.compile(r"\\?\$"), ""),
    (re.compile(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![A-Za-z])\\?sqrt\s?\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
)
_PERCENT = re.compile(
    r"\s{0,4}(?:\\?%|\\text\s?\{\s{0,4}(?:percent(?:age)?|pct)\s{0,4}\}|(?<![A-Za-z\\])(?:percent(?:age)?|pct)(?![A-Za-z]))", re.IGNORECASE
)
_SHARE = re.compile(r"([^%=<>,;]*[^%=<>,;\\])\\%")
_GROUPED = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)(\.\d+)?")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,6})")
_MIXED = re.compile(r"([-+]?)(\d+)(?:\s+|\s*\\frac\s*\{\s*|\s+and\s+)(\d+)(?:\s*/\s*|\s*\}\s*\{\s*)(\d+)\s*\}?")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\s?\{?(\d+)\}?")
_TEXT_UNIT = re.compile(r"\\(?:text|mathrm|mbox|textrm|operatorname)\s?\{[^{}]*\}(?:\s?\^\s?(?:\d|\{\d\}))?$")
_NAMED_UNIT = re.compile(
    r"(?:\s*(?:cm|mm|km|kg|mg|ml|lbs?|oz|ft|mph|hrs?|km/h|m/s|sq\.? ?(?:cm|m|ft|in)|cubic [a-z]{1,12}|square [a-z]{1,12})"
    r"|\s+(?:m|g|s|h|l|L|in)|(?:\s+[a-z]{3,20}){1,4})(?:\s?\^\s?(?:[23]|\{[23]\}))?$"
)
_NO_UNIT = re.compile(r"(?:\s|^)(?:hundred|thousand|million|billion|trillion|dozen|half|halves|thirds?|and|or|mod|squared|cubed)(?:\s|$)")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_INTEGER = r"[-+]?\d+"
_PLAIN = re.compile(
    rf"(?P<integer>{_INTEGER})|(?P<decimal>[-+]?(?:\d+\.\d*|\.\d+))"
    r"|(?P<sign>[-+]?)(?:\\frac\s?\{\s?(?P<n>-?\d+)\s?\}\s?\{\s?(?P<d>-?\d+)\s?\}|(?P<n2>\d+)\s?/\s?(?P<d2>\d+))"
)
_BASE = re.compile(r"[0-9A-Fa-f]+_\{?\s?(?:\\text\{)?(\w+?)\}{0,2}")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"([-+]?\d+(?:\.\d+)?)\s*(?:\\text\s?\{{\s*)?({'|'.join(_SCALES)})(?:\s*\}})?")
_WORDS = re.compile(r"[A-Za-z]{4,}|(?i:no|yes|odd|on|off|up)|[A-Za-z'.-]{2,}(?:\s+[A-Za-z'.-]+)+")
_LABEL = re.compile(r"\(\s*([A-Za-z])\s*\)")


def rewritten(text: str, percent: Percent) -> str:
    """Rewrite an answer: symbols, spacing, percent signs, thousands separators, mixed numbers, repeating decimals, powers of ten.

    Args:
        text: an answer, found by `find_answer`.
        percent: `sign_dropped`: 50% is 50; `hundredth`: 50% is 50/100.
    Returns: LaTeX.
    """
    text = text.translate(_SYMBOLS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _PERCENT.sub("" if percent == "sign_dropped" else r"\\%", text)
    text = " ".join(text.split()).rstrip(".,;")
    if (share := _SHARE.fullmatch(text)) is not None:
        return rf"({share[1]}) \cdot \frac{{1}}{{100}}"
    if (label := _LABEL.fullmatch(text)) is not None:
        return label.group(1)
    for pattern, rewrite in _WHOLE_REWRITES:
        if (found := pattern.fullmatch(text)) is not None:
            return rewrite(found)
    return text


def _grouped(found: re.Match[str]) -> str:
    return found[1] + re.sub("[, ]", "", found[2]) + (found[3] or "")


def _mixed(found: re.Match[str]) -> str:
    whole, numerator, denominator = int(found[2]), int(found[3]), int(found[4])
    return rf"{found[1]}\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _repeating(found: re.Match[str]) -> str:
    sign, whole, fixed, repeated = found[1], found[2] or "0", found[3], found[4]
    value = Fraction(int(whole + fixed + repeated) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


_WHOLE_REWRITES = (
    (_GROUPED, _grouped),
    (_SCIENTIFIC, lambda found: rf"{found[1]} \cdot 10^{{{int(found[2])}}}"),
    (_SCALED, lambda found: rf"{found[1]} \cdot 10^{{{_SCALES[found[2]]}}}"),
    (_MIXED, _mixed),
    (_REPEATING, _repeating),
)


def without_unit(text: str) -> str:
    """Drop a unit after a number; a variable is none: only what follows a value without letters is a unit, and 2m is 2 times m."""
    for pattern in (_TEXT_UNIT, _NAMED_UNIT):
        found = pattern.search(text)
        if found is None:
            continue
        value, unit = text[: found.start()].rstrip(" \\"), found.group()
        if value and value[-1] in "0123456789})" and not _VARIABLE.search(_COMMAND.sub(" ", value)) and not _NO_UNIT.search(unit):
            return value
    return text


def plain_number(text: str) -> tuple[Fraction, bool] | None:
    """Read an integer, a decimal or a fraction of integers.

    Returns: the value, and whether it was a decimal; None if the text is something else, or too long.
    """
    found = _PLAIN.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    if found is None:
        return None
    if found["integer"] is not None or found["decimal"] is not None:
        return Fraction(text), found["decimal"] is not None
    numerator, denominator = int(found["n"] or found["n2"]), int(found["d"] or found["d2"])
    if denominator == 0:
        return None
    return Fraction(-numerator if found["sign"] == "-" else numerator, denominator), False


def same_bases(first: str, second: str) -> bool:
    """Whether two texts name no different bases, as 12_5 and 12_7 do; the parser drops them."""
    bases = [found.group(1) for text in (first, second) if (found := _BASE.fullmatch(text)) is not None]
    return len(bases) < 2 or bases[0] == bases[1]


def is_words(text: str) -> bool:
    """Whether a text is words, which the parser would read as a product of letters."""
    return _WORDS.fullmatch(text) is not None


def plain(text: str) -> str:
    """What two texts have in common that differ in blanks only."""
    return re.sub(r"\s+", "", text)


def refusal(text: str, max_chars: int) -> str | None:
    """Say why an expression is not computed with: it is too long, too deep, or has numbers that take forever; None if it is fine."""
    if len(text) > max_chars:
        return f"it has {len(text)} characters, above {max_chars}"
    if not text.isprintable():
        return "it holds characters that cannot be printed"
    if _depth(text.replace("\\{", "(").replace("\\}", ")"), "([", ")]") > MAX_BRACKET_DEPTH or _depth(text, "{", "}") > MAX_BRACE_DEPTH:
        return f"it is nested more than {MAX_BRACKET_DEPTH} brackets or {MAX_BRACE_DEPTH} braces deep"
    if len(_OPERATOR.findall(text)) > MAX_OPERATORS:
        return f"it has more than {MAX_OPERATORS} integrals, sums, products and limits"
    if _is_too_high(text):
        return "an exponent is too large"
    return next((reason for pattern, reason in _REFUSALS if pattern.search(text)), None)


def _depth(text: str, opening: str, closing: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in opening) - (character in closing)
        deepest = max(deepest, depth)
    return deepest


def _is_too_high(text: str) -> bool:
    """Whether a number in an exponent has an exponent of its own that makes it too large."""
    return any(int(found[2]) * math.log10(max(int(found[1]), 2)) > MAX_EXPONENT_DIGITS for found in _TOWER.finditer(text))


_TOWER = re.compile(r"\^\s*[{(]*\s*(\d{1,6})\s*[)}]*\s*\^\s*[{(]*\s*(\d{1,9})")
_OPERATOR = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![A-Za-z])")
_REFUSALS = (
    (re.compile(r"_\s*\{[^{}]*_\s*\{[^{}]*_\s*\{"), "it has subscripts of subscripts"),
    (re.compile(r"(?:[-+]\s*){8}"), "it has too many signs in a row"),
    (re.compile(rf"\^\s*[{{(]*\s*[-+]?\s*\d[\d,]{{{MAX_EXPONENT_DIGITS},}}"), "an exponent is too large"),
    (re.compile(r"\^\s*[{(][^{}()^]{0,100}\^\s*[{(][^{}()^]{0,100}\^|\^\s*\w{1,20}\s*\^\s*\w{1,20}\s*\^"), "it is a tower of powers"),
    (re.compile(r"\^\s*[{(]*\s*\d{3,}\s*[)}]*\s*!"), "an exponent is too large"),
    (re.compile(rf"\d{{{MAX_FACTORIAL_DIGITS + 1},}}\s*[)}}]*\s*!"), "a factorial is too large"),
    (
        re.compile(rf"\\(?:[dt]?binom|choose|sum|prod|int|lim)(?![A-Za-z]).*?\d{{{MAX_COUNT_DIGITS + 1},}}"),
        "a binomial, sum, product or integral has a number that is too large",
    ),
    (re.compile(rf"\d{{{MAX_COUNT_DIGITS + 1},}}\s*\\choose"), "a binomial has a number that is too large"),
)
