"""Text from outside as Unicode: a lone surrogate, half a character, can be in a Python string but in no UTF-8."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8, so it has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str) -> str:
    """Return a text with U+FFFD in the place of each lone surrogate."""
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
