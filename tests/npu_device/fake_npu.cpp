// A fake NPU in host memory, for tests. Eight devices with memory counters and a limit, generators, streams that run
// everything at once, and every operator of torch computed on the host. Like a real device it refuses tensors of
// another device and use after a fork.
#include "fake_npu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/item.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace fake_npu {
namespace {

constexpr int kNumDevices = 8;
using Index = c10::DeviceIndex;

// ---- devices ----

std::atomic<bool> g_started{false}; // this process has used a device
std::atomic<bool> g_bad_fork{false}; // this process was forked from one that had
thread_local Index t_device = 0;

// Devices this process sees: as many as the variable names, all without it.
int visible() {
  const char* names = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (names == nullptr) {
    return kNumDevices;
  }
  int count = 0;
  std::string name;
  for (const char* c = names;; c++) {
    if (*c != ',' && *c != '\0') {
      name += *c;
      continue;
    }
    count += !name.empty() && name != "NoDevFiles";
    name.clear();
    if (*c == '\0') {
      return std::min(count, kNumDevices);
    }
  }
}

Index resolve(c10::Device device) {
  return device.has_index() ? device.index() : t_device;
}

void start(Index index) {
  TORCH_CHECK(
      !g_bad_fork,
      "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' "
      "start method");
  TORCH_CHECK(
      index >= 0 && index < visible(), "npu: invalid device ordinal ", int(index), ", this process sees ", visible());
  g_started = true;
}

Index exchange(Index index) {
  auto old = t_device;
  if (index >= 0 && index != old) {
    start(index);
    t_device = index;
  }
  return old;
}

// ---- memory ----

struct Counters {
  int64_t allocated = 0, peak = 0;
};
std::mutex g_mutex; // of the four below
std::array<Counters, kNumDevices> g_counters;
std::unordered_map<void*, std::pair<int64_t, Index>> g_blocks;
std::unordered_set<void*> g_pinned;
int64_t g_total = int64_t(64) << 30; // bytes of each device

void release(void* block) {
  if (block == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = g_blocks.find(block);
  TORCH_INTERNAL_ASSERT(found != g_blocks.end(), "fake npu: freed memory that it does not own");
  g_counters[found->second.second].allocated -= found->second.first;
  g_blocks.erase(found);
  c10::free_cpu(block);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto index = t_device;
    auto bytes = static_cast<int64_t>(size);
    start(index);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, {kNpu, index}};
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    auto& counters = g_counters[index];
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        counters.allocated + bytes <= g_total,
        "NPU out of memory. Tried to allocate ", bytes, " bytes (NPU ", int(index), "; ", g_total,
        " bytes total capacity; ", counters.allocated, " bytes already allocated)");
    void* block = c10::alloc_cpu(size);
    std::memset(block, 0xA5, size); // a device does not hand out zeros
    g_blocks[block] = {bytes, index};
    counters.allocated += bytes;
    counters.peak = std::max(counters.peak, counters.allocated);
    return {block, block, &release, {kNpu, index}};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
} g_memory;
REGISTER_ALLOCATOR(kNpu, &g_memory)

void release_pinned(void* block) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_pinned.erase(block);
  c10::free_cpu(block);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> lock(g_mutex);
    g_pinned.insert(block);
    return {block, block, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
} g_pinned_memory;

// ---- streams: every one of them runs its work at once ----

std::atomic<c10::StreamId> g_last_stream{0};
thread_local std::array<c10::StreamId, kNumDevices> t_streams{};

c10::Stream stream(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {kNpu, resolve(device)}, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kNpu;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNpu, exchange(device.index())};
  }
  c10::Device getDevice() const override {
    return {kNpu, t_device};
  }
  void setDevice(c10::Device device) const override {
    exchange(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    t_device = resolve(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kNumDevices; // of the machine: autograd starts a thread for each, once in a process
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, t_streams[resolve(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device, ++g_last_stream);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ++g_last_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto& current = t_streams[next.device_index()];
    auto old = stream(next.device(), current);
    current = next.id();
    return old;
  }
  void record(void** event, const c10::Stream&, const Index, const c10::EventFlag) const override {
    *event = &g_last_stream; // any address: it is never read
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const Index) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- generators ----

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(Index index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = {kNpu, index};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(Index index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (Index i = 0; i < kNumDevices; i++) {
      made.push_back(at::make_generator<Generator>(i));
    }
    return made;
  }();
  return all.at(index < 0 ? t_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return visible() > 0;
  }
  bool hasPrimaryContext(Index) const override {
    return g_started;
  }
  void init() const override {}
  Index deviceCount() const override {
    return static_cast<Index>(visible());
  }
  Index getCurrentDevice() const override {
    return t_device;
  }
  void setCurrentDevice(Index index) const override {
    exchange(index);
  }
  Index exchangeDevice(Index index) const override {
    return exchange(index);
  }
  Index maybeExchangeDevice(Index index) const override {
    return exchange(index);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(g_mutex);
    return g_pinned.count(const_cast<void*>(data)) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &g_pinned_memory;
  }
  const at::Generator& getDefaultGenerator(Index index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(Index index) const override {
    return at::make_generator<Generator>(index < 0 ? t_device : index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto found = g_blocks.find(data);
    TORCH_CHECK(found != g_blocks.end(), "fake npu: this memory is on no device");
    return {kNpu, found->second.second};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto next = g_memory.allocate(size);
    if (auto kept = std::min(size, storage.nbytes())) {
      std::memcpy(next.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(next));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---- operators ----

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.device().type() == kNpu ? host_view(tensor) : tensor;
}

c10::Device target(std::optional<at::Device> device) {
  return {kNpu, device.has_value() ? resolve(*device) : t_device};
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(target(device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &g_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(target(device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &g_memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return on_host(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

void record_stream(at::Tensor&, c10::Stream) {}

// As on a real device: one device for all tensors of an operator, but for numbers in host memory, and for indices.
std::optional<c10::Device> check_one_device(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto& name = op.schema().name();
  const bool index_may_differ = name.find("index_put") != std::string::npos || name == "aten::index";
  std::optional<c10::Device> first;
  auto check = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0) || (tensor.is_cpu() && index_may_differ)) {
      return;
    }
    TORCH_CHECK(
        !first.has_value() || *first == tensor.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        first.value_or(c10::Device(kNpu)), " and ", tensor.device(), " (in ", op.schema().name(), ")");
    first = tensor.device();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      check(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorList()) {
        check(tensor);
      }
    } else if (argument.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorList()) {
        check(tensor.value_or(at::Tensor()));
      }
    }
  }
  return first;
}

// The generator of the device instead of the host's, for the operators that draw numbers.
struct Draws {
  Draws(const c10::OperatorHandle& op, torch::jit::Stack* stack, Index index)
      : host_(at::detail::getDefaultCPUGenerator()), device_(default_generator(index)) {
    for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++) {
      if ((*stack)[i].isGenerator()) {
        device_ = (*stack)[i].toGenerator();
        (*stack)[i] = c10::IValue();
      }
    }
    TORCH_CHECK(device_.device().type() == kNpu, "Expected a 'npu' device type for generator but found 'cpu'");
    saved_ = host_.get_state();
    host_.set_state(device_.get_state());
  }
  ~Draws() {
    device_.set_state(host_.get_state());
    host_.set_state(saved_);
  }
  at::Generator host_, device_;
  at::Tensor saved_;
};

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto device = check_one_device(op, torch::jit::last(*stack, op.schema().arguments().size()));
  std::optional<Draws> draws;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    draws.emplace(op, stack, device.has_value() ? resolve(*device) : t_device);
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
}

} // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kNpu, "fake npu: got a tensor on ", tensor.device(), ", need one on npu");
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(
      tensor.storage().mutable_data(),
      owner,
      [](void* kept) { delete static_cast<c10::Storage*>(kept); },
      c10::Device(c10::kCPU));
  c10::Storage bytes(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(bytes), keys, tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

} // namespace fake_npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake_npu;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(nullptr, nullptr, [] { g_bad_fork = g_started.load(); });
  m.def("device_count", &visible);
  m.def("current_device", [] { return int(t_device); });
  m.def("set_device", [](int index) {
    start(Index(index));
    t_device = Index(index);
  });
  m.def("is_initialized", [] { return g_started && !g_bad_fork; });
  m.def("is_in_bad_fork", [] { return g_bad_fork.load(); });
  m.def("allocated_bytes", [](int index) {
    std::lock_guard<std::mutex> lock(g_mutex);
    return g_counters.at(index).allocated;
  });
  m.def("peak_bytes", [](int index) {
    std::lock_guard<std::mutex> lock(g_mutex);
    return g_counters.at(index).peak;
  });
  m.def("reset_peak", [](int index) {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_counters.at(index).peak = g_counters.at(index).allocated;
  });
  m.def("total_bytes", [] { return g_total; });
  m.def("set_total_bytes", [](int64_t bytes) { g_total = bytes; });
  m.def("default_generator", [](int index) { return default_generator(Index(index)); });
  bind_hccl(m);
}
