"""What strangers say, as text that a terminal only shows."""


def plain(text: str) -> str:
    """One line without a character that could command a terminal, or turn what comes after it."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
