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
bytes (little-endian, taken as they are), a NumPy array of exactly that element type and shape, an `array.array`, or nested
lists of numbers; what does not fit is a ValueError that names the leaf. Lanes are dealt out in turn: give `lanes` no more
than the feed has. Leaves that a step keeps on every k-th step only (`every`) cannot be written so.

The form is that of safetensors (https://github.com/huggingface/safetensors), whose library reads it too. Run by itself
with a path, this writes a small example there.
"""

import json
import struct
import sys

CODES = {"BOOL": "?", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "Q", "I64": "q",
         "F16": "e", "F32": "f", "F64": "d"}
NUMPY = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
         "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
TERMINATED, TRUNCATED, FIRST, LAST = 1, 2, 8, 16


def _size(dtype):
    if dtype not in NUMPY:
        raise ValueError(f"{dtype!r} is no element type; they are {', '.join(NUMPY)}")
    return 2 if dtype == "BF16" else struct.calcsize("<" + CODES[dtype])


def _flat(values):
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)
    else:
        yield values


def _bytes(dtype, shape, values):
    """The bytes of so many values of this shape, little-endian; a ValueError where they are others."""
    if isinstance(values, (bytes, bytearray, memoryview)):
        return bytes(values)
    if hasattr(values, "dtype") and hasattr(values, "astype"):
        if values.dtype.name != NUMPY[dtype]:
            raise ValueError(f"is of {values.dtype.name}, and should be of {NUMPY[dtype]}")
        if tuple(values.shape[1:]) != tuple(shape) or not values.shape:
            should = ", ".join(["steps", *map(str, shape)])
            raise ValueError(f"has shape {list(values.shape)}, and should have [{should}]")
        return values.astype(values.dtype.newbyteorder("<")).tobytes()
    if hasattr(values, "typecode"):
        if values.itemsize != _size(dtype) or (values.typecode in "fd") != dtype.startswith("F"):
            raise ValueError(f"is an array of {values.typecode!r}, and should be of {NUMPY[dtype]}")
        if sys.byteorder == "big":
            values = values[:]
            values.byteswap()
        return values.tobytes()
    if dtype not in CODES:
        raise ValueError(f"has to be bytes or an array, being of {NUMPY[dtype]}")
    values = list(_flat(values))
    try:
        return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)
    except struct.error as error:
        raise ValueError(f"cannot be of {NUMPY[dtype]}: {error}") from error


def write(path, leaves, episodes, lanes=1):
    """Writes `episodes` to `path`; see the text of this module."""
    data = {name: bytearray() for name in leaves}
    lane_of, step_of, age_of, flags = [], [], [], []
    steps = [0] * lanes
    for number, episode in enumerate(episodes):
        lane, length, of = number % lanes, None, None
        for name, (dtype, shape, observation) in leaves.items():
            size = _size(dtype)
            for dim in shape:
                size *= dim
            if name not in episode:
                raise ValueError(f"episode {number}: there is no leaf {name!r}")
            try:
                values = _bytes(dtype, shape, episode[name])
            except ValueError as error:
                raise ValueError(f"episode {number}: leaf {name!r} {error}") from error
            count, rest = divmod(len(values), size)
            if rest or count < 1 + int(observation):
                raise ValueError(f"episode {number}: leaf {name!r} has {len(values)} bytes, not values of {size} for each step"
                                 + (" and one behind the last" if observation else ""))
            count -= int(observation)
            if length not in (None, count):
                raise ValueError(f"episode {number}: leaf {name!r} has {count} steps, and leaf {of!r} has {length}")
            length, of = count, name
            data[name] += values if observation else values + bytes(size)  # nothing but observations behind the end
        end = {"terminated": TERMINATED, "truncated": TRUNCATED}.get(episode.get("end"))
        if end is None:
            raise ValueError(f"episode {number}: its end is {episode.get('end')!r}, not 'terminated' or 'truncated'")
        for at in range(length + 1):
            lane_of.append(lane)
            step_of.append(steps[lane] + at)
            age_of.append(at)
            flags.append(LAST if at == length else FIRST * (at == 0) | end * (at + 1 == length))
        steps[lane] += length
    rows = len(flags)
    arrays = [(name, dtype, [rows] + list(shape), bytes(data[name])) for name, (dtype, shape, _) in leaves.items()]
    arrays += [(f"pinring/{name}", dtype, [rows], _bytes(dtype, [], values)) for name, dtype, values in [
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
