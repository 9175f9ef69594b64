"""Makes src/gather/kernel.ptx of src/gather/kernel.cu. Needs no GPU, no driver and no toolkit.

    python3 -m venv venv && venv/bin/pip install nvidia-cuda-nvrtc-cu11==11.8.89 nvidia-cuda-nvcc-cu12
    venv/bin/python scripts/kernel/build.py

The compiler of CUDA 11.8 writes PTX for compute capability 7.5 that every later driver and device compiles for itself. Its
`.version` is lowered to the least one that has all instructions, so that older drivers take it too; where `ptxas` is
installed, what came out is assembled for a range of devices.
"""

import ctypes
import importlib.util
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parents[2] / "src" / "gather"
TARGET, VERSION = "compute_75", "6.4"
DEVICES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def main():
    source = (HERE / "kernel.cu").read_bytes()
    ptx = compiled(source)
    ptx = re.sub(r"^\.version .*$", f".version {VERSION}", ptx, flags=re.M)
    lines = [line for line in ptx.splitlines() if not line.startswith("//")]
    head = [
        "// Made by scripts/kernel/build.py of kernel.cu, of which this is the FNV-1a hash:",
        f"// {fnv(source):016x}",
    ]
    path = HERE / "kernel.ptx"
    path.write_text("\n".join(head + lines).strip() + "\n")
    assemble(path)


def fnv(data):
    """64 bits; a test of the crate computes it again, to see that the PTX is that of the source."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def compiled(source):
    library = next(package("cuda_nvrtc").glob("lib/libnvrtc.so.*"))
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None))
    options = [f"--gpu-architecture={TARGET}".encode(), b"--fmad=false"]
    result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    print(text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program), end="", file=sys.stderr)
    check(result)
    return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)


def text(size_of, get, program):
    size = ctypes.c_size_t()
    check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    check(get(program, buffer))
    return buffer.value.decode()


def check(result):
    if result != 0:
        sys.exit(f"nvrtc answered {result}")


def assemble(path):
    ptxas = package("cuda_nvcc") and package("cuda_nvcc") / "bin" / "ptxas"
    if not ptxas or not ptxas.exists():
        print("ptxas is not installed: not assembled")
        return
    for device in DEVICES:
        run = subprocess.run([ptxas, "-v", f"-arch={device}", path, "-o", "/dev/null"], capture_output=True, text=True)
        used = re.search(r"Used (\d+) registers", run.stderr)
        if run.returncode:
            sys.exit(f"{device}: {run.stderr}")
        print(f"{device}: {used.group(0) if used else 'assembled'}")


def package(name):
    found = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(folder) / name for folder in found.submodule_search_locations] if found else []
    return next((folder for folder in folders if folder.is_dir()), None)


if __name__ == "__main__":
    main()
