"""A completion request as a host's Go code writes it: exact keys, zeros omitted, shortest float32, escaped text."""

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from scripts.tools.host.lib.generations import Generation


@dataclass(frozen=True)
class Medium:
    """One image or audio clip."""

    data: bytes
    kind: str = "image"


@dataclass(frozen=True)
class Request:
    """A request of the host's upper layers; each generation sends the part that it knows.

    `options` are final values; None stands for Go's nil. Those of a user who set nothing are
    `Generation.default_options`.
    """

    prompt: str
    options: Mapping[str, object] | None = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    media: Sequence[Medium] | None = None
    format: object = None
    intermediate_metrics: bool = False


def encode(request: Request, generation: Generation) -> bytes:
    options = None if request.options is None else _options(request.options, generation)
    media = None
    if request.media is not None:
        media = [
            {"data": base64.b64encode(medium.data).decode(), "id": number, "Kind": medium.kind}
            for number, medium in enumerate(request.media)
        ]
    values: dict[str, object] = {
        "prompt": request.prompt,
        "media": media,
        "options": options,
        "logprobs": request.logprobs,
        "toplogprobs": request.top_logprobs,
        "format": request.format,
        "includeintermediatemetrics": request.intermediate_metrics,
    }
    body = {key: values[key.lower()] for key in generation.request_keys}
    if body.get("options", ...) is None:
        del body["options"]  # the early hosts' struct tag says omitempty
    return go_json(body).encode()


def wire_format(value: object, generation: Generation, closings: Sequence[str] = ()) -> object:
    """`Request.format` for the `format` that a user gave: "json" or a JSON schema.

    A thinking model's `closings` let free text come first in the generation that does it in one pass.
    """
    if generation.format == "none" or value in (None, ""):
        return None
    if generation.format == "raw":
        return value
    schema = {"type": "json_schema", "json_schema": {"type": "object"} if value == "json" else value}
    if not closings or generation.two_passes:
        return {"type": "structural_tag", "format": schema}
    strings = [{"type": "const_string", "value": closing} for closing in closings]
    closing = strings[0] if len(strings) == 1 else {"type": "or", "elements": strings}
    tail = {"type": "optional", "content": {"type": "sequence", "elements": [closing, schema]}}
    free = {"type": "any_text", "excludes": list(closings)}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [free, tail]}}


def _options(options: Mapping[str, object], generation: Generation) -> dict[str, object]:
    """The options that this generation knows, in its order, without zeros."""
    return {key: options[key] for key in generation.option_keys if options.get(key)}


def go_json(value: object) -> str:
    """`encoding/json` of Go: compact, `<`, `>`, `&`, U+2028 and U+2029 escaped, floats as float32."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        for character in "<>&\u2028\u2029":
            text = text.replace(character, f"\\u{ord(character):04x}")
        return text
    if isinstance(value, float):
        return go_float32(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{go_json(str(key))}:{go_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(go_json(item) for item in value) + "]"
    return json.dumps(value)


def go_float32(value: float) -> str:
    """The shortest digits that name the same float32; an exponent below 1e-6 and from 1e21 on."""
    (single,) = struct.unpack("f", struct.pack("f", value))
    digits = next(
        text
        for precision in range(1, 10)
        if struct.unpack("f", struct.pack("f", float(text := f"{single:.{precision - 1}e}")))[0] == single
    )
    if single == 0 or Decimal("1e-6") <= abs(Decimal(digits)) < Decimal("1e21"):
        return f"{Decimal(digits):f}"
    mantissa, _, exponent = digits.partition("e")
    return f"{mantissa}e{exponent[0]}{exponent[1:].lstrip('0')}"
