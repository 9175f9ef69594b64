#!/usr/bin/env python3
"""Writes a data set as a file that `Feed::load` takes, from plain arrays and with nothing but Python.

    from replay_file import write
    write("data.safetensors",
          leaves={"obs": ("F32", [17], True),          # element type, shape of one value, whether an observation
                  "action": ("F32", [6], False),
                  "reward": ("F32", [], False)},
          episodes=[{"obs": obs, "action": actions, "reward": rewards, "end": "truncated"}, ...])

The leaves are those of the Rust `Step`, by name. An episode of L steps has L values of each leaf and L + 1 of an
observation, the last being what was observed behind the last step; `end` is "terminated" or "truncated". Values may be
bytes in native order (little-endian), anything with `tobytes()` (a NumPy array of the right element type), or nested lists
of numbers. Lanes are dealt out in turn: give `lanes` no more than the feed has.

The form is that of safetensors (https://github.com/huggingface/safetensors), whose library reads it too. Run by itself
with a path, this writes a small example there.
"""

import json
import struct
import sys

CODES = {"BOOL": "?", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "Q", "I64": "q",
         "F16": "e", "F32": "f", "F64": "d"}
TERMINATED, TRUNCATED, FIRST, LAST = 1, 2, 8, 16


def _flat(values):
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)
    else:
        yield values


def _bytes(dtype, values):
    if isinstance(values, (bytes, bytearray, memoryview)):
        return bytes(values)
    if hasattr(values, "tobytes"):
        return values.tobytes()
    values = list(_flat(values))
    return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)


def write(path, leaves, episodes, lanes=1):
    """Writes `episodes` to `path`; see the text of this module."""
    data = {name: bytearray() for name in leaves}
    lane_of, step_of, age_of, flags = [], [], [], []
    steps = [0] * lanes
    for number, episode in enumerate(episodes):
        lane, length = number % lanes, None
        for name, (dtype, shape, observation) in leaves.items():
            size = struct.calcsize("<" + CODES.get(dtype, "H"))
            for dim in shape:
                size *= dim
            values = _bytes(dtype, episode[name])
            count, rest = divmod(len(values), size)
            count -= int(observation)
            if rest or count < 1 or length not in (None, count):
                raise ValueError(f"episode {number}: leaf {name!r} has {len(values)} bytes, not a whole episode's")
            length = count
            data[name] += values if observation else values + bytes(size)  # nothing but observations behind the end
        end = {"terminated": TERMINATED, "truncated": TRUNCATED}[episode["end"]]
        for at in range(length + 1):
            lane_of.append(lane)
            step_of.append(steps[lane] + at)
            age_of.append(at)
            flags.append(LAST if at == length else FIRST * (at == 0) | end * (at + 1 == length))
        steps[lane] += length
    rows = len(flags)
    arrays = [(name, dtype, [rows] + list(shape), bytes(data[name])) for name, (dtype, shape, _) in leaves.items()]
    arrays += [(f"pinring/{name}", dtype, [rows], _bytes(dtype, values)) for name, dtype, values in [
        ("step", "U64", step_of), ("version", "U64", [0] * rows), ("lane", "U32", lane_of), ("age", "U32", age_of),
        ("flags", "U8", flags)]]
    header, at = {"__metadata__": {"pinring": "store 1"}}, 0
    for name, dtype, shape, values in arrays:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(values)]}
        at += len(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, values in arrays:
            file.write(values)


def example(path):
    """An episode of three steps that terminates, and one of two that is truncated."""
    episodes = [{"obs": [[float(e), float(k)] for k in range(length + 1)],
                 "action": [10 * e + k for k in range(length)],
                 "reward": [float(k + 1) for k in range(length)],
                 "end": end}
                for e, (length, end) in enumerate([(3, "terminated"), (2, "truncated")])]
    write(path, {"obs": ("F32", [2], True), "action": ("I64", [], False), "reward": ("F32", [], False)}, episodes)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} PATH")
    example(sys.argv[1])
