"""Runs the peers and prints a line of JSON for each figure.

    python3 scripts/peers/run.py [--quick] [--turns N] [--device cuda|cpu] [NAME…]

Names: copies, gather, dataloader, torchrl_replay, echo_fifo. A peer that is not installed says so in its line. Without a
CUDA device: `skipped: no CUDA device`, unless `--device cpu` asks to see the scripts run, which says nothing about speed.
"""

import argparse
import importlib
import sys

sys.dont_write_bytecode = True  # the folder may be read-only

NAMES = ("copies", "gather", "dataloader", "torchrl_replay", "echo_fifo")


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
    try:
        import torch
    except ImportError as error:
        print(f"skipped: PyTorch is not installed: {error}")
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device: torch.cuda.is_available() is False")
        return 0
    import workloads

    clock = workloads.Clock(arguments.device, arguments.turns or (10 if arguments.quick else 50))
    name_of_device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    workloads.say(peer="host", torch=torch.__version__, device=name_of_device, python=sys.version.split()[0])
    failed = False
    for name in arguments.names or NAMES:
        try:
            importlib.import_module(name).run(clock, arguments.quick)
        except ImportError as error:
            workloads.say(peer=name, result="not installed", error=str(error))
        except Exception as error:  # the other peers still have their turn
            failed = True
            workloads.say(peer=name, result="failed", error=f"{type(error).__name__}: {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
