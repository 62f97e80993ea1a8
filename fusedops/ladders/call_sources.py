"""C++ of the paths from Python to a kernel that are compiled: for pybind11 and for tvm-ffi.

``cuLaunchKernel`` comes as an address, so that neither CUDA headers nor the driver is needed to
build them.
"""

from __future__ import annotations

__all__ = ["PYBIND_SOURCE", "TVM_FFI_SOURCE"]

_LAUNCH = """
using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);

static void launch_chain(void* x, int count, int64_t launch, int64_t function, int64_t stream) {
  int rounds = 1;
  void* parameters[] = {&x, &rounds, &count};
  const int status = reinterpret_cast<Launch>(launch)(
      reinterpret_cast<void*>(function), 1, 1, 1, static_cast<unsigned>(count), 1, 1, 0,
      reinterpret_cast<void*>(stream), parameters, nullptr);
  if (status != 0) throw std::runtime_error("cuLaunchKernel failed: " + std::to_string(status));
}
"""

PYBIND_SOURCE = f"""
#include <stdexcept>
#include <string>
{_LAUNCH}
void chain(const at::Tensor& x, int64_t launch, int64_t function, int64_t stream) {{
  launch_chain(x.data_ptr(), static_cast<int>(x.numel()), launch, function, stream);
}}
"""

TVM_FFI_SOURCE = f"""
#include <tvm/ffi/container/tensor.h>

#include <stdexcept>
#include <string>
{_LAUNCH}
void chain(tvm::ffi::TensorView x, int64_t launch, int64_t function, int64_t stream) {{
  launch_chain(x.data_ptr(), static_cast<int>(x.numel()), launch, function, stream);
}}
"""
