"""What a terminal is shown while text is made."""

from meshwright.data.text_stream import UNFINISHED


def printable(text: str) -> str:
    """The text with everything that could steer a terminal replaced; line ends and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else UNFINISHED for letter in text)
