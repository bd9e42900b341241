// A fake NPU in host memory, for tests: what its two source files share.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

namespace fake_npu {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// The bytes of an npu tensor as a cpu tensor: nothing is copied, the memory lives as long as either.
at::Tensor host_view(const at::Tensor& tensor);

void bind_hccl(py::module& module);

} // namespace fake_npu
