"""Refusals of the core in the words of a dialect.

A dialect's request is translated into a chat request; what the core refuses there names chat's
fields. `Names` writes the names that the client used instead. Texts in quotes are the client's
own and stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from metainfer.core.errors import RequestError
from metainfer.server.bodies import convert
from metainfer.server.schemas import ChatRequest

_QUOTED = r"(?<!\w)'[^']*'|\"[^\"]*\""  # no quote: model's
_PLACE = r"messages\[(\d+)\]"


class Names:
    """`table`: pattern in the core's words -> the dialect's words; the first that fits counts.
    `places[i]`: where the client wrote what became ``messages[i]``."""

    def __init__(self, table: Mapping[str, str], places: Sequence[str]) -> None:
        self._words = tuple(table.values())
        self._places = places
        names = "|".join(f"({pattern})" for pattern in table)
        self._pattern = re.compile(f"({_QUOTED})|{_PLACE}|{names}")

    def chat_request(self, fields: Mapping[str, Any]) -> ChatRequest:
        """The chat request with `fields`, those that are None left out.

        Raises:
            RequestError: 400, in the dialect's words.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return convert(given, ChatRequest)
        except RequestError as error:
            raise self.translated(error) from error

    def translated(self, error: RequestError) -> RequestError:
        """`error` as the client of this dialect must read it."""
        return RequestError(
            self._text(error.cause),
            self._text(error.remedy),
            status=error.status,
            error_type=error.error_type,
            param=None if error.param is None else self._text(error.param),
            code=error.code,
            retry_after_s=error.retry_after_s,
        )

    def _text(self, text: str) -> str:
        return self._pattern.sub(self._word, text)

    def _word(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            return match[0]
        if match[2] is not None:
            place = int(match[2])
            return self._places[place] if place < len(self._places) else match[0]
        assert match.lastindex is not None
        return self._words[match.lastindex - 3]
