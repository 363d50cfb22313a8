"""A configuration compiled for sm_90 by the installed Triton; no GPU is needed."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from evidence.machine_code.launches import HOPPER, Configuration

# EIATTR_REGCOUNT, the note of a kernel's number of registers. nvdisasm 12.8 has no table for 255,
# which include two that no instruction names.
ALL_REGISTERS = re.compile(rb"(\x04\x2f\x08\x00.{4})\xff\0\0\0", re.DOTALL)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled(NamedTuple):
    """What Triton gave ptxas, and what ptxas made of it."""

    ptx: str
    cubin: bytes


def compiled(configuration: Configuration) -> Compiled:
    """The code of a configuration; raises what Triton raises."""
    kernel = configuration.kernel
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, configuration.signature, configuration.constants, configuration.attributes
    )
    built = triton.compile(source, target=HOPPER, options=configuration.options)
    return Compiled(built.asm["ptx"], built.asm["cubin"])


def listing(cubin: bytes) -> str:
    """nvdisasm's text of the code, with the registers that each instruction reads and writes.

    Raises:
        RuntimeError: nvdisasm refuses.
    """
    cubin = ALL_REGISTERS.sub(lambda note: note[1] + bytes([254, 0, 0, 0]), cubin)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", "-lrm", "narrow", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip() or done.returncode}")
    return done.stdout


def versions() -> dict[str, str]:
    """The versions that the machine code depends on."""
    output = subprocess.run([str(TOOLS / "ptxas"), "--version"], capture_output=True, text=True, check=True).stdout
    return {"triton": triton.__version__, "ptxas": output.rpartition("V")[2].split()[0]}
