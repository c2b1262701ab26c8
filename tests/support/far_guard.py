"""The device guard that PyTorch without CUDA lacks: its dispatcher asks the guard for the current device."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from kernels.cpu.build import compiler

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Device one() const { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return one(); }
  c10::Device getDevice() const override { return one(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""


def build_guard(folder: Path) -> None:
    """Build and load the guard in ``folder``. A process calls this once, before `far_device.far_device`."""
    torch_folder = Path(torch.__file__).parent
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run([*compiler(), str(source), *flags, "-o", str(library)], check=True, timeout=120)
    torch.ops.load_library(str(library))
