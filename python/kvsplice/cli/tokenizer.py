"""Text to tokens with a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.cli.errors import BadLineError, CliError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TextTokenizer"]


class TextTokenizer:
    """A tokenizer that neither cuts nor pads.

    Parameters
    ----------
    path : str
        A ``tokenizer.json``.

    Raises
    ------
    CliError
        The file cannot be read or is no tokenizer, or the package ``tokenizers`` is missing.
    """

    def __init__(self, path: str) -> None:
        try:
            # Untyped here, so that the type check does not depend on an optional package.
            import tokenizers
        except ImportError:
            raise CliError("text needs the package tokenizers: pip install 'kvsplice[text]'") from None
        try:
            definition = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise CliError(f"{path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise CliError(f"{path}: not a tokenizer.json: invalid UTF-8") from None
        try:
            tokenizer: Any = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the package raises bare Exception
            raise CliError(f"{path}: not a tokenizer.json: {str(error).splitlines()[0]}") from None
        # Many files carry the training setup's truncation to some hundred tokens, which would cut requests silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> NDArray[np.uint32]:
        """Return the token ids of ``text``."""
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            # Half of a surrogate pair passes JSON and has no UTF-8.
            raise BadLineError("the text holds a lone surrogate, which has no UTF-8") from None
        return np.array(ids, dtype=np.uint32)
