// A fake HCCL, for tests: collectives of the fake NPU, carried out by gloo on the same bytes.
#include "fake_npu.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace fake_npu {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) {
    views.push_back(host_view(tensor));
  }
  return views;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const auto& list : lists) {
    views.push_back(on_host(list));
  }
  return views;
}

class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "hccl";
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto views = on_host(tensors);
    return gloo_->allreduce(views, options);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = on_host(tensors);
    return gloo_->broadcast(views, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto views = on_host(tensors);
    return gloo_->reduce(views, options);
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo_->allgather(to, from, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = host_view(output), from = host_view(input);
    return gloo_->_allgather_base(to, from, options);
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options)
      override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo_->reduce_scatter(to, from, options);
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options)
      override {
    auto to = host_view(output), from = host_view(input);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  Work alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = host_view(output), from = host_view(input);
    return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
  }
  Work send(Tensors& tensors, int rank, int tag) override {
    auto views = on_host(tensors);
    return gloo_->send(views, rank, tag);
  }
  Work recv(Tensors& tensors, int rank, int tag) override {
    auto views = on_host(tensors);
    return gloo_->recv(views, rank, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void abort() override {
    gloo_->abort();
  }
  void shutdown() override {
    gloo_->shutdown();
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

void bind_hccl(py::module& module) {
  module.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(std::move(gloo));
  });
}

} // namespace fake_npu
