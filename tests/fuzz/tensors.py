"""Safetensors files whose header was changed: other names, types, shapes and places, with a length that fits or not."""

import json
import struct

from hypothesis import strategies as st

from fuzz.fuzzing import changed

TYPES = ["F32", "F16", "BF16", "I64", "I8", "BOOL", "F64", "F8_E4M3", "C64", "X"]


@st.composite
def changed_tensors(draw: st.DrawFn, data: bytes) -> bytes:
    """A file with tensors changed in its header."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = draw(st.sampled_from(["rename", "type", "shape", "drop", "any", "values", "length"]))
    names = sorted(name for name in header if name != "__metadata__")
    name = draw(st.sampled_from(names))
    if kind == "rename":
        header[draw(st.sampled_from(["x", "../x", "", "fc.weight/step", "fc.weight", "a/b/c"]))] = header.pop(name)
    elif kind == "type":
        header[name]["dtype"] = draw(st.sampled_from(TYPES))
    elif kind == "shape":
        shape = header[name]["shape"]
        header[name]["shape"] = draw(st.sampled_from([shape[::-1], [*shape, 1], [1, *shape], [], [2**62, 4], [-1]]))
    elif kind == "drop":
        del header[name]
    elif kind == "any":
        header = draw(changed(header))
    elif kind == "values":
        fill = draw(st.sampled_from([b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\x00\x00\x00\x00"]))
        start, stop = header[name]["data_offsets"]
        body = body[:start] + (fill * (stop - start))[: stop - start] + body[stop:]
    text = json.dumps(header).encode()
    wrong = draw(st.sampled_from([0, 1, 2**40, 2**63])) if kind == "length" else 0
    return struct.pack("<Q", min(len(text) + wrong, 2**64 - 1)) + text + body
