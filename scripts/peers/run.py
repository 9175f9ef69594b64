"""Runs the peers and prints a line of JSON for each figure.

    python3 scripts/peers/run.py [--quick] [--turns N] [--device cuda|cpu] [NAME…]

Names: selection, copies, gather, dataloader, torchrl_replay, echo_fifo. A peer that is not installed says so in its line.
`selection` runs on the host. The others need PyTorch and a CUDA device, or say `skipped: …`; `--device cpu` asks to see
them run without one, which says nothing about speed.
"""

import argparse
import importlib
import sys

sys.dont_write_bytecode = True  # the folder may be read-only

from lines import say

ON_THE_HOST = ("selection",)
NAMES = ON_THE_HOST + ("copies", "gather", "dataloader", "torchrl_replay", "echo_fifo")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in NAMES:
            parser.error(f"{name} is not one of {', '.join(NAMES)}")
    names = arguments.names or NAMES
    failed = [name for name in names if name in ON_THE_HOST and not ran(name, None, arguments.quick)]
    names = [name for name in names if name not in ON_THE_HOST]
    if names:
        clock = clock_of(arguments)
        failed += [name for name in names if clock is not None and not ran(name, clock, arguments.quick)]
    return int(bool(failed))


def clock_of(arguments):
    """The clock, if there is a device to time."""
    try:
        import torch
    except ImportError as error:
        print(f"skipped: PyTorch is not installed: {error}")
        return None
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device: torch.cuda.is_available() is False")
        return None
    import workloads

    name_of_device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    say(peer="host", torch=torch.__version__, device=name_of_device, python=sys.version.split()[0])
    return workloads.Clock(arguments.device, arguments.turns or (10 if arguments.quick else 50))


def ran(name, clock, quick):
    """Runs a peer. One that is not installed is no failure."""
    try:
        importlib.import_module(name).run(clock, quick)
    except ImportError as error:
        say(peer=name, result="not installed", error=str(error))
    except Exception as error:  # the other peers still have their turn
        say(peer=name, result="failed", error=f"{type(error).__name__}: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
