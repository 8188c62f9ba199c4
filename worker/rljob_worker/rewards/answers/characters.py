"""One spelling for what can be written in many: Unicode, LaTeX's spacing, fonts and synonyms."""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/",
    "⁄": "/", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge ",
    "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "∅": r"\emptyset ", "Ø": r"\emptyset ", "ℝ": r"\mathbb{R}", "±": r"\pm ", "∓": r"\mp ", "°": r"\deg ",
    "º": r"\deg ", "˚": r"\deg ", "≡": r"\equiv ", "✓": r"\checkmark ", "✔": r"\checkmark ", "■": r"\blacksquare ",
    "□": r"\square ", "∎": r"\blacksquare ", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "∖": r"\setminus ", "∨": r"\lor ", "。": ".", "、": ",", "“": '"', "”": '"',
    "′": "'", "″": '"', "∴": " ", "…": "...", "，": ",", "µ": "μ",
}  # fmt: skip
_SPELLINGS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "neq": "ne", "varnothing": "emptyset", "infin": "infty", "degree": "deg",
    "varphi": "phi", "varepsilon": "epsilon", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "lg": "log",
    "iff": "Leftrightarrow", "simeq": "approx", "vee": "lor", "wedge": "land", "R": "mathbb{R}",
    "tg": "tan", "ctg": "cot", "arctg": "atan", "sh": "sinh", "cosec": "csc",
    "ldots": "...", "dots": "...", "cdots": "...",
}  # fmt: skip
_SYMBOLS = {
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}",
    "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "colon": ":", "quad": " ", "qquad": " ",
    "therefore": " ", "permil": "‰", "textperthousand": "‰",
    "thinspace": " ", "enspace": " ", "space": " ", "displaystyle": " ", "textstyle": " ", "scriptstyle": " ",
    "limits": " ", "nolimits": " ", "strut": " ", "bf": " ", "rm": " ", "pounds": "£", "euro": "€", "dollar": "\ue000",
    "lparen": "(", "rparen": ")", "nonumber": " ", "hfill": " ", "centerdot": "*", "medspace": " ", "large": " ",
    "Large": " ", "LARGE": " ", "huge": " ", "Huge": " ", "small": " ", "normalsize": " ", "bfseries": " ",
}  # fmt: skip
_LEFT_RIGHT = re.compile(r"\\(?:left|right|middle)(?![a-zA-Z])\.?|\\[bB]igg?[lrm]?(?![a-zA-Z])")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,!;: ]|~)\s*(?=\d{3}(?!\d))")
_TEXT = re.compile(
    r"\\(?:text|textbf|textrm|textit|textsf|texttt|textnormal|textsc|emph|mbox|hbox|mathrm|mathit|mathsf|mathtt|"
    r"operatorname)\*?\s*\{"
)
_LOOKS = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|"
    r"\\(?:mathbf|boldsymbol|bm|mathnormal|mathcal|vec|hat|ensuremath|mathop|underline|uline|"
    r"overrightarrow)(?![a-zA-Z])\s*(?=\{|[A-Za-z](?![A-Za-z])|\\[a-z])"
)
_NUMBERS = re.compile(r"(?:((?:^|\\in) ?)\\mathbf|\\mathbb) ?\{? ?([NZQR])(?![a-zA-Z]) ?\}?")
_MODULUS = re.compile(
    r"\( ?(?:\\(?:b?mod)(?![a-zA-Z])|\\text\{ ?mod ?\}|mod(?![a-zA-Z])) ?\{?(?P<bracketed>\w+)\}? ?\)|"
    r"\\text\{ ?\( ?mod (?P<text>\w+) ?\) ?\}|"
    r"(?:\\[pb]?mod(?![a-zA-Z])|\\text\{ ?mod ?\}) ?(?:\{ ?(?P<braced>\w+) ?\}|(?P<bare>\w+))"
)
_NAMES = (
    "sin cos tan cot sec csc asin acos atan arcsin arccos arctan log ln exp lg gcd lcm tg ctg arctg sh cosec sinh "
    "cosh tanh"
)
_FUNCTIONS = frozenset(_NAMES.split())
MAX_ARGUMENTS = 16
_ARGUMENTS = r"((?:[^(){}]|(?<!\\)\{(?:[^{}]|\{[^{}]*+\})*+\})*+)"
_OF_SEVERAL = re.compile(rf"\\?(?<![a-zA-Z])(gcd|lcm|max|min) ?(?:\({_ARGUMENTS}\)|\\\{{((?:[^(){{}}\\])*+)\\\}})")
"""A function of several numbers, whose commas separate neither answers nor thousands."""
_SEPARATORS = re.compile(r"\\text\{\s*,?\s*(and|or|或|和)\s*,?\s*\}")
_ONE_SPACE = re.compile(r"\s+")
"""Runs of white space, at each of which a pattern would begin anew."""
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d])")


def clean(text: str) -> str:
    """The text in one spelling, without spacing commands, fonts and delimiters of sizes."""
    text = _ONE_SPACE.sub(" ", _unicode(text))
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z({\[$%])", r"\\", text)
    text = re.sub(r"(?<=[\w)}\]])\*\*(?=[\w({-])", "^", text)
    text = text.replace(r"\$", "\ue000")
    text = _GROUPED.sub("", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ".", text).replace(r"\text{:}", ":").replace("{:}", ":")
    text = _LEFT_RIGHT.sub("", text)
    text = re.sub(r"(?<!\\)\\!|\\phantom\{[^{}]*\}|\\hspace\*?\{[^{}]*\}|\\label\{[^{}]*\}", "", text)
    text = _ONE_SPACE.sub(" ", re.sub(r"(?<!\\)\\[,;:> ]|~", " ", text))
    text = re.sub(r"\{([^{}]*)\\(choose|over)(?![a-zA-Z])([^{}]*)\}", _infix, text)
    text = _COMMAND.sub(_spell, text)
    text = _NUMBERS.sub(r"\1\\mathbb{\2}", text)
    text = _LOOKS.sub("", text)
    text = _TEXT.sub(r"\\text{", text)
    text = re.sub(r"\\text\{([^{}]*)\}", _function_or_text, text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))", r"\\deg ", text)
    text = re.sub(r"\^ ?\{? ?(\\text\{(?:st|nd|rd|th)\}|(?:st|nd|rd|th)(?![a-z])) ?\}?", r"\1", text)
    text = _SEPARATORS.sub(r" \1 ", text)
    text = re.sub(r"\\text\{([^{}]+?),? +(and|or) *\}", r"\\text{\1} \2 ", text)
    text = _MODULUS.sub(lambda found: rf"\pmod{{{next(filter(None, found.groups()))}}}", text)
    text = re.sub(r"\\([%#&_])", r"\1", text) if r"\begin" not in text else text.replace(r"\%", "%")
    text = _OF_SEVERAL.sub(_of_two, text)
    text = _SPACED.sub(lambda found: found[0].replace(" ", ""), text)
    text = _dollars(text)
    return _ONE_SPACE.sub(" ", text).strip()


_CIRCLED = re.compile("[①-⑳](?:[,，、 ]*[①-⑳])*")
_INFINITY = re.compile("(正|负)?无穷大?(?![多个])")


def _unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _INFINITY.sub(lambda found: ("-" if found[1] == "负" else "") + r"\infty ", text)
    text = _CIRCLED.sub(lambda found: ",".join(filter(_is_circled, found[0])), text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_SUBSCRIPTS)}}}", text)
    parts = []
    for character in text:
        if character in _UNICODE or _is_circled(character):
            parts.append(_UNICODE.get(character, character))
            continue
        whole = unicodedata.normalize("NFKC", character)
        if "⁄" in whole and len(whole) > 1:
            top, _, bottom = whole.partition("⁄")
            whole = rf" \frac{{{top}}}{{{bottom or '1'}}}"
        elif unicodedata.category(character) == "Cf":
            continue
        parts.append("".join(_UNICODE.get(one, one) for one in whole))
    return "".join(parts)


def _is_circled(character: str) -> bool:
    """Whether it numbers a statement: ①③ names two of them, and is no 13."""
    return "①" <= character <= "⑳"


def _spell(found: re.Match[str]) -> str:
    name = found[1]
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    spelled = _SPELLINGS.get(name, name)
    return spelled if spelled == "..." else "\\" + spelled


def _infix(found: re.Match[str]) -> str:
    return f"\\{'binom' if found[2] == 'choose' else 'frac'}{{{found[1]}}}{{{found[3]}}}"


def _of_two(found: re.Match[str]) -> str:
    """`gcd(a, b, c)` as a function of two, `gcd{gcd{a}{b}}{c}`."""
    name, parts = found[1], re.split(r",(?![^{}]*\})", found[2] or found[3] or "")
    if len(parts) == 1 or not all(map(str.strip, parts)):
        return found[0]
    whole = parts[0]
    for other in parts[1:MAX_ARGUMENTS]:
        whole = f"\\{name}{{{whole}}}{{{other}}}"
    return whole if len(parts) <= MAX_ARGUMENTS else found[0]


def _function_or_text(found: re.Match[str]) -> str:
    """Functions, and the constants that are set upright, are no text."""
    content = found[1].strip()
    if content in _FUNCTIONS:
        return "\\" + _SPELLINGS.get(content, content) + " "
    if content in ("e", "i", "d") or (content and not re.search(r"\w|[$€£¥%]", content)):
        return content
    return f"\\text{{{found[1]}}}"


def _dollars(text: str) -> str:
    """Without the dollars that delimit mathematics; one that has no partner is money."""
    if text.count("$") % 2 == 0:
        text = text.replace("$", " ")
    return re.sub(r"(?<!\\)\\[()\[\]]", " ", text.replace("\ue000", "$"))


_END_MARK = re.compile(r"(?<=\S) ?\\(?:checkmark|blacksquare|square|Box|qed)$")


def unwrap(text: str) -> str:
    """Without what surrounds an answer and says nothing: white space, a point, stars, braces, a box, a check mark."""
    while True:
        before = text
        text = text.strip().strip("`").strip()
        if not text.endswith("..."):
            text = _END_MARK.sub("", text.rstrip(".,;")).rstrip()
            text = text.removesuffix("\\\\")
        for mark in ("**", "__", "*", '"', "'"):
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        for opening in ("{", r"\text{", r"\boxed{", r"\fbox{", r"\framebox{", r"\displaylines{"):
            if text.startswith(opening) and closing_brace(text, len(opening)) == len(text) - 1:
                text = text[len(opening) : -1]
        if text == before:
            return text


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one before `start`; None where none does."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if found[0] == "{":
            depth += 1
        elif found[0] == "}":
            depth -= 1
            if depth == 0:
                return found.start()
    return None
